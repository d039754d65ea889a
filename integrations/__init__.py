"""Adapters on the official extension points of the frameworks. A subpackage is imported only when its framework is."""
