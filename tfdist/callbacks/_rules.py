"""Which lists of callbacks can train on several ranks: rules on plain values.

Every rank is told the lists of all ranks and comes to the same answer, so that a
refusal is the same error everywhere, before anything is trained.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

# What they decide on has to be equal on all ranks.
DECIDES_ON_LOGS = ("EarlyStopping", "ReduceLROnPlateau")
# What they change on a rank has to be changed on all.
EVERYWHERE = (*DECIDES_ON_LOGS, "LearningRateScheduler", "SwapEMAWeights")
# They write to a place, which only one rank may do; and how they name it.
WRITES = {
    "CSVLogger": "filename",
    "ModelCheckpoint": "filepath",
    "OrbaxCheckpoint": "directory",
    "RemoteMonitor": "root",
    "TensorBoard": "log_dir",
}
# Keras puts them behind the user's callbacks; they decide nothing.
_SHOWS = ("History", "ProgbarLogger")


@dataclasses.dataclass(frozen=True)
class Entry:
    """One callback in a rank's list.

    Attributes:
        name: what the user calls it, for messages.
        kind: the class of Keras or tfdist that the rules know; "" for others.
        ours: whether it is a callback of tfdist, which all ranks need alike.
        place: where it writes, the file or folder as an absolute path; "" for none.
        settings: what has to be equal where the callback has to be.
    """

    name: str
    kind: str = ""
    ours: bool = False
    place: str = ""
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Problem:
    """Why lists are refused.

    Attributes:
        text: the error's message.
        mismatch: whether the ranks differ; else the lists are wrong alike.
    """

    text: str
    mismatch: bool = False


def find_problem(lists: Sequence[Sequence[Entry]]) -> Problem | None:
    """The first thing that is wrong with the callbacks of a `fit`.

    Args:
        lists: the callbacks of every rank, in the order of the list.

    Returns:
        What to say, the same on every rank; None if all is right.

    Example:
        >>> stop = Entry("EarlyStopping", "EarlyStopping")
        >>> find_problem([[stop], [stop]]).text.split(":")[0]
        'EarlyStopping decides on the metrics of one rank'
    """
    for check in (
        _ours_differ,
        _missing_somewhere,
        _backup,
        _local_metrics,
        _not_first,
        _not_last,
        _stops_alone,
        _same_place,
        _averaged_too_late,
        _written_too_early,
    ):
        found = check(lists)
        if found is not None:
            return found
    return None


def _ours_differ(lists: Sequence[Sequence[Entry]]) -> Problem | None:
    return _difference(
        [[entry for entry in own if entry.ours] for own in lists],
        "the tfdist callbacks",
        "The callbacks of tfdist wait for each other: give every rank the same, in "
        "the same order and with the same arguments.",
    )


def _missing_somewhere(lists: Sequence[Sequence[Entry]]) -> Problem | None:
    return _difference(
        [[entry for entry in own if entry.kind in EVERYWHERE] for own in lists],
        "the callbacks that change the training",
        "What they change on one rank has to be changed on all: give every rank the "
        "same, with the same arguments, or give all ranks "
        "tfdist.callbacks.RankZeroOnly around it.",
    )


def _difference(
    lists: Sequence[Sequence[Entry]], what: str, advice: str
) -> Problem | None:
    for rank, own in enumerate(lists):
        if own == lists[0]:
            continue
        shown = [", ".join(_shown(e, lists) for e in some) for some in (lists[0], own)]
        return Problem(
            f"The ranks' callbacks differ: {what} are [{shown[0]}] on rank 0 and "
            f"[{shown[1]}] on rank {rank}. {advice}",
            mismatch=True,
        )
    return None


def _shown(entry: Entry, lists: Sequence[Sequence[Entry]]) -> str:
    """The name, with the settings that another one of this name has differently."""
    alike = [e.settings for own in lists for e in own if e.name == entry.name]
    differing = [
        f"{key}={value!r}"
        for key, value in entry.settings.items()
        if any(other.get(key) != value for other in alike)
    ]
    return entry.name + (f"({', '.join(differing)})" if differing else "")


def _backup(lists: Sequence[Sequence[Entry]]) -> Problem | None:
    for own in lists:
        for entry in own:
            if entry.kind == "BackupAndRestore":
                return Problem(
                    f"{entry.name} restores weights and the epoch on its own rank "
                    "alone, and each rank would write the backup. Write "
                    "tfdist.callbacks.RankZeroOnly(keras.callbacks.BackupAndRestore("
                    "...)) on every rank: rank 0 writes and reads, and what it "
                    "restored is sent to all."
                )
    return None


def _local_metrics(lists: Sequence[Sequence[Entry]]) -> Problem | None:
    averaged = False
    for entry in lists[0]:  # these are the same on all ranks by now
        averaged = averaged or entry.kind == "MetricAverage"
        if entry.kind in DECIDES_ON_LOGS and not averaged:
            return Problem(
                f"{entry.name} decides on the metrics of one rank: the ranks would "
                "decide differently. Put tfdist.callbacks.MetricAverage() before it "
                "in the list of callbacks."
            )
    return None


def _not_first(lists: Sequence[Sequence[Entry]]) -> Problem | None:
    ours = [entry for entry in lists[0] if entry.ours]  # the same on all ranks by now
    if any(entry.kind == "UnevenData" for entry in ours[1:]):
        return Problem(
            "tfdist.callbacks.UnevenData has to be the first tfdist callback: the "
            "others meet at the end of an epoch, where it lets all ranks arrive. Move "
            f"it before {ours[0].name}."
        )
    return None


def _not_last(lists: Sequence[Sequence[Entry]]) -> Problem | None:
    for own in lists:
        names = [entry for entry in own if entry.kind not in _SHOWS]
        for place, entry in enumerate(names[:-1]):
            if entry.kind == "StopTogether":
                return Problem(
                    "tfdist.callbacks.StopTogether has to be the last callback, so "
                    "that it sees what the others decide: move it behind "
                    f"{', '.join(e.name for e in names[place + 1 :])}."
                )
    return None


def _stops_alone(lists: Sequence[Sequence[Entry]]) -> Problem | None:
    for own in lists:
        for entry in own:
            if entry.kind == "TerminateOnNaN" and not any(
                other.kind == "StopTogether" for other in own
            ):
                return Problem(
                    f"{entry.name} stops its own rank at once, while the others wait "
                    "for it in the next step. Put tfdist.callbacks.StopTogether() at "
                    "the end of the list of callbacks."
                )
    return None


def _same_place(lists: Sequence[Sequence[Entry]]) -> Problem | None:
    seen: dict[tuple[str, str], int] = {}
    for rank, own in enumerate(lists):
        for entry in own:
            if not entry.place:
                continue
            first = seen.setdefault((entry.kind, entry.place), rank)
            if first == rank:
                continue
            advice = f"tfdist.callbacks.RankZeroOnly({entry.name}(...))"
            if entry.kind == "ModelCheckpoint":
                advice = f"tfdist.callbacks.Checkpoint(...), or {advice}"
            return Problem(
                f"{entry.name} writes to {entry.place!r} on rank {first} and on rank "
                f"{rank}: they would spoil each other's files. Write {advice}, on "
                "every rank; or a place for each rank, with tfdist.rank() in it."
            )
    return None


def _averaged_too_late(lists: Sequence[Sequence[Entry]]) -> Problem | None:
    kinds = [entry.kind for entry in lists[0] if entry.ours]  # on all ranks by now
    after = kinds[kinds.index("Progress") :] if "Progress" in kinds else []
    if "MetricAverage" in after and kinds.count("MetricAverage") == 1:
        return Problem(
            "Progress shows the metrics of rank 0 alone, before MetricAverage has put "
            "those of all ranks into the logs. Move tfdist.callbacks.Progress behind "
            "tfdist.callbacks.MetricAverage in the list of callbacks."
        )
    return None


def _written_too_early(lists: Sequence[Sequence[Entry]]) -> Problem | None:
    for own in lists:
        names = [entry.name for entry in own]
        ends = [i for i, entry in enumerate(own) if entry.kind == "Progress"]
        for name in names[: ends[-1]] if ends else []:
            if any(kind in name for kind in ("CSVLogger", "TensorBoard")):
                return Problem(
                    f"{name} writes the logs before Progress has put the speed and the "
                    "exposed communication into them. Move it behind "
                    "tfdist.callbacks.Progress in the list of callbacks."
                )
    return None
