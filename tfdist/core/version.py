"""The version of the package, which all ranks compare."""

__version__ = "0.1.0"
