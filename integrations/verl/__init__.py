"""Integration with verl: the plug-in module and the features' adapters."""
