"""`horovod.runner.common.util`: the parts that programs and their tests import."""
