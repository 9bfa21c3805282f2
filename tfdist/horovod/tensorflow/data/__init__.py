"""Horovod's tf.data service by its names: what it needs is not there, and it says so.

`tfdist.data.scatter` does what it was for: few ranks read for all.
"""
