"""`horovod.runner.common`."""
