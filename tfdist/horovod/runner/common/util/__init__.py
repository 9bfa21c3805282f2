"""`horovod.runner.common.util`: what programs and their tests import from it."""
