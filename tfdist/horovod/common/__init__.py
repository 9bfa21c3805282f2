"""What Horovod's frameworks share: who this process is, process sets, errors.

Needs no TensorFlow.
"""
