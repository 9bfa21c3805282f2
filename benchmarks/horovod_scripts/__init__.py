"""Scripts for Horovod under tfdist and under Horovod itself: the same losses.

`python -m benchmarks.horovod_scripts --help` has the command, docs/from-horovod.md what
it compares.
"""
