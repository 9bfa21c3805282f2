"""Small functions that scripts import from `horovod.common.util`."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tfdist.horovod.common.basics import basics


def mpi_built(verbose: bool = False) -> bool:
    """Returns `hvd.mpi_built()`; `verbose` prints the answer."""
    return bool(_print_answer("built with MPI", basics.mpi_built(), verbose))


def gloo_built(verbose: bool = False) -> bool:
    """Returns `hvd.gloo_built()`; `verbose` prints the answer."""
    return bool(_print_answer("built with Gloo", basics.gloo_built(), verbose))


def nccl_built(verbose: bool = False) -> bool:
    """Returns `hvd.nccl_built()`; `verbose` prints the answer."""
    return bool(_print_answer("built with NCCL", basics.nccl_built(), verbose))


def ddl_built(verbose: bool = False) -> bool:
    """Returns `hvd.ddl_built()`; `verbose` prints the answer."""
    return bool(_print_answer("built with DDL", basics.ddl_built(), verbose))


def ccl_built(verbose: bool = False) -> bool:
    """Returns `hvd.ccl_built()`; `verbose` prints the answer."""
    return bool(_print_answer("built with oneCCL", basics.ccl_built(), verbose))


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Returns whether a framework can be used: True only for "tensorflow".

    Args:
        ext_base_name: "tensorflow", "torch" or "mxnet".
        verbose: whether to print the answer.
    """
    return bool(
        _print_answer(f"{ext_base_name}: built", ext_base_name == "tensorflow", verbose)
    )


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Returns whether TensorFlow sees a GPU.

    Args:
        ext_base_name: "tensorflow".
        verbose: whether to print the answer.
    """
    if ext_base_name != "tensorflow":
        return bool(_print_answer(f"{ext_base_name}: with GPU", False, verbose))
    import tensorflow as tf

    found = bool(tf.config.list_physical_devices("GPU"))
    return bool(_print_answer("running with GPU", found, verbose))


def _print_answer(what: str, answer: Any, verbose: bool) -> Any:
    if verbose:
        print(f"tfdist: {what}: {'yes' if answer else 'no'}")
    return answer


@contextlib.contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Sets environment variables inside a `with` block; None: variable unchanged.

    Example:
        >>> import os
        >>> with env(AN_EXAMPLE="1"):
        ...     os.environ["AN_EXAMPLE"]
        '1'
        >>> "AN_EXAMPLE" in os.environ
        False
    """
    given = {name: value for name, value in kwargs.items() if value is not None}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def num_rank_is_power_2(num_rank: int) -> bool:
    """Returns whether a number is 1, 2, 4, 8, ...

    Example:
        >>> [n for n in range(10) if num_rank_is_power_2(n)]
        [1, 2, 4, 8]
    """
    return num_rank > 0 and num_rank.bit_count() == 1


def split_list(l: Sequence[Any], n: int) -> list[Sequence[Any]]:  # noqa: E741
    """Splits a list into `n` parts; the first parts may have one more entry.

    Example:
        >>> split_list([1, 2, 3, 4, 5], 2)
        [[1, 2, 3], [4, 5]]
    """
    short, longer = divmod(len(l), n)
    ends = [(i + 1) * short + min(i + 1, longer) for i in range(n)]
    return [l[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def is_iterable(x: Any) -> bool:
    """Returns whether an object is iterable."""
    return hasattr(x, "__iter__") or hasattr(x, "__getitem__")


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Returns whether version `ver` is `target` or later.

    Args:
        ver: a version, e.g. "2.21.0" or "3.0.0rc1".
        target: "major.minor.patch".

    Raises:
        ValueError: an argument is not a string, or `target` does not have three parts.

    Example:
        >>> is_version_greater_equal_than("2.21.0", "2.6.0")
        True
    """
    if not isinstance(ver, str) or not isinstance(target, str):
        raise ValueError(f"Expected two version strings, got {ver!r}, {target!r}.")
    if len(target.split(".")) != 3:
        raise ValueError(f"Expected target as major.minor.patch, got {target!r}.")
    from packaging import version

    return bool(version.parse(ver) >= version.parse(target))


def _cache(function: Callable[..., Any]) -> Callable[..., Any]:
    """Caches the results of a function by the arguments of its calls."""
    return functools.cache(function)
