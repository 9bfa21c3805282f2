"""Tuning files: the fastest algorithm for each request size, measured on a machine.

`tfdist bench --tune` writes a tuning file, and TFDIST_TUNING_FILE is its path. Rank 0
reads the file and the rendezvous sends its text to all ranks, so that all ranks select
the same algorithms. This module does not import TensorFlow.

A file is JSON:

    {
      "format": "tfdist tuning", "version": 1,
      "measured": {...},                          how it was measured; not read
      "rows": [
        {"operation": "allreduce", "hosts": [2, 2], "half_types": false,
         "sizes": [{"up_to_bytes": 65536, "algorithm": "butterfly"},
                   {"up_to_bytes": null, "algorithm": "two_level"}]}
      ]
    }

`hosts` is the number of ranks on each host. `half_types` is whether the row is for
float16 and bfloat16, or for all other types. `up_to_bytes` ascends; null means no
limit. If no row fits, the table of the core is used (docs/algorithms.md).
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfdist.core import native

_log = logging.getLogger("tfdist")
VARIABLE = "TFDIST_TUNING_FILE"
FORMAT = "tfdist tuning"
VERSION = 1
MAX_BYTES = 64 << 10
MAX_SIZES = 64
OPERATIONS = {
    "allreduce": native.ALLREDUCE,
    "allgather": native.ALLGATHER,
    "broadcast": native.BROADCAST,
    "reduce_scatter": native.REDUCE_SCATTER,
    "reduce": native.REDUCE,
    "gather": native.GATHER,
    "scatter": native.SCATTER,
    "alltoall": native.ALLTOALL,
}
_NO_END = (1 << 63) - 1
_REMEDY = "measure a new one with `tfdist bench --tune FILE`"


class TuningError(ValueError):
    """The tuning file cannot be used; the message names the entry and the reason."""


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """The contents of a tuning file.

    Attributes:
        rules: rules of the file, in order.
        hash: first 16 hexadecimal digits of the SHA-256 of the text.
        text: text of the file.
        source: path of the file.
    """

    rules: tuple[native.TuningRule, ...]
    hash: str
    text: str
    source: str


def _expect(value: object, kind: type, where: str, what: str) -> Any:
    fits = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    if not fits:
        raise TuningError(f"{where}: expected {what}, got {json.dumps(value)[:60]}")
    return value


def _fields(value: object, where: str, names: Sequence[str]) -> Mapping[str, Any]:
    found = _expect(value, dict, where, "an object")
    for name in names:
        if name not in found:
            raise TuningError(f"{where}: {name!r} is missing")
    for name in found:
        if name not in names and not (where == "the file" and name == "measured"):
            raise TuningError(
                f"{where}: {name!r} is not known, expected {', '.join(names)}"
            )
    return found


def _sizes(
    value: object, where: str, operation: str, known: Collection[str]
) -> list[tuple[int, str]]:
    sizes = _expect(value, list, where, "a list")
    if not 1 <= len(sizes) <= MAX_SIZES:
        raise TuningError(
            f"{where}: expected 1 to {MAX_SIZES} entries, got {len(sizes)}"
        )
    found: list[tuple[int, str]] = []
    for index, entry in enumerate(sizes):
        at = f"{where}[{index}]"
        fields = _fields(entry, at, ("up_to_bytes", "algorithm"))
        limit, name = fields["up_to_bytes"], fields["algorithm"]
        if limit is None and index == len(sizes) - 1:
            limit = _NO_END
        _expect(limit, int, f"{at}.up_to_bytes", "a number (null in the last entry)")
        if not (found[-1][0] if found else -1) < limit <= _NO_END:
            raise TuningError(f"{at}.up_to_bytes: expected ascending numbers")
        choices = [n.partition("/")[2] for n in known if n.startswith(operation + "/")]
        if name not in choices:
            raise TuningError(
                f"{at}.algorithm: expected one of {', '.join(choices)}; "
                f"got {json.dumps(name)[:60]}"
            )
        found.append((limit, name))
    return found


def _row(value: object, where: str, known: Collection[str]) -> list[native.TuningRule]:
    row = _fields(value, where, ("operation", "hosts", "half_types", "sizes"))
    operation = row["operation"]
    if not isinstance(operation, str) or operation not in OPERATIONS:
        raise TuningError(
            f"{where}.operation: expected one of {', '.join(OPERATIONS)}; "
            f"got {json.dumps(operation)[:60]}"
        )
    hosts = _expect(row["hosts"], list, f"{where}.hosts", "a list of numbers of ranks")
    for ranks in hosts:
        _expect(ranks, int, f"{where}.hosts", "numbers of ranks")
        if not 1 <= ranks <= 1 << 16:
            raise TuningError(f"{where}.hosts: expected 1 to 65536 ranks, got {ranks}")
    if not hosts:
        raise TuningError(f"{where}.hosts: expected at least one host")
    half = _expect(row["half_types"], bool, f"{where}.half_types", "true or false")
    return [
        native.TuningRule(
            kind=OPERATIONS[operation],
            half=half,
            hosts=tuple(hosts),
            up_to_bytes=limit,
            algorithm=name,
        )
        for limit, name in _sizes(row["sizes"], f"{where}.sizes", operation, known)
    ]


def parse(text: str, source: str, known: Collection[str] | None = None) -> Tuning:
    """Checks the text of a tuning file.

    Args:
        text: JSON, at most 64 KiB.
        source: path of the file, for messages.
        known: all algorithms, each as "operation/algorithm"; None: the algorithms of
            the core.

    Raises:
        TuningError: the message names the entry, the expected and the actual value, and
            a fix.
    """
    known = native.build_info()["algorithms"] if known is None else known
    try:
        if len(text.encode()) > MAX_BYTES:
            raise TuningError(f"expected at most {MAX_BYTES} bytes")
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise TuningError(f"not JSON: {error}") from None
        top = _fields(value, "the file", ("format", "version", "rows"))
        if top["format"] != FORMAT:
            raise TuningError(
                f"format: expected {FORMAT!r}, got {json.dumps(top['format'])[:60]}"
            )
        if top["version"] != VERSION:
            raise TuningError(
                f"version: expected {VERSION}, got {json.dumps(top['version'])[:60]}"
            )
        rules: list[native.TuningRule] = []
        seen = set()
        for index, row in enumerate(_expect(top["rows"], list, "rows", "a list")):
            lines = _row(row, f"rows[{index}]", known)
            place = (lines[0].kind, lines[0].half, lines[0].hosts)
            if place in seen:
                raise TuningError(
                    f"rows[{index}]: expected one row for each operation, hosts and "
                    "half_types, got a second one"
                )
            seen.add(place)
            rules += lines
    except TuningError as error:
        raise TuningError(f"{VARIABLE}={source}: {error}; {_REMEDY}") from None
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return Tuning(rules=tuple(rules), hash=digest, text=text, source=source)


def read(path: str) -> Tuning:
    """Reads a tuning file.

    Raises:
        TuningError: the file cannot be read or used.
    """
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        text = data.decode()
    except OSError as error:
        reason = error.strerror or str(error)
        raise TuningError(
            f"{VARIABLE}={path}: cannot be read: {reason}; {_REMEDY}"
        ) from None
    except UnicodeDecodeError:
        raise TuningError(f"{VARIABLE}={path}: not a text file; {_REMEDY}") from None
    return parse(text, path)


def record(environ: Mapping[str, str]) -> dict[str, str] | None:
    """Returns the record that rank 0 sends to all: the file's text, or an error."""
    path = environ.get(VARIABLE)
    if not path:
        return None
    try:
        found = read(path)
    except TuningError as error:
        return {"error": str(error)}
    return {"text": found.text, "source": found.source}


def from_record(record: Mapping[str, str] | None) -> Tuning | None:
    """Returns the tuning from rank 0's record, or None if there is no file.

    Raises:
        TuningError: on all ranks, if the file cannot be used.
    """
    if record is None:
        return None
    if "error" in record:
        raise TuningError(record["error"])
    return parse(record["text"], record["source"])


def log(tuning: Tuning | None, own_rank: int, environ: Mapping[str, str]) -> None:
    """Logs the tuning file in use, or that this rank's variable has no effect."""
    if tuning is not None:
        _log.info("tuning file %s (%s)", tuning.source, tuning.hash)
    elif environ.get(VARIABLE):
        _log.warning(
            "%s is set on rank %d, but not on rank 0. Only rank 0 reads it, so no "
            "tuning file is used",
            VARIABLE,
            own_rank,
        )
