"""`horovod.runner.util`: the parts that programs and their tests import."""
