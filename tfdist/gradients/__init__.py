"""Averaging of gradients: the tape, gradient lists, buckets, compression."""
