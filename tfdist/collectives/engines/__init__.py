"""Engines other than the native one; `tfdist.core.engines` defines the interface."""
