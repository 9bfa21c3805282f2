"""Engines other than the native one; `tfdist.core.engines` has the interface."""
