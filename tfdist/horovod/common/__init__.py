"""Parts shared by Horovod's frameworks: ranks and sizes, process sets, errors.

Needs no TensorFlow.
"""
