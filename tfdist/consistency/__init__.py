"""Checks at run time that all ranks train the same model, and on different data."""
