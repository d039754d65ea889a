"""Functions that slime's flags name by dotted path. :mod:`.custom_config` lists the flags."""
