"""Reports the exception that ends a rank's program.

A rank whose own code failed prints its traceback. A rank that exits only because
another rank failed prints one line. It also reports the failed rank to the launcher,
because its exception hook may run before the hook of the failed rank.

A program that exits without an error may still have trained a separate model on each
rank. `unreduced_training` returns a warning in this case.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfdist.core import native
from tfdist.core.rendezvous import failure_report

_LIBRARIES = ("tfdist", "keras", "tensorflow", "tf_keras")
_PLACE = re.compile(r'^(\s*)File "(.*?)", line (\d+)')
_TRACEBACK_LINES = 20
_TRACEBACK_CHARACTERS = 64 << 10
_CAUSE_CHARACTERS = 4 << 10
_ERROR_CHARACTERS = 2000


def to_tfdist_error(error: BaseException) -> Exception | None:
    """Returns the tfdist error inside a TensorFlow error, or None."""
    if not hasattr(error, "experimental_payloads"):
        return None
    from tfdist.core import exceptions

    return exceptions.from_tf(error)


def is_interrupt(error: BaseException, reason: str) -> bool:
    """Returns whether Ctrl-C ended the program, here or on the rank at fault."""
    if isinstance(error, KeyboardInterrupt):
        return True
    # Inside a TensorFlow call, KeyboardInterrupt becomes an error whose text mentions
    # it.
    wrapped = "pybind11::error_already_set" in str(error)
    of_tensorflow = hasattr(error, "experimental_payloads")
    if wrapped or of_tensorflow or isinstance(error, native.CoreError):
        return "KeyboardInterrupt" in (str(error) if wrapped else reason)
    return False


# ---- the rank at fault ----


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an exception and its causes, in the order of the traceback."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        before = error.__cause__
        if before is None and not error.__suppress_context__:
            before = error.__context__
        error = before


def culprit_rank(error: BaseException, own_rank: int | None) -> int | None:
    """Returns the rank, other than this one, that caused an exception, or None."""
    found = find_culprit(error, own_rank)
    return found[0] if found else None


def find_culprit(
    error: BaseException, own_rank: int | None
) -> tuple[int, BaseException] | None:
    """Returns the rank, other than this one, that caused an exception, and the error.

    Args:
        error: any exception, including one raised because of a tfdist error.
        own_rank: this rank; None if unknown.

    Returns:
        The rank and the error that names it, or None if no other rank is at fault.
    """
    for one in chain(error):
        found = to_tfdist_error(one) or one
        if isinstance(found, native.CoreError):
            kind, rank = found.payload.get("kind"), found.payload.get("rank")
        else:
            record = getattr(found, "record", None)
            kind, rank = getattr(record, "kind", None), getattr(record, "rank", None)
        if kind in ("evicted", "no_majority"):
            return None  # the other ranks continue without this rank
        if isinstance(rank, int) and rank >= 0:
            return (rank, found) if rank != own_rank else None
    return None


# ---- tracebacks ----


def without_libraries(text: str, folders: Sequence[str]) -> str:
    r"""Removes library frames from a traceback, or from a message that contains one.

    Also replaces consecutive empty lines with one empty line.

    Args:
        text: traceback. Each line `File "PATH", line N` is removed together with the
            more deeply indented lines that follow it.
        folders: folders of the libraries.

    Example:
        >>> from tfdist.core import exit_report
        >>> text = '  File "/lib/a.py", line 1, in f\n    f()\nValueError: x\n'
        >>> exit_report.without_libraries(text, ["/lib"])
        'ValueError: x\n'
    """
    lines: list[str] = []
    cut_at: int | None = None  # indentation of the removed frame
    for line in text.splitlines(keepends=True):
        place = _PLACE.match(line)
        indentation = len(line) - len(line.lstrip())
        if place:
            inside = any(place[2].startswith(f"{folder}/") for folder in folders)
            cut_at = indentation if inside else None
        elif cut_at is not None and line.strip() and indentation <= cut_at:
            cut_at = None  # not at empty lines, which TensorFlow puts between frames
        again_empty = not line.strip() and lines and not lines[-1].strip()
        if cut_at is None and not again_empty:
            lines.append(line)
    return "".join(lines)


def library_folders() -> list[str]:
    """Returns the libraries' folders; [] if Keras's traceback filtering is disabled."""
    keras = sys.modules.get("keras")
    with contextlib.suppress(AttributeError):
        if keras and not keras.config.is_traceback_filtering_enabled():
            return []
    files = [getattr(sys.modules.get(name), "__file__", None) for name in _LIBRARIES]
    return [str(Path(file).parent) for file in files if file]


def location(error: BaseException, folders: Sequence[str]) -> str:
    """Returns ", at FILE:LINE" of the innermost frame outside the libraries, or ""."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not any(frame.filename.startswith(f"{folder}/") for folder in folders):
            return f", at {os.path.basename(frame.filename)}:{frame.lineno}"
    return ""


# ---- end of the program ----


@dataclass(frozen=True)
class Notice:
    """The text to print for an uncaught exception, instead of Python's traceback.

    If both attributes are empty, Python's traceback is printed.

    Attributes:
        line: one line to print instead of a traceback.
        traceback: traceback without the frames of libraries.
    """

    line: str = ""
    traceback: str = ""


def report_end(error: BaseException, rank: int | None) -> Notice:
    """Reports an uncaught exception to the other ranks and to the launcher.

    Args:
        error: the uncaught exception.
        rank: this rank; None if not initialized.

    Returns:
        The text to print instead of Python's traceback.
    """
    culprit, found = find_culprit(error, rank) or (
        None,
        to_tfdist_error(error) or error,
    )
    reason = failure_report.reason(found)
    folders = library_folders()
    full = "".join(traceback.format_exception(error))
    short = without_libraries(full, folders)
    is_consequence = culprit is not None
    if rank is not None:
        known = native.failure()
        if known is not None:
            if not is_consequence and _of_an_operation(error):
                culprit = culprit_rank(known, rank)
        else:
            last = "\n".join(short.splitlines()[-_TRACEBACK_LINES:])
            native.abort(
                reason[:_CAUSE_CHARACTERS],
                detail="" if is_consequence else last[-_CAUSE_CHARACTERS:],
                culprit=culprit,
            )
    if is_interrupt(error, reason):
        _report(reason, culprit, "")
        if culprit is None or isinstance(error, KeyboardInterrupt):
            return Notice(f"{_name(rank)} was interrupted")
        return Notice(f"{_name(rank)} ends: rank {culprit} was interrupted")
    same = _report(reason, culprit, full)
    if same == 0:  # no launcher keeps the full traceback
        return Notice()
    ends = f"{_name(rank)} ends with"
    kind, at = type(to_tfdist_error(error) or error).__name__, location(error, folders)
    if is_consequence:
        return Notice(f"{ends} {kind} because of rank {culprit}{at}")
    if same > 1:
        return Notice(f"{ends} the same {kind} as another rank{at}")
    return Notice(traceback=short)


def _of_an_operation(error: BaseException) -> bool:
    """Returns whether an operation raised `error`; after a failure, all of them do."""
    return isinstance(error, native.CoreError) or hasattr(
        error, "experimental_payloads"
    )


def _name(rank: int | None) -> str:
    return "this rank" if rank is None else f"rank {rank}"


def _report(reason: str, culprit: int | None, full: str) -> int:
    text = {"error": reason[:_ERROR_CHARACTERS], "blamed": culprit}
    if full:
        text["traceback"] = full[-_TRACEBACK_CHARACTERS:]
    return failure_report.send(os.environ, text)


# ---- programs that end without an error ----


def unreduced_training(size: int, finished: int) -> str | None:
    """Returns the warning for a program that trained but reduced no gradients.

    Called at the end of a program in which no tape or optimizer of tfdist has reduced
    gradients. The state of Keras's optimizers and models shows whether the program
    trained.

    Args:
        size: number of ranks.
        finished: number of operations that this rank has finished. A program that
            calls the collectives itself to reduce its gradients has finished at least
            one operation for each update, so it needs no warning.

    Returns:
        The text, or None if no warning is needed.
    """
    keras: Any = sys.modules.get("keras")
    if size == 1 or keras is None:
        return None
    updates, was_in_fit = 0, False
    for one in gc.get_objects():
        # Do not use isinstance, which raises for a dead weak proxy.
        if issubclass(type(one), keras.optimizers.Optimizer):
            # The variables of a TensorFlow 1 graph have no value here.
            with contextlib.suppress(AttributeError, TypeError, NotImplementedError):
                updates = max(updates, int(one.iterations))
        elif issubclass(type(one), keras.Model):
            was_in_fit |= bool(getattr(getattr(one, "history", None), "epoch", None))
    # A loaded optimizer includes the updates of an earlier program in its count.
    trained = updates > 0 and (was_in_fit or finished == 0)
    if not trained or finished >= updates:
        return None
    return (
        f"{size} ranks, and no gradient was reduced: each rank trained a separate "
        "model. Use model.compile(optimizer=tfdist.DistributedOptimizer(...), ...), or "
        "compute the gradients with a tfdist.DistributedGradientTape."
    )
