"""The native library through ctypes, the world of ranks, and the errors of both."""
