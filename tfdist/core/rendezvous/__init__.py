"""Finds, authenticates and connects the ranks of a job.

`environment` reads which rank this process is, `secret` reads or keeps the job's
secret, `store` is the small authenticated key/value server at which all ranks meet, and
`mesh` creates one link for each pair of ranks. This package does not import TensorFlow.
"""
