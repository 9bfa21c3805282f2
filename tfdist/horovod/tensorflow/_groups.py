"""`groups` and the older `num_groups`: which gradients are reduced together."""

from __future__ import annotations

import warnings
from typing import Any

from tfdist.gradients.manual_buckets import ManualBuckets
from tfdist.horovod._warnings import stacklevel_outside


def groups_of(groups: Any, num_groups: int) -> ManualBuckets | None:
    """Returns the groups that a tape's or optimizer's `groups` and `num_groups` define.

    Args:
        groups: None, a number > 0, or a list of lists of variables.
        num_groups: deprecated; number of groups, used if `groups` is None; 0: not
            given.

    Returns:
        The groups. None if none are defined: gradients are then grouped by size.

    Raises:
        ValueError: `groups` is neither a number > 0 nor a list.
        TypeError: an entry of `groups` is not a list of variables and layers.
    """
    if num_groups != 0:
        warnings.warn(
            f"num_groups={num_groups!r} is deprecated: write groups={num_groups!r}.",
            DeprecationWarning,
            stacklevel=stacklevel_outside(),
        )
        groups = num_groups if groups is None else groups
    return None if groups is None else ManualBuckets(groups)
