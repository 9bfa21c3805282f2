"""Bindings to the native library, the world of ranks, and the error classes."""
