"""Checks that settings match on all ranks; computes the topology. Pure functions."""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

from tfdist.core import native, tuning
from tfdist.core.rendezvous import auth
from tfdist.core.rendezvous.environment import Placement
from tfdist.core.rendezvous.errors import RendezvousError, invalid, mismatch, numbers
from tfdist.core.version import __version__

_TENSORFLOW = ("tensorflow", "tensorflow-cpu", "tensorflow-gpu", "tf-nightly")


def tensorflow_version() -> str:
    """Returns the version of the installed TensorFlow, or "". Does not import it."""
    module = sys.modules.get("tensorflow")
    if module is not None and hasattr(module, "__version__"):
        return str(module.__version__)
    for name in _TENSORFLOW:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""


def versions() -> dict[str, str]:
    """Returns the software versions and the byte order of this rank, by name."""
    return {
        "version of the protocol": str(auth.PROTOCOL),
        "version of tfdist": __version__,
        "byte order": sys.byteorder,
        "version of TensorFlow": tensorflow_version(),
    }


def agreed_settings(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns this rank's values of the variables that must be equal on all ranks."""
    return {name: row["value"] for name, row in rows.items() if row["agreed"]}


def _differences(values: Sequence[Any]) -> str:
    """Formats the values by rank, e.g. "8 on ranks 0 and 2; 4 on rank 1"."""
    ranks_by_value: dict[str, list[int]] = defaultdict(list)
    for rank, value in enumerate(values):
        ranks_by_value["not set" if value is None else f"{value!s:.100}"].append(rank)
    return "; ".join(
        f"{text} on {numbers(ranks)}" for text, ranks in ranks_by_value.items()
    )


def check_agreement(records: Sequence[Mapping[str, Any]]) -> None:
    """Compares the records of the ranks; every rank gets the same result.

    Args:
        records: one record for each rank, in rank order, each with "versions" and
            "settings".

    Raises:
        RendezvousError: values differ; the message names the ranks and the values.
    """
    for field, remedy in (
        ("versions", "install the same software on all hosts"),
        ("settings", "set it to one value on all ranks (tfdistrun --env NAME=VALUE)"),
    ):
        names = sorted({name for record in records for name in record[field]})
        found = []
        for name in names:
            values = [record[field].get(name) for record in records]
            if any(value != values[0] for value in values):
                found.append(f"{name}: {_differences(values)}")
        if found:
            detail = "\n".join(found)
            raise _mismatch(found, detail, remedy)


def _mismatch(found: list[str], detail: str, remedy: str) -> RendezvousError:
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return mismatch(f"the ranks do not agree on {found[0]}{more}; {remedy}", detail)


def tuning_of(records: Sequence[Mapping[str, Any]]) -> tuning.Tuning | None:
    """Returns the tuning that rank 0 has read, or None without a tuning file.

    Args:
        records: one record for each rank, in rank order; the first has "tuning".

    Raises:
        RendezvousError: the tuning file cannot be used; raised on every rank.
    """
    try:
        return tuning.from_record(records[0].get("tuning"))
    except tuning.TuningError as error:
        refused = invalid(str(error))
        refused.known_to_all = True
        raise refused from None


def topology(
    placement: Placement,
    records: Sequence[Mapping[str, Any]],
    host_of: tuple[int, ...],
) -> native.Topology:
    """Returns the topology of this rank.

    Local ranks are those of the launcher. If it did not set them for all ranks, the
    ranks on each host (`locate`) are numbered.

    Args:
        placement: placement of this rank.
        records: one record for each rank, in rank order, each with "local_rank" and
            "local_size" (None if unknown).
        host_of: for each rank, the index of its host.
    """
    rank = placement.rank
    by_launcher = all(record["local_rank"] is not None for record in records)
    local_ranks = [
        record["local_rank"] if by_launcher else host_of[:other].count(host_of[other])
        for other, record in enumerate(records)
    ]
    column = [r for r, local in enumerate(local_ranks) if local == local_ranks[rank]]
    cross_rank, cross_size = placement.cross_rank, placement.cross_size
    if cross_rank is None or cross_size is None:
        cross_rank, cross_size = column.index(rank), len(column)
    local_size = records[rank]["local_size"] if by_launcher else None
    return native.Topology(
        rank=rank,
        size=placement.size,
        local_rank=local_ranks[rank],
        local_size=(
            local_size if local_size is not None else host_of.count(host_of[rank])
        ),
        cross_rank=cross_rank,
        cross_size=cross_size,
        host_of=host_of,
    )


def processors() -> str:
    """Returns the CPUs that this rank may use, as a hexadecimal bit mask."""
    return f"{sum(1 << number for number in os.sched_getaffinity(0)):x}"


def sharing(topology: native.Topology, records: Sequence[Mapping[str, Any]]) -> int:
    """Counts the ranks that may share a CPU with this rank, including this rank.

    If more ranks are local according to the launcher than were proved to be on this
    host, the additional ranks are assumed to use any CPU.

    Args:
        topology: topology of this rank.
        records: one record for each rank, in rank order, each with "processors".
    """
    rank, host_of = topology.rank, topology.host_of
    here = [other for other, host in enumerate(host_of) if host == host_of[rank]]
    masks = [int(records[other]["processors"], 16) for other in here]
    own = int(records[rank]["processors"], 16)
    apart = sum(mask & own == 0 for mask in masks)
    return max(topology.local_size, len(here)) - apart
