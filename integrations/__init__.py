"""Adapters for the frameworks' official extension points. A subpackage is imported only together with the framework."""
