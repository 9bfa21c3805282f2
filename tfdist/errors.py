"""Exceptions raised by tfdist.

Each class is a subclass of the TensorFlow error with the same meaning, and carries a
record of the rank and the cause. Eager functions of tfdist raise these classes, and so
does `model.fit` with a tfdist callback. Inside a `tf.function`, and in `fit` without
such a callback, TensorFlow raises its own class; `from_tf` converts it to the tfdist
class::

    try:
        model.fit(...)
    except tf.errors.OpError as e:
        failure = tfdist.errors.from_tf(e)
        if failure is not None:
            print(failure.record.rank, failure.record.cause)
"""

from tfdist.core.exceptions import (
    ErrorRecord,
    EvictedError,
    MismatchError,
    NotInitializedError,
    RankFailedError,
    ThreadError,
    TimeoutError,
    from_core,
    from_tf,
    translate,
)

__all__ = [
    "ErrorRecord",
    "EvictedError",
    "MismatchError",
    "NotInitializedError",
    "RankFailedError",
    "ThreadError",
    "TimeoutError",
    "from_core",
    "from_tf",
    "translate",
]
