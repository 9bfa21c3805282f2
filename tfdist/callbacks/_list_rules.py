"""Rules for callback lists on several ranks, as functions on plain values.

Every rank gets the lists of all ranks and applies the same rules, so a violation raises
the same error on all ranks before training begins.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# Callbacks whose inputs have to be equal on all ranks.
DECIDES_ON_LOGS = ("EarlyStopping", "ReduceLROnPlateau")
# Callbacks whose changes have to be made on all ranks.
EVERYWHERE = (*DECIDES_ON_LOGS, "LearningRateScheduler", "SwapEMAWeights")
# Callbacks that write to a path, which only one rank may do → attribute with the path.
WRITES = {
    "CSVLogger": "filename",
    "ModelCheckpoint": "filepath",
    "OrbaxCheckpoint": "directory",
    "RemoteMonitor": "root",
    "TensorBoard": "log_dir",
}
# Callbacks in which the ranks wait for each other before or after a validation (Elastic
# does only in an elastic job).
_MEET_IN_VALIDATION = {
    "MetricAverage",
    "CombineMovingStatistics",
    "Elastic",
    "StopOnSignal",
}
# Arguments of `fit` that have to be equal on all ranks, and advice if they are not.
_ADVICE = {
    "epochs": "StopTogether ends the training early on all ranks.",
    "steps_per_epoch": "tfdist.data.shard gives every rank the same number of steps. "
    "For data of different lengths, omit steps_per_epoch and use "
    "tfdist.callbacks.UnevenData.",
    "validation_data": "MetricAverage, CombineMovingStatistics, StopOnSignal and, in "
    "an elastic job, Elastic wait for all ranks in validation. Pass every rank its own "
    "shard of the validation data (tfdist.data.shard, or with Elastic "
    "tfdist.data.global_batches), or pass validation_data on no rank.",
    "validation_freq": "All ranks must validate after the same epochs.",
    "class_weight": "All ranks must minimize the same loss. Compute the weights from "
    "all samples, not from the samples of one rank.",
}
# Keras adds these after the user's callbacks; they make no decisions.
_SHOWS = ("History", "ProgbarLogger")


@dataclasses.dataclass(frozen=True)
class Entry:
    """One callback in a rank's list.

    Attributes:
        name: class name that the user has written, for messages.
        kind: name of the Keras or tfdist class to which rules apply; "" for others.
        ours: whether it is a tfdist callback, which has to be on all ranks.
        place: absolute path of the file or folder that the callback writes; "" for
            none.
        settings: values that have to be equal on all ranks.
    """

    name: str
    kind: str = ""
    ours: bool = False
    place: str = ""
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Problem:
    """A violation of the rules.

    Attributes:
        text: the error's message.
        mismatch: whether the ranks differ; if False, all ranks have the same wrong
            list.
    """

    text: str
    mismatch: bool = False


def find_problem(
    lists: Sequence[Sequence[Entry]], arguments: Sequence[Mapping[str, Any]] = ()
) -> Problem | None:
    """Finds all problems with the callbacks in a call of `fit`.

    Args:
        lists: the callbacks of every rank, in list order.
        arguments: for every rank, the compared arguments of `fit` as text, by name.

    Returns:
        The problem, the same on every rank, or None. Several problems are combined
        into a numbered list, which is a mismatch if any of them is.

    Example:
        >>> stop = Entry("EarlyStopping", "EarlyStopping")
        >>> find_problem([[stop], [stop]]).text.split(":")[0]
        'EarlyStopping decides on the metrics of one rank'
    """
    differ = [*_ours_differ(lists), *_missing_somewhere(lists)]
    entries = [entry for own in lists for entry in own]
    found = [*_arguments_differ(arguments, entries), *differ]
    for check in (_backup, _not_last, _stops_alone, _same_place, _written_too_early):
        found += check(lists)
    if not differ:  # these rules use only the list of rank 0
        for check in (_local_metrics, _not_first, _averaged_too_late):
            found += check(lists)
    return combine(found)


def combine(found: Sequence[Problem]) -> Problem | None:
    """Combines problems into one, without duplicates; None if there are none."""
    texts = list(dict.fromkeys(problem.text for problem in found))
    if not texts:
        return None
    mismatch = any(problem.mismatch for problem in found)
    if len(texts) == 1:
        return Problem(texts[0], mismatch)
    numbered = "\n".join(f"{n}. {text}" for n, text in enumerate(texts, start=1))
    return Problem(f"The call of fit has {len(texts)} problems:\n{numbered}", mismatch)


def _arguments_differ(
    arguments: Sequence[Mapping[str, Any]], entries: Sequence[Entry]
) -> Iterator[Problem]:
    allowed = set()
    if any(entry.kind == "UnevenData" for entry in entries):
        allowed.add("steps_per_epoch")
    if not any(
        entry.kind in _MEET_IN_VALIDATION and entry.settings.get("elastic_job", True)
        for entry in entries
    ):
        allowed |= {"validation_data", "validation_freq"}  # one rank may validate alone
    for name in dict.fromkeys(name for own in arguments for name in own):
        values = [own.get(name) for own in arguments]
        if len(set(values)) == 1 or name in allowed:
            continue
        shown = "; ".join(f"rank {r}: {value}" for r, value in enumerate(values))
        yield Problem(
            f"Expected the same {name} in fit on every rank, got {shown}. "
            f"{_ADVICE[name]}",
            mismatch=True,
        )


def _ours_differ(lists: Sequence[Sequence[Entry]]) -> Iterator[Problem]:
    yield from _difference(
        [[entry for entry in own if entry.ours] for own in lists],
        "the tfdist callbacks",
        "tfdist callbacks communicate with the other ranks. Use the same callbacks on "
        "every rank, in the same order and with the same arguments.",
    )


def _missing_somewhere(lists: Sequence[Sequence[Entry]]) -> Iterator[Problem]:
    yield from _difference(
        [[entry for entry in own if entry.kind in EVERYWHERE] for own in lists],
        "the callbacks that change the training",
        "Their changes have to be made on all ranks. Use the same callbacks with the "
        "same arguments on every rank, or wrap them in tfdist.callbacks.RankZeroOnly "
        "on all ranks.",
    )


def _difference(
    lists: Sequence[Sequence[Entry]], what: str, advice: str
) -> Iterator[Problem]:
    for rank, own in enumerate(lists):
        if own == lists[0]:
            continue
        shown = [", ".join(_shown(e, lists) for e in some) for some in (lists[0], own)]
        yield Problem(
            f"The ranks' callbacks differ: {what} are [{shown[0]}] on rank 0 and "
            f"[{shown[1]}] on rank {rank}. {advice}",
            mismatch=True,
        )
        return  # reports only the first difference


def _shown(entry: Entry, lists: Sequence[Sequence[Entry]]) -> str:
    """Returns the name, with the settings that differ between entries of this name."""
    alike = [e.settings for own in lists for e in own if e.name == entry.name]
    differing = [
        f"{key}={value!r}"
        for key, value in entry.settings.items()
        if any(other.get(key) != value for other in alike)
    ]
    return entry.name + (f"({', '.join(differing)})" if differing else "")


def _backup(lists: Sequence[Sequence[Entry]]) -> Iterator[Problem]:
    for own in lists:
        for entry in own:
            if entry.kind == "BackupAndRestore":
                yield Problem(
                    f"{entry.name} restores weights and the epoch independently on "
                    "each rank, and all ranks would write the backup. Use "
                    "tfdist.callbacks.RankZeroOnly(keras.callbacks.BackupAndRestore("
                    "...)) on every rank. Rank 0 then writes and reads the backup, and "
                    "broadcasts the restored state."
                )


def _local_metrics(lists: Sequence[Sequence[Entry]]) -> Iterator[Problem]:
    averaged = False
    for entry in lists[0]:  # checked to be equal on all ranks
        averaged = averaged or entry.kind == "MetricAverage"
        if entry.kind in DECIDES_ON_LOGS and not averaged:
            yield Problem(
                f"{entry.name} decides on the metrics of one rank: the ranks would "
                "decide differently. Put tfdist.callbacks.MetricAverage() before it "
                "in the list of callbacks."
            )


def _not_first(lists: Sequence[Sequence[Entry]]) -> Iterator[Problem]:
    ours = [entry for entry in lists[0] if entry.ours]  # checked to be equal
    if any(entry.kind == "UnevenData" for entry in ours[1:]):
        yield Problem(
            "tfdist.callbacks.UnevenData has to be the first tfdist callback, because "
            "at the end of an epoch the others can communicate only after UnevenData "
            f"has waited for all ranks. Move it before {ours[0].name}."
        )


def _not_last(lists: Sequence[Sequence[Entry]]) -> Iterator[Problem]:
    for own in lists:
        names = [entry for entry in own if entry.kind not in _SHOWS]
        for place, entry in enumerate(names[:-1]):
            if entry.kind == "StopTogether":
                yield Problem(
                    "tfdist.callbacks.StopTogether has to be the last callback, so "
                    "that it runs after the decisions of the others. Move it after "
                    f"{', '.join(e.name for e in names[place + 1 :])}."
                )


def _stops_alone(lists: Sequence[Sequence[Entry]]) -> Iterator[Problem]:
    for own in lists:
        for entry in own:
            if entry.kind == "TerminateOnNaN" and not any(
                other.kind == "StopTogether" for other in own
            ):
                yield Problem(
                    f"{entry.name} stops only its own rank, while the other ranks wait "
                    "for it in the next step. Put tfdist.callbacks.StopTogether() at "
                    "the end of the list of callbacks."
                )


def _same_place(lists: Sequence[Sequence[Entry]]) -> Iterator[Problem]:
    seen: dict[tuple[str, str], int] = {}
    told: set[tuple[str, str]] = set()
    for rank, own in enumerate(lists):
        for entry in own:
            if not entry.place:
                continue
            first = seen.setdefault((entry.kind, entry.place), rank)
            if first == rank or (entry.kind, entry.place) in told:
                continue
            told.add((entry.kind, entry.place))
            advice = f"tfdist.callbacks.RankZeroOnly({entry.name}(...))"
            if entry.kind == "ModelCheckpoint":
                advice = f"tfdist.callbacks.Checkpoint(...), or {advice}"
            yield Problem(
                f"{entry.name} writes to {entry.place!r} on rank {first} and on rank "
                f"{rank}, so they would overwrite each other's files. Use {advice} on "
                "every rank, or a different path with tfdist.rank() for each rank."
            )


def _averaged_too_late(lists: Sequence[Sequence[Entry]]) -> Iterator[Problem]:
    kinds = [entry.kind for entry in lists[0] if entry.ours]  # checked to be equal
    after = kinds[kinds.index("Progress") :] if "Progress" in kinds else []
    if "MetricAverage" in after and kinds.count("MetricAverage") == 1:
        yield Problem(
            "Progress shows only the metrics of rank 0 if it runs before "
            "MetricAverage. Move tfdist.callbacks.Progress after "
            "tfdist.callbacks.MetricAverage in the list of callbacks."
        )


def _written_too_early(lists: Sequence[Sequence[Entry]]) -> Iterator[Problem]:
    for own in lists:
        names = [entry.name for entry in own]
        ends = [i for i, entry in enumerate(own) if entry.kind == "Progress"]
        for name in names[: ends[-1]] if ends else []:
            if any(kind in name for kind in ("CSVLogger", "TensorBoard")):
                yield Problem(
                    f"{name} writes the logs before Progress has added the speed and "
                    "the exposed communication. Move it after "
                    "tfdist.callbacks.Progress in the list of callbacks."
                )
