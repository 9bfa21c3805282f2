"""Engine that sends tensors through an installed Horovod (docs/horovod-engine.md).

`_start` connects Horovod with the ranks that the core has already connected; `_store`
is the rendezvous store that Horovod needs; `_operations` emits Horovod's TensorFlow
operations; `_types` lists the dtypes that they support. This engine is for sites whose
network is tuned for Horovod, and for comparisons. The native engine supports more
operations, and is safer.
"""

from __future__ import annotations

from tfdist.collectives.engines.horovod._engine import HorovodEngine


def make() -> HorovodEngine:
    """Returns the engine without starting it."""
    return HorovodEngine()
