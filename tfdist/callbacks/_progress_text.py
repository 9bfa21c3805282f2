"""The line of progress, as a pure function: what is in it, and what gives way first."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

_GAP = "  "
_VALIDATION = "val_"
_BAR_LEAST, _BAR_MOST = 8, 24


@dataclasses.dataclass(frozen=True)
class Status:
    """Progress of a training run at one moment.

    Attributes:
        epoch: the running one, from 1.
        epochs: how many there will be; None if nobody knows.
        step: steps of the epoch that are done, those of an earlier run included.
        steps: of the epoch; None if nobody knows.
        metrics: name → value, in the order in which they are shown.
        samples_per_s: of all ranks together; None before anything was measured.
        unit: what a sample is called, in the plural.
        exposed: share of exposed communication, 0..1; None where it is not measured.
        left_s: estimate of the seconds until the training ends; None if nobody knows.
        took_s: seconds of an epoch that has ended, validation included; else None.
        slowest: the rank for which the others wait, and the share (0..1) of the time
            that they do; None where there is nothing to say.
        note: what is going on instead of steps, such as "validation 12".
    """

    epoch: int
    epochs: int | None = None
    step: int = 0
    steps: int | None = None
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    samples_per_s: float | None = None
    unit: str = "samples"
    exposed: float | None = None
    left_s: float | None = None
    took_s: float | None = None
    slowest: tuple[int, float] | None = None
    note: str = ""


def number(value: float, digits: int = 4) -> str:
    """A metric's value: `digits` behind the point where it is of everyday size.

    Example:
        >>> [number(v) for v in (0.75, 2.30259, 12345.6, 3e-5, float("nan"))]
        ['0.7500', '2.3026', '1.235e+04', '3.0e-05', 'nan']
    """
    size = abs(value)
    if not math.isfinite(value):
        return str(value)
    if size != 0 and size < 10.0**-digits:
        return f"{value:.1e}"
    if size >= 10000:
        return f"{value:.{digits - 1}e}"
    return f"{value:.{max(0, digits - max(0, len(str(int(size))) - 1))}f}"


def duration(seconds: float) -> str:
    """Two units at most.

    Example:
        >>> [duration(s) for s in (0.2, 59, 61, 7260, 100 * 3600)]
        ['0s', '59s', '1m01s', '2h01m', '4d04h']
    """
    whole = max(0, round(seconds))
    minutes, rest_s = divmod(whole, 60)
    hours, rest_m = divmod(minutes, 60)
    days, rest_h = divmod(hours, 24)
    if days:
        return f"{days}d{rest_h:02d}h"
    if hours:
        return f"{hours}h{rest_m:02d}m"
    return f"{minutes}m{rest_s:02d}s" if minutes else f"{rest_s}s"


def speed(per_s: float) -> str:
    """Samples in a second, to three digits or so.

    Example:
        >>> [speed(v) for v in (3.14159, 512.4, 15234.0, 1.5e6)]
        ['3.1', '512', '15234', '1500k']
    """
    if per_s < 10:
        return f"{per_s:.1f}"
    return f"{per_s:.0f}" if per_s < 100000 else f"{per_s / 1000:.0f}k"


def fit(
    parts: Sequence[Sequence[str]], shrink: Sequence[int], width: int | None
) -> str:
    """Joins parts, each in the longest form for which there is room.

    Args:
        parts: for each its forms, longest first; "" leaves it out.
        shrink: which part takes its next form when the line is too long, in this
            order; a part may stand there several times.
        width: columns; None: no limit.

    Returns:
        The line; cut off where even the shortest forms are too long.

    Example:
        >>> fit([["epoch 3"], ["step 7", "7"], ["1523/s", ""]], [1, 2], 16)
        'epoch 3  7'
    """
    taken = [0] * len(parts)
    line = _joined(parts, taken)
    for index in shrink:
        if width is None or len(line) <= width:
            return line
        if taken[index] + 1 < len(parts[index]):
            taken[index] += 1
            line = _joined(parts, taken)
    return line if width is None else line[:width]


def _joined(parts: Sequence[Sequence[str]], taken: Sequence[int]) -> str:
    shown = [forms[form] for forms, form in zip(parts, taken, strict=True)]
    return _GAP.join(text for text in shown if text)


def line(status: Status, width: int | None = None, *, bar: str = "") -> str:
    """The line while an epoch runs.

    Args:
        status: what is to be shown.
        width: columns; None: no limit, and every part in full.
        bar: two characters, for what is done and what is not; there is a bar where
            these are given and the rest leaves room for it.

    Example:
        >>> state = Status(3, 90, 120, 5004, {"loss": 2.3, "accuracy": 0.451},
        ...                1523.0, "images", 0.04, 42780.0)
        >>> line(state, 79)
        'epoch 3/90  120/5004  loss 2.300  acc 0.451  1523/s  exposed 4%  ETA 11h53m'
    """
    metrics = [_metric(name, value) for name, value in status.metrics.items()]
    first = 2
    rate, exposed, left = (first + len(metrics) + i for i in range(3))
    parts = [[_epoch(status)], _step(status), *metrics, *_ends(status)]
    numbers = list(range(first, first + len(metrics)))
    shrink = [
        *numbers,  # fewer digits
        exposed,
        *_out(numbers[3:], 3),
        1,  # "step 120/5004" → "120/5004"
        rate,
        *numbers,  # shorter names
        *_out(numbers[2:3], 3),
        1,  # → "2%"
        exposed,
        *_out(numbers[1:2], 1),
        rate,
        left,
        1,
        *_out(numbers[:1], 1),
    ]
    text = fit(parts, shrink, width)
    return _with_bar(text, status, width, bar)


def closing_line(status: Status, width: int | None = None) -> str:
    """The line of an epoch that has ended; validation metrics stand beside their own.

    Example:
        >>> state = Status(3, 90, 5004, 5004, {"loss": 2.3, "val_loss": 2.1}, 1523.0,
        ...                "images", 0.04, 42780.0, 3285.0)
        >>> closing_line(state, 79)
        'epoch 3/90  54m45s  loss 2.3000 val 2.1000  1523/s  exposed 4%  ETA 11h53m'
        >>> closing_line(Status(1, slowest=(5, 0.29)))
        'epoch 1  others wait 29% for rank 5'
    """
    names = [n for n in status.metrics if not n.startswith(_VALIDATION)]
    names += [
        n
        for n in status.metrics
        if n.startswith(_VALIDATION) and n.removeprefix(_VALIDATION) not in names
    ]
    metrics = [_pair(name, status.metrics) for name in names]
    first = 2
    rate, exposed, left = (first + len(metrics) + i for i in range(3))
    took = "" if status.took_s is None else duration(status.took_s)
    taken = [f"{status.step} steps in {took}", took, ""] if took else [""]
    parts = [[_epoch(status)], taken, *metrics, *_ends(status), _slowest(status)]
    numbers = list(range(first, first + len(metrics)))
    shrink = [
        1,  # the number of steps
        exposed,
        left + 1,  # "others wait"
        rate,
        *numbers,  # "val_loss" → "val"
        *numbers,  # fewer digits
        *_out(numbers[3:], 3),
        *numbers,  # shorter names
        *_out(numbers[2:3], 3),
        left,
        1,
        exposed,
        rate,
        left + 1,
        *_out(numbers[1:2], 3),
        *_out(numbers[:1], 3),
    ]
    return fit(parts, shrink, width)


def _out(indices: Sequence[int], forms: int) -> list[int]:
    """Lets parts go, the last first, through `forms` shorter forms."""
    return [index for index in reversed(indices) for _ in range(forms)]


def _epoch(status: Status) -> str:
    of = "" if status.epochs is None else f"/{status.epochs}"
    return f"epoch {status.epoch}{of}"


def _step(status: Status) -> list[str]:
    if status.note:
        return [status.note, status.note.replace("validation", "val")]
    if not status.steps:
        return [f"step {status.step}", f"{status.step}", f"{status.step}", ""]
    share = f"{status.step / status.steps:.0%}"
    count = f"{status.step}/{status.steps}"
    return [f"step {count}", count, share, ""]


def _ends(status: Status) -> list[list[str]]:
    """Speed, exposed communication, time left."""
    rate, exposed, left = [""], [""], [""]
    if status.samples_per_s is not None:
        value = speed(status.samples_per_s)
        rate = [f"{value} {status.unit}/s", f"{value}/s", ""]
    if status.exposed is not None:
        exposed = [
            f"exposed comm. {status.exposed:.0%}",
            f"exposed {status.exposed:.0%}",
            "",
        ]
    if status.left_s is not None:
        left = [f"ETA {duration(status.left_s)}", ""]
    return [rate, exposed, left]


def _slowest(status: Status) -> list[str]:
    if status.slowest is None:
        return [""]
    rank, share = status.slowest
    return [f"others wait {share:.0%} for rank {rank}", f"rank {rank} +{share:.0%}", ""]


def short_name(name: str) -> str:
    """A metric's name where there is little room.

    Example:
        >>> [short_name(n) for n in ("loss", "accuracy", "sparse_top_k_accuracy")]
        ['loss', 'acc', 'sparse_top_k_acc']
    """
    return name.replace("categorical_", "").replace("accuracy", "acc")


def _metric(name: str, value: float) -> list[str]:
    few = number(value, 3)
    return [f"{name} {number(value)}", f"{name} {few}", f"{short_name(name)} {few}", ""]


def _pair(name: str, metrics: Mapping[str, float]) -> list[str]:
    """A metric of training with that of validation."""
    value, own = metrics[name], metrics.get(_VALIDATION + name)
    if own is None:
        full, _, _, _ = forms = _metric(name, value)
        return [full, *forms]
    return [
        f"{name} {number(value)}{_GAP}{_VALIDATION}{name} {number(own)}",
        f"{name} {number(value)} val {number(own)}",
        f"{name} {number(value, 3)} val {number(own, 3)}",
        f"{short_name(name)} {number(value, 3)} val {number(own, 3)}",
        "",
    ]


def _with_bar(text: str, status: Status, width: int | None, bar: str) -> str:
    if not bar or width is None or not status.steps or status.note:
        return text
    cells = min(_BAR_MOST, width - len(text) - len(_GAP))
    if cells < _BAR_LEAST:
        return text
    done = min(cells, cells * status.step // status.steps)
    head = _epoch(status)
    return head + _GAP + bar[0] * done + bar[1] * (cells - done) + text[len(head) :]
