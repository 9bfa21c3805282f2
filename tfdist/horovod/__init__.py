"""Horovod's API, implemented with tfdist, so that Horovod scripts run unchanged.

The modules mirror Horovod's: `tfdist.horovod.tensorflow`, `.tensorflow.keras`, `.keras`
and so on. With `tfdistrun --horovod script.py`, `import horovod.tensorflow as hvd`
loads these modules. This option also enables the Keras 2 spellings and a check that
gradients are reduced. `activate()` only makes `import horovod` load tfdist
(docs/from-horovod.md).

Example:
    >>> import tfdist.horovod
    >>> tfdist.horovod.activate()
    >>> import horovod
    >>> horovod is tfdist.horovod
    True
"""

from typing import Any

from tfdist.horovod._alias import activate, advice_for

__version__ = "0.28.1"  # the Horovod version that defines these names

__all__ = ["__version__", "activate"]


def __getattr__(name: str) -> Any:
    """Returns `horovod.run`; for other names, raises AttributeError with advice."""
    if name == "run":
        from tfdist.horovod.runner import run

        return run
    text = f"module 'horovod' has no attribute {name!r}"
    raise AttributeError(": ".join(filter(None, (text, advice_for(name)))))
