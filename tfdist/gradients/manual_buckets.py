"""Buckets that the user chooses, as a number of buckets or as lists of variables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tfdist.collectives.local_variables import identity, is_layer, is_variable
from tfdist.gradients.bucketing import split_evenly


class ManualBuckets:
    """The user's choice of buckets: a number of buckets, or lists of variables.

    A variable in several lists belongs to the first of these lists. Variables without a
    gradient are ignored. Variables in no list are assigned to buckets by size.

    Args:
        groups: maximum number of buckets, >= 1; or a list of lists of variables and
            layers. A layer or model represents all its trainable variables.

    Raises:
        TypeError: an entry of `groups` is not a list, or an entry of such a list is
            neither a variable nor a layer.
        ValueError: `groups` is less than 1, or neither a number nor a list.

    Example:
        >>> import tensorflow as tf
        >>> from tfdist.gradients.manual_buckets import ManualBuckets
        >>> a, b, c = (tf.Variable([0.0, 0.0], name=name) for name in "abc")
        >>> ManualBuckets([[a, c]]).places([a, b, c], [8, 8, 8])
        [[2, 0]]
        >>> ManualBuckets(2).places([a, b, c], [8, 8, 8])
        [[2, 1], [0]]
    """

    def __init__(self, groups: int | Iterable[Iterable[Any]]) -> None:
        self._count = 0
        self._members: list[list[Any]] = []
        if isinstance(groups, int) and not isinstance(groups, bool) and groups > 0:
            self._count = groups
            return
        if not isinstance(groups, list | tuple):
            raise ValueError(
                "Expected groups to be a number > 0 or a list of lists of variables, "
                f"got {groups!r}."
            )
        for group in groups:
            if not isinstance(group, list | tuple):
                raise _wrong(group)
            for member in group:
                if not (is_variable(member) or is_layer(member)):
                    raise _wrong(member)
            self._members.append(list(group))

    def places(
        self, variables: Sequence[Any], sizes_bytes: Sequence[int | None]
    ) -> list[list[int]]:
        """Returns the chosen buckets, each as descending indices into `variables`.

        For lists, the buckets are in the order of `groups`; for a number of buckets,
        the last variables come first.

        Args:
            variables: all trained variables.
            sizes_bytes: size in bytes of each variable's gradient; None if the gradient
                is not reduced in a bucket.
        """
        if self._count:
            listed = [i for i, size in enumerate(sizes_bytes) if size is not None]
            sizes = [sizes_bytes[i] or 0 for i in listed]
            cut = split_evenly(sizes, self._count)
            return [[listed[i] for i in bucket] for bucket in cut]
        numbers = self._numbers()
        found: list[list[int]] = [[] for _ in self._members]
        for place in reversed(range(len(variables))):
            number = numbers.get(identity(variables[place]), -1)
            if number >= 0 and sizes_bytes[place] is not None:
                found[number].append(place)
        return [bucket for bucket in found if bucket]

    def describe(self, variables: Sequence[Any]) -> str:
        """Returns a text with the bucket of each variable, which the ranks compare."""
        if self._count:
            return str(self._count)
        numbers = self._numbers()
        return ",".join(str(numbers.get(identity(v), "")) for v in variables)

    def _numbers(self) -> dict[int, int]:
        """Returns the bucket number of each variable, by identity of the variable.

        Computed at each call, because layers may add variables.
        """
        numbers: dict[int, int] = {}
        for number, bucket in enumerate(self._members):
            for one in bucket:
                for variable in one.trainable_variables if is_layer(one) else [one]:
                    numbers.setdefault(identity(variable), number)
        return numbers


def _wrong(found: Any) -> TypeError:
    return TypeError(
        "Expected groups to be a number, or a list of lists of variables and layers, "
        f"got {type(found).__name__}: {found!r}."
    )
