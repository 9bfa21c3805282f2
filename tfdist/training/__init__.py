"""The optimizer, evaluation, prediction, and code shared with the callbacks."""
