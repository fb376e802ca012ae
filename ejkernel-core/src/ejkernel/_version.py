"""The version, which all distributions share."""

__version__ = "0.1.0"
