"""Engines beside the native one; `tfdist.core.engines` says what one is."""
