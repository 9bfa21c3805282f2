"""The optimizer, evaluation, prediction, restoring, and code shared with callbacks."""
