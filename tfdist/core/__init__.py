"""The native library through ctypes, the world of ranks, and their errors."""
