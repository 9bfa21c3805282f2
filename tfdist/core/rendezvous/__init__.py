"""Finds, authenticates and connects the ranks of a job.

`environment` reads who this process is, `secret` where the job's secret lies,
`store` is the small authenticated key/value server everybody meets at, `mesh`
makes one link for each pair of ranks. Nothing here imports TensorFlow.
"""
