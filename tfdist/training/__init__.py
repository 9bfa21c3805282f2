"""The optimizer, evaluation, prediction, and what they share with the callbacks."""
