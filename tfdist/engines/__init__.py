"""Engines beside the native one; `tfdist._engine` says what one is."""
