"""Averaging of gradients: the tape, lists of gradients, buckets, compression."""
