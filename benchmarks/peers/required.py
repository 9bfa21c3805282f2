"""The marks of this project: which ratios it wants, and how large.

To add one, add a `Mark` to the list of its task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from benchmarks.peers.catalogue import GRADIENTS, PEERS, SIZES, TRAINING
from benchmarks.peers.marks import Cell, Mark, Round, limit_gb_s
from benchmarks.peers.text import size_text

KIB, MIB = 1 << 10, 1 << 20
OP, CORE = "tfdist", "tfdist-core"
MPI = tuple(name for name, p in PEERS.items() if "on_mpi.py" in p.workers.values())
OPEN_MPI = ("ompi4", "ompi5")
BELOW_TENSORFLOW = (*MPI, "torch-gloo")
IN_TENSORFLOW = ("hvd-gloo", "hvd-mpi", "tf-ring")
TRAINERS = (*IN_TENSORFLOW, "torch-gloo")
# How tfdist trains → the same by ranks that do not communicate.
CONTROLS_OF_TRAINING = {
    OP: "alone",
    "tfdist-slice": "alone",  # each rank on processors of its own
    "tfdist-fit": "alone-fit",
}
# Ranks that only wait for each other after a step: the upper bound in marks of `alone`.
IN_STEP = "in-step"
PART_OF_LIMIT = 0.65
EAGER_S = 150e-6
LEAST_ABOVE_FLOOR_S = 1e-6
OF_ALONE = {"cnn": 0.95, "mlp": 0.80}
# The ways in which the compared peers reduce a list of gradients.
LISTS: tuple[Cell, ...] = (
    *((peer, way) for peer in IN_TENSORFLOW[:2] for way in ("per tensor", "grouped")),
    ("tf-ring", "25 MiB packs"),
    ("torch-gloo", "25 MiB buckets"),
)


def _faster(title: str, required: float, own: Cell, others: Sequence[Cell]) -> Mark:
    return Mark(title, required, lambda one: one.ratio(others, own))


def _limit_s(one: Round, size_bytes: int, ranks: int) -> float:
    return size_bytes * 1e-9 / limit_gb_s(one.add_gb_s, one.copy_gb_s, ranks)


def _part_of_limit(size_bytes: int, ranks: int) -> Mark:
    def ratio(one: Round) -> float | None:
        mine = one.times.get((CORE, f"allreduce/{size_bytes}"))
        return _limit_s(one, size_bytes, ranks) / mine if mine else None

    title = f"{size_text(size_bytes)}: {CORE} / limit of the memory"
    return Mark(title, PART_OF_LIMIT, ratio)


def _bound(size_bytes: int, ranks: int, name: str, cells: Sequence[Cell]) -> Mark:
    """Largest speedup over the fastest peer that the memory allows."""

    def ratio(one: Round) -> float | None:
        best = one.fastest(cells)
        return best / _limit_s(one, size_bytes, ranks) if best else None

    required = _core_required(size_bytes, ranks) or 0.0
    return Mark(f"{size_text(size_bytes)}: {name} / limit (the most)", required, ratio)


def _core_required(size_bytes: int, ranks: int) -> float | None:
    """Required speedup over the fastest peer; None if nothing is required."""
    if ranks > 2:
        if size_bytes < 16 * KIB:
            return None
        return 2.0 if size_bytes >= 16 * MIB else 1.0
    if size_bytes < 256 * KIB:
        return 0.5
    return 1.3 if size_bytes >= 4 * MIB else 1.0


def _of_core(sizes: Iterable[int], ranks: int) -> list[Mark]:
    found = []
    others = BELOW_TENSORFLOW if ranks > 2 else MPI
    name = "fastest peer" if ranks > 2 else "fastest MPI"
    for size_bytes in sizes:
        case, text = f"allreduce/{size_bytes}", size_text(size_bytes)
        required = _core_required(size_bytes, ranks)
        cells = [(peer, case) for peer in others]
        if required is not None:
            title = f"{text}: {name} / {CORE}"
            found.append(_faster(title, required, (CORE, case), cells))
        if size_bytes >= 16 * MIB:
            found.append(_part_of_limit(size_bytes, ranks))
            found.append(_bound(size_bytes, ranks, name, cells))
    return found


def _above(one: Round, peer: str, case: str, floor: str) -> float | None:
    whole, least = one.times.get((peer, case)), one.times.get((peer, floor))
    if whole is None or least is None:
        return None
    return max(whole - least, LEAST_ABOVE_FLOOR_S)


def above_floor(one: Round, peer: str, what: str) -> float | None:
    """Seconds that an allreduce adds to an empty function of the same signature."""
    return _above(one, peer, f"allreduce/{what}", f"floor/{what}")


def _of_least(others_s: Iterable[float | None], mine_s: float | None) -> float | None:
    """The least of the others over mine; None where there is nothing to compare."""
    best = min((s for s in others_s if s is not None), default=None)
    return best / mine_s if best and mine_s else None


def _floor_ratio(what: str) -> Callable[[Round], float | None]:
    def ratio(one: Round) -> float | None:
        others = [above_floor(one, peer, what) for peer in IN_TENSORFLOW]
        return _of_least(others, above_floor(one, OP, what))

    return ratio


def _eager_ratio(what: str) -> Callable[[Round], float | None]:
    def ratio(one: Round) -> float | None:
        mine = one.times.get((OP, f"eager/{what}"))
        return EAGER_S / mine if mine else None

    return ratio


def _of_op(sizes: Iterable[int]) -> list[Mark]:
    found = []
    for size_bytes in sizes:
        case, text = f"allreduce/{size_bytes}", size_text(size_bytes)
        if size_bytes == KIB:
            title = f"{text}: Horovod, ring above their floor / {OP} above its own"
            found.append(Mark(title, 10.0, _floor_ratio(str(size_bytes))))
            title = f"{text}: {1e3 * EAGER_S:g} ms / {OP} eager"
            found.append(Mark(title, 1.0, _eager_ratio(str(size_bytes))))
        if size_bytes >= 16 * KIB:
            cells = [(peer, case) for peer in IN_TENSORFLOW]
            required = 3.0 if size_bytes == 64 * MIB else 1.0
            title = f"{text}: fastest of Horovod, ring / {OP}"
            found.append(_faster(title, required, (OP, case), cells))
    return found


def _of_making(size_bytes: int, one_by_one: Sequence[Cell]) -> list[Mark]:
    """Marks of the time that a reduction adds to a function that makes its inputs."""
    ways = [cell for cell in LISTS if cell[0] in IN_TENSORFLOW]

    def added(one: Round, peer: str, way: str) -> float | None:
        cases = [f"{way}, {what}/{size_bytes}" for what in ("made", "made floor")]
        return _above(one, peer, *cases)

    def of_tensorflow(one: Round) -> float | None:
        return _of_least([added(one, *way) for way in ways], added(one, OP, "buckets"))

    def of_open_mpi(one: Round) -> float | None:
        return _of_least([one.fastest(one_by_one)], added(one, OP, "buckets"))

    mine = f"what {OP} adds to the making of the list"
    return [
        Mark(f"what Horovod, ring add / {mine}", 3.0, of_tensorflow),
        Mark(f"Open MPI one by one, in place / {mine}", 1.0, of_open_mpi),
    ]


def _flat_and_floor(size_bytes: int) -> Mark:
    """Mark of the flat allreduce over its time plus that of an empty function."""

    def ratio(one: Round) -> float | None:
        flat = one.times.get((OP, f"flat/{size_bytes}"))
        floor = one.times.get((OP, f"floor/{size_bytes}"))
        return flat / (flat + floor) if flat and floor else None

    return Mark(f"{OP} flat / {OP} flat and floor (the most)", 1 / 1.3, ratio)


def _of_gradients(size_bytes: int) -> list[Mark]:
    def at(cells: Iterable[Cell]) -> list[Cell]:
        return [(peer, f"{way}/{size_bytes}") for peer, way in cells]

    found = []
    one_by_one = at([(peer, "one by one, in place") for peer in OPEN_MPI])
    for own in (OP, CORE):
        (mine,) = at([(own, "buckets")])
        found += [
            _faster(f"fastest of Horovod, gloo, ring / {own}", 3.0, mine, at(LISTS)),
            _faster(f"Open MPI one by one, in place / {own}", 1.0, mine, one_by_one),
            _faster(f"{own} flat / {own}", 1 / 1.3, mine, at([(own, "flat")])),
        ]
    (mine,) = at([(CORE, "buckets, in place")])
    found.append(_flat_and_floor(size_bytes))
    found += _of_making(size_bytes, one_by_one)
    title = f"Open MPI one by one, in place / {CORE}, in place"
    found.append(_faster(title, 1.0, mine, one_by_one))
    return found


def _of_training(cases: Iterable[str]) -> list[Mark]:
    found = []
    for case in cases:
        name = case.partition("/")[0]
        peers = [(peer, case) for peer in TRAINERS]
        for own, alone in CONTROLS_OF_TRAINING.items():
            title = f"{name}: fastest peer / {own}"
            found.append(_faster(title, 1.0, (own, case), peers))
            title = f"{name}: {alone} / {own}"
            part = OF_ALONE.get(name, 0.0)
            found.append(_faster(title, part, (own, case), [(alone, case)]))
        most = (IN_STEP, case)
        title = f"{name}: alone / {IN_STEP} (the most)"
        found.append(_faster(title, part, most, [("alone", case)]))
    return found


def marks(task: str, cases: Iterable[str], ranks: int) -> list[Mark]:
    """The marks of a task that apply to the measured cases and number of ranks.

    Args:
        task: one of the tasks in `catalogue`.
        cases: all that were measured, by any peer.
        ranks: number of ranks.
    """
    if task == TRAINING:
        return _of_training(sorted(set(cases)))
    sizes = sorted({int(case.rpartition("/")[2]) for case in cases})
    if task == GRADIENTS:
        return [mark for size_bytes in sizes for mark in _of_gradients(size_bytes)]
    return [*_of_op(sizes), *_of_core(sizes, ranks)] if task == SIZES else []
