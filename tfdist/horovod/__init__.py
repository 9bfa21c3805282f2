"""Horovod's interface over tfdist: scripts written for Horovod run as they are.

The modules mirror Horovod's: `tfdist.horovod.tensorflow`, `.tensorflow.keras`, `.keras`
and so on. `tfdistrun --horovod script.py` lets `import horovod.tensorflow as hvd` mean
them, with the spellings of Keras 2 and a check that gradients are reduced;
`activate()` does the first of these alone (docs/from-horovod.md).

Example:
    >>> import tfdist.horovod
    >>> tfdist.horovod.activate()
    >>> import horovod
    >>> horovod is tfdist.horovod
    True
"""

from typing import Any

from tfdist.horovod._alias import activate, advice_for

__version__ = "0.28.1"  # of the Horovod whose names these are

__all__ = ["__version__", "activate"]


def __getattr__(name: str) -> Any:
    """`horovod.run`; of what else is not there, says what to do without it."""
    if name == "run":
        from tfdist.horovod.runner import run

        return run
    text = f"module 'horovod' has no attribute {name!r}"
    raise AttributeError(": ".join(filter(None, (text, advice_for(name)))))
