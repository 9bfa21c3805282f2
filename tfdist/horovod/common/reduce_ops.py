"""Average, Sum, Adasum, Min, Max, Product: Horovod's reduction constants."""

from __future__ import annotations

import enum
import warnings
from typing import Any

from tfdist.horovod._warnings import stacklevel_outside


class ReduceOps(enum.IntEnum):
    """Reductions of the ranks' values; `hvd.Sum` is `ReduceOps.Sum`."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5


Average, Sum, Adasum, Min, Max, Product = ReduceOps


def handle_average_backwards_compatibility(op: Any, average: bool | None) -> Any:
    """Returns the reduction that `op` and the deprecated `average` select.

    Args:
        op: a reduction constant, or None.
        average: None; True: `Average`; False: `Sum`.

    Returns:
        The reduction; `Average` if neither is given.

    Raises:
        ValueError: both are given.

    Example:
        >>> handle_average_backwards_compatibility(None, None).name
        'Average'
    """
    if average is None:
        return Average if op is None else op
    if op is not None:
        raise ValueError(
            f"Expected op or average, got both: op={op!r}, average={average!r}. op "
            "supersedes average: omit average."
        )
    wanted = Average if average else Sum
    warnings.warn(
        f"average={average!r} is deprecated: write op=hvd.{wanted.name}.",
        DeprecationWarning,
        stacklevel=stacklevel_outside(),
    )
    return wanted


def name_of(op: Any) -> str:
    """Returns the name that a reduction has in `tfdist.ReduceOp`.

    Raises:
        ValueError: `op` is not a reduction.

    Example:
        >>> name_of(Max)
        'MAX'
    """
    known = getattr(op, "name", None)
    if isinstance(op, enum.IntEnum) and not isinstance(op, ReduceOps):
        return str(known)  # a tfdist constant, whose numbers have different meanings
    is_number = hasattr(op, "__index__") and not isinstance(op, bool)
    if not is_number or int(op) not in list(ReduceOps):
        names = ", ".join(f"hvd.{one.name}" for one in ReduceOps)
        raise ValueError(f"Expected op to be one of {names}, got {op!r}.")
    return ReduceOps(int(op)).name.upper()
