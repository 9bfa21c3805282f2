"""Checks at run time that all ranks train the same model, on different data."""
