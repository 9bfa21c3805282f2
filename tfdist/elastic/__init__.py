"""Training that continues when a rank is lost; see docs/elastic.md.

Example:
    >>> import tensorflow as tf, tfdist
    >>> tfdist.init()
    >>> w = tf.Variable(0.0)
    >>> state = tfdist.elastic.State(w)
    >>> for step in state.steps(3):
    ...     _ = w.assign_add(1.0)
    ...     _ = state.commit()
    >>> float(w)
    3.0
"""

from tfdist.elastic.state import State

__all__ = ["State"]
