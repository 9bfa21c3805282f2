"""Finds, authenticates and connects the ranks of a job.

`environment` determines the rank of this process, `secret` reads or keeps the job's
secret, `store` is the small authenticated key/value server at which all ranks meet, and
`mesh` creates the links between the ranks. This package does not import TensorFlow.
"""
