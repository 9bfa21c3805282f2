"""The engine that sends tensors through an installed Horovod (docs/horovod-engine.md).

`_start` connects Horovod with the ranks that the core has connected already; `_store`
is the meeting point that Horovod asks for; `emit` emits Horovod's TensorFlow
operations; `_types` has the types that they support. For sites whose network is tuned
for Horovod, and for comparing: the native engine does more, and more safely.
"""

from __future__ import annotations

from tfdist.collectives.engines.horovod._engine import HorovodEngine


def make() -> HorovodEngine:
    """Returns the engine, not started."""
    return HorovodEngine()
