"""Pure functions that format the progress line and fit it to a width."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import NamedTuple

from rich.cells import cell_len, set_cell_size

from tfdist.core.timeline.stragglers import SlowRank

_GAP = "  "
_VALIDATION = "val_"
_BAR_LEAST, _BAR_MOST = 8, 24
_FORMS = 3  # full text; metrics with fewer digits; shorter words


@dataclasses.dataclass(frozen=True)
class Status:
    """Progress of a training run at one moment; unknown values are None."""

    epoch: int  # number of the epoch, from 1
    epochs: int | None = None  # number of epochs
    step: int = 0  # completed steps of the epoch, including those of an earlier run
    steps: int | None = None  # number of steps in the epoch
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)  # by name
    samples_per_s: float | None = None  # of all ranks together
    unit: str = "samples"  # name of the samples, in the plural
    exposed: float | None = None  # share of exposed communication, 0..1
    left_s: float | None = None  # estimated seconds until the training ends
    took_s: float | None = None  # seconds of an ended epoch, including validation
    slowest: tuple[int, float] | None = None  # rank, share (0..1) that others wait
    stragglers: tuple[SlowRank, ...] = ()  # slow ranks, the slowest first
    note: str = ""  # shown instead of the steps, such as "validation 12"


def number(value: float, digits: int = 4) -> str:
    """Formats a metric's value, with `digits` decimals for values of usual size.

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
    """Formats a duration with at most two units.

    Example:
        >>> [duration(s) for s in (0.2, 59, 61, 7260, 100 * 3600)]
        ['0s', '59s', '1m01s', '2h01m', '4d04h']
    """
    minutes, rest_s = divmod(max(0, round(seconds)), 60)
    hours, rest_m = divmod(minutes, 60)
    days, rest_h = divmod(hours, 24)
    if days:
        return f"{days}d{rest_h:02d}h"
    if hours:
        return f"{hours}h{rest_m:02d}m"
    return f"{minutes}m{rest_s:02d}s" if minutes else f"{rest_s}s"


def speed(per_s: float) -> str:
    """Formats samples per second: one decimal below 10, thousands from 100000 on.

    Example:
        >>> [speed(v) for v in (3.14159, 512.4, 15234.0, 1.5e6)]
        ['3.1', '512', '15234', '1500k']
    """
    if per_s < 10:
        return f"{per_s:.1f}"
    return f"{per_s:.0f}" if per_s < 100000 else f"{per_s / 1000:.0f}k"


def line(status: Status, width: int | None = None, *, bar: str = "") -> str:
    """Formats the line of a running epoch, or of an epoch that has ended (`took_s`).

    Args:
        status: values to show.
        width: maximum number of columns; None: no limit, and all parts in full.
        bar: two characters, for the completed and the remaining part of a bar. The line
            of a running epoch has a bar if `bar` is given and the width allows it.

    Example:
        >>> state = Status(3, 90, 120, 5004, {"loss": 2.3, "accuracy": 0.451},
        ...                1523.0, "images", 0.04, 73980.0)
        >>> line(state, 79)
        'epoch 3/90  120/5004  loss 2.300  acc 0.451  1523/s  exposed 4%  ETA 20h33m'
        >>> line(Status(3, 90, 5004, metrics={"loss": 2.3, "val_loss": 2.1},
        ...             samples_per_s=1523.0, took_s=841.0), 50)
        'epoch 3/90  14m01s  loss 2.300 val 2.100  1523/s'
    """
    for form in range(_FORMS):
        parts = _parts(status, form)
        if width is None or cell_len(_joined(parts)) <= width:
            return _with_bar(_joined(parts), status, width, bar)
    assert width is not None  # noqa: S101 - otherwise the first form fits
    while len(parts) > 1 and cell_len(_joined(parts)) > width:
        least = parts.index(min(parts, key=lambda part: part.worth))
        parts[least : least + 1] = parts[least].instead
    text = _joined(parts)
    return text if cell_len(text) <= width else set_cell_size(text, width)


class _Part(NamedTuple):
    worth: int  # if the line is too long, the part with the least worth is omitted
    text: str
    instead: tuple[_Part, ...] = ()  # parts to show if this part is omitted


def _joined(parts: list[_Part]) -> str:
    return _GAP.join(part.text for part in parts)


def _parts(status: Status, form: int) -> list[_Part]:
    """Returns the parts of the line in one form.

    Parts are kept in this order of priority. For a running epoch: epoch, first metric,
    percentage of the steps, stragglers, ETA, speed, second metric, exposed
    communication, number of the step, other metrics. For an epoch that has ended:
    epoch, first metric, second metric, stragglers, slowest rank, speed, duration,
    exposed communication, ETA, other metrics.
    """
    is_over = status.took_s is not None
    parts: list[_Part] = []

    def add(worth: int, *forms: str, instead: tuple[_Part, ...] = ()) -> None:
        parts.append(_Part(worth, forms[min(form, len(forms) - 1)], instead))

    add(9, f"epoch {status.epoch}" + (f"/{status.epochs}" if status.epochs else ""))
    if status.took_s is not None:
        took = duration(status.took_s)
        add(3, f"{status.step} steps in {took}", took)
    elif status.note:
        add(7, status.note, status.note, status.note.replace("validation", "val"))
    elif status.steps:
        count = f"{status.step}/{status.steps}"
        done = _Part(7, f"{status.step / status.steps:.0%}")
        add(2, f"step {count}", f"step {count}", count, instead=(done,))
    else:
        add(7, f"step {status.step}", f"step {status.step}", f"{status.step}")
    for index, name in enumerate(_names(status.metrics)):
        worth = (8, 7 if is_over else 4)[index] if index < 2 else -index
        add(worth, _metric(name, status.metrics, form))
    if status.samples_per_s is not None:
        value = speed(status.samples_per_s)
        full = f"{value} {status.unit}/s"
        add(4 if is_over else 5, full, full, f"{value}/s")
    if status.exposed is not None:
        share = f"{status.exposed:.0%}"
        add(2 if is_over else 3, f"exposed comm. {share}", f"exposed {share}")
    if status.left_s is not None:
        add(1 if is_over else 6, f"ETA {duration(status.left_s)}")
    if status.slowest is not None:
        rank, late = status.slowest
        full = f"others wait {late:.0%} for rank {rank}"
        add(5, full, full, f"rank {rank} +{late:.0%}")
    if status.stragglers:
        add(6, *_straggler_forms(status.stragglers))
    return parts


def straggler(slow: SlowRank) -> str:
    """Describes a slow rank.

    Example:
        >>> straggler(SlowRank(3, "b", 2.13, 40.0))
        'rank 3 (host b) has been 2.1 times slower than the median for 40s'
    """
    return (
        f"rank {slow.rank} (host {slow.host}) has been {slow.factor:.1f} times slower "
        f"than the median for {duration(slow.seconds)}"
    )


def _straggler_forms(found: tuple[SlowRank, ...]) -> tuple[str, str, str]:
    slow = found[0]
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    short = f"rank {slow.rank} {slow.factor:.1f}x slower"
    return (straggler(slow) + more, f"{short} for {duration(slow.seconds)}", short)


def _names(metrics: Mapping[str, float]) -> list[str]:
    """Returns the metrics, except validation metrics that are shown beside others."""
    return [
        name
        for name in metrics
        if not name.startswith(_VALIDATION)
        or name.removeprefix(_VALIDATION) not in metrics
    ]


def _metric(name: str, metrics: Mapping[str, float], form: int) -> str:
    """Formats a training metric, with the validation metric if there is one."""
    digits = 4 if form == 0 else 3
    shown = short_name(name) if form == 2 else name
    text = f"{shown} {number(metrics[name], digits)}"
    own = metrics.get(_VALIDATION + name)
    if own is None:
        return text
    label = f"{_GAP}{_VALIDATION}{name}" if form == 0 else " val"
    return f"{text}{label} {number(own, digits)}"


def short_name(name: str) -> str:
    """Returns a metric's name for narrow lines.

    Example:
        >>> [short_name(n) for n in ("loss", "accuracy", "sparse_top_k_accuracy")]
        ['loss', 'acc', 'sparse_top_k_acc']
    """
    return name.replace("categorical_", "").replace("accuracy", "acc")


def _with_bar(text: str, status: Status, width: int | None, bar: str) -> str:
    if not bar or width is None or not status.steps or status.note:
        return text
    cells = min(_BAR_MOST, width - cell_len(text) - len(_GAP))
    if cells < _BAR_LEAST or status.took_s is not None:
        return text
    done = min(cells, cells * status.step // status.steps)
    head, gap, rest = text.partition(_GAP)
    return head + _GAP + bar[0] * done + bar[1] * (cells - done) + gap + rest
