"""The version of the package, which the ranks compare."""

__version__ = "0.1.0"
