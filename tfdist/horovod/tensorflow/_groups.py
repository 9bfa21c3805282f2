"""`groups` and the older `num_groups`: which gradients are reduced together."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from tfdist.collectives.local_variables import identity, is_layer
from tfdist.gradients.manual_buckets import VariableGroups
from tfdist.horovod._telling import outside


class Groups(VariableGroups):
    """As Horovod takes them: who is in two groups is in the first.

    Variables that have no gradient are left out.
    """

    def _numbers(self) -> dict[int, int]:
        numbers: dict[int, int] = {}
        for number, group in enumerate(self._members):
            for one in group:
                for variable in one.trainable_variables if is_layer(one) else [one]:
                    numbers.setdefault(identity(variable), number)
        return numbers

    def _unknown(self, variables: Sequence[Any]) -> list[tuple[int, Any]]:
        return []


def groups_of(groups: Any, num_groups: int) -> Groups | None:
    """Returns the groups that `groups` and `num_groups` of a tape or optimizer define.

    Args:
        groups: None, a number > 0, or a list of lists of variables.
        num_groups: deprecated: a number in place of `groups`; 0: not given.

    Returns:
        The groups; None: by bytes.

    Raises:
        ValueError: `groups` is none of these.
        TypeError: something in the lists is no variable.
    """
    if num_groups != 0:
        warnings.warn(
            f"num_groups={num_groups!r} is deprecated: write groups={num_groups!r}.",
            DeprecationWarning,
            stacklevel=outside(),
        )
        groups = num_groups if groups is None else groups
    if groups is None:
        return None
    is_number = isinstance(groups, int) and not isinstance(groups, bool)
    if (is_number and groups < 1) or not (
        is_number or isinstance(groups, list | tuple)
    ):
        raise ValueError(
            "Expected groups to be a number > 0 or a list of lists of variables, got "
            f"{groups!r}."
        )
    return Groups(groups)
