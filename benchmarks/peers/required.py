"""The marks of this project: which ratios it wants, and how large.

Adding one is adding a `Mark` to the list of its task.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.peers.catalogue import PEERS, SIZES
from benchmarks.peers.marks import Mark, Round, limit_gb_s
from benchmarks.peers.text import size_text

KIB, MIB = 1 << 10, 1 << 20
CORE = "tfdist-core"
MPI = tuple(name for name, peer in PEERS.items() if peer.worker == "on_mpi.py")
BELOW_TENSORFLOW = (*MPI, "torch-gloo")
PART_OF_LIMIT = 0.65


def _faster(
    title: str, required: float, own: str, others: Sequence[str], case: str
) -> Mark:
    def ratio(one: Round) -> float | None:
        return one.ratio(others, own, case)

    return Mark(title, required, ratio)


def _part_of_limit(size_bytes: int) -> Mark:
    def ratio(one: Round) -> float | None:
        mine = one.times.get((CORE, f"allreduce/{size_bytes}"))
        if mine is None:
            return None
        return size_bytes / mine * 1e-9 / limit_gb_s(one.add_gb_s, one.copy_gb_s)

    title = f"{size_text(size_bytes)}: {CORE} / limit of the memory"
    return Mark(title, PART_OF_LIMIT, ratio)


def _core_required(size_bytes: int, ranks: int) -> float | None:
    """How many times faster than the fastest peer; None: nothing is asked."""
    if ranks > 2:
        if size_bytes < 16 * KIB:
            return None
        return 2.0 if size_bytes >= 16 * MIB else 1.0
    if size_bytes < 256 * KIB:
        return 0.5
    return 1.3 if size_bytes >= 4 * MIB else 1.0


def _of_sizes(sizes: Iterable[int], ranks: int) -> list[Mark]:
    found = []
    others = BELOW_TENSORFLOW if ranks > 2 else MPI
    name = "fastest peer" if ranks > 2 else "fastest MPI"
    for size_bytes in sizes:
        case, text = f"allreduce/{size_bytes}", size_text(size_bytes)
        required = _core_required(size_bytes, ranks)
        if required is not None:
            title = f"{text}: {name} / {CORE}"
            found.append(_faster(title, required, CORE, others, case))
        if ranks == 2 and size_bytes >= 16 * MIB:
            found.append(_part_of_limit(size_bytes))
    return found


def marks(task: str, sizes: Iterable[int], ranks: int) -> list[Mark]:
    """Those of a task that the measured sizes and ranks have.

    Args:
        task: of `catalogue`.
        sizes: in bytes, of `sizes`.
        ranks: how many.
    """
    return {SIZES: _of_sizes}[task](sorted(sizes), ranks)
