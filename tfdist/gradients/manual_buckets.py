"""Buckets by hand: which gradients are reduced together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tfdist.collectives.local_variables import identity, is_layer, is_variable
from tfdist.gradients.bucketing import split_evenly


class VariableGroups:
    """How a list of gradients is divided: into a number of groups, or by variables.

    Args:
        groups: how many, >= 1; or a list of lists of variables and layers (or models),
            which stand for all their variables. Variables in none of them are
            divided as they are without.

    Raises:
        TypeError: neither, or something in a list is neither a variable nor a layer.
        ValueError: less than 1, or a variable twice.

    Example:
        >>> import tensorflow as tf
        >>> from tfdist.gradients.manual_buckets import VariableGroups
        >>> a, b, c = (tf.Variable([0.0, 0.0], name=name) for name in "abc")
        >>> VariableGroups([[a, c]]).places([a, b, c], [8, 8, 8])
        [[2, 0]]
        >>> VariableGroups(2).places([a, b, c], [8, 8, 8])
        [[2, 1], [0]]
    """

    def __init__(self, groups: int | Iterable[Iterable[Any]]) -> None:
        self._count = 0
        self._members: list[list[Any]] = []
        if isinstance(groups, int) and not isinstance(groups, bool):
            if groups < 1:
                raise ValueError(f"Expected groups to be at least 1, got {groups}.")
            self._count = groups
            return
        if not isinstance(groups, list | tuple):
            raise _wrong(groups)
        for group in groups:
            if not isinstance(group, list | tuple):
                raise _wrong(group)
            for one in group:
                if not (is_variable(one) or is_layer(one)):
                    raise _wrong(one)
            self._members.append(list(group))
        self._numbers()

    def places(
        self, variables: Sequence[Any], sizes_bytes: Sequence[int | None]
    ) -> list[list[int]]:
        """The groups as places in `variables`, descending, in the order of `groups`.

        Args:
            variables: all that are trained.
            sizes_bytes: of their gradients; None for those that are not reduced in a
                group: in no group of the result.

        Raises:
            ValueError: a group names a variable that is not among `variables`, or one
                twice.
        """
        if self._count:
            listed = [i for i, size in enumerate(sizes_bytes) if size is not None]
            sizes = [sizes_bytes[i] or 0 for i in listed]
            cut = split_evenly(sizes, self._count)
            return [[listed[i] for i in group] for group in cut]
        for number, variable in self._unknown(variables):
            raise ValueError(
                f"Group {number} of groups has the variable {_name(variable)}, which "
                "is not among the variables that gradients were given for. Leave it "
                "out."
            )
        numbers = self._numbers()
        found: list[list[int]] = [[] for _ in self._members]
        for place in reversed(range(len(variables))):
            number = numbers.get(identity(variables[place]), -1)
            if number >= 0 and sizes_bytes[place] is not None:
                found[number].append(place)
        return [group for group in found if group]

    def describe(self, variables: Sequence[Any]) -> str:
        """For the line of options that the ranks compare: the group of each variable.

        Variables that are not known are told to all, of which each then refuses them.
        """
        if self._count:
            return str(self._count)
        numbers = self._numbers()
        listed = [str(numbers.get(identity(v), "")) for v in variables]
        unknown = [_name(v).replace(" ", "_") for _, v in self._unknown(variables)]
        return ",".join([*listed, *unknown])

    def _numbers(self) -> dict[int, int]:
        """Identity of each variable → its group. Layers may have got some meanwhile."""
        numbers: dict[int, int] = {}
        for number, group in enumerate(self._members):
            for one in group:
                for variable in one.trainable_variables if is_layer(one) else [one]:
                    if identity(variable) in numbers:
                        raise ValueError(
                            f"The variable {_name(variable)} is in groups twice: its "
                            "gradient is reduced once. Name it once."
                        )
                    numbers[identity(variable)] = number
        return numbers

    def _unknown(self, variables: Sequence[Any]) -> list[tuple[int, Any]]:
        """Group and variable, for what is not among `variables`; layers may be."""
        known = set(map(identity, variables))
        return [
            (number, one)
            for number, group in enumerate(self._members)
            for one in group
            if not is_layer(one) and identity(one) not in known
        ]


def _name(variable: Any) -> str:
    return str(getattr(variable, "path", None) or variable.name)


def _wrong(found: Any) -> TypeError:
    return TypeError(
        "Expected groups to be a number, or a list of lists of variables and layers, "
        f"got {type(found).__name__}: {found!r}."
    )
