"""`horovod.runner.util`: what programs and their tests import from it."""
