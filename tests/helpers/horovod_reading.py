"""Reads an interface off the signatures of modules: Horovod's own, and ours.

    ~/.cache/tfdist-peers/tf215/bin/python tests/helpers/horovod_reading.py \
        > tests/helpers/horovod_0_28_1.json

has written down that of Horovod 0.28.1, as `make peers` installs it: names, parameters
and defaults, and nothing else of it. So this file needs nothing of tfdist.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

MODULES = (
    "tensorflow",
    "tensorflow.mpi_ops",
    "tensorflow.compression",
    "tensorflow.elastic",
    "tensorflow.functions",
    "tensorflow.util",
    "tensorflow.keras",
    "tensorflow.keras.callbacks",
    "tensorflow.keras.elastic",
    "keras",
    "keras.callbacks",
    "keras.elastic",
    "common.basics",
    "common.elastic",
    "common.exceptions",
    "common.process_sets",
    "common.util",
    "data",
)
# Objects that functions return have methods too: "f().m" is m of what f returns.
MADE = {
    "tensorflow": ("DistributedGradientTape", "DistributedOptimizer"),
    "tensorflow.keras": ("DistributedOptimizer",),
}
# Scripts take what these import from elsewhere too; of others it is no interface.
_WHOLE = ("tensorflow", "tensorflow.mpi_ops", "tensorflow.keras", "keras", "data")
_REDUCTIONS = ("Average", "Sum", "Adasum", "Min", "Max", "Product")


def read(package: str) -> dict[str, dict[str, str]]:
    """Module → name → parameters, as one writes them; of a constant "= value".

    Args:
        package: whose name stands before those of `MODULES`.
    """
    found = {}
    for name in MODULES:
        module = importlib.import_module(f"{package}.{name}")
        rows = dict(_rows_of(module, name, package))
        for function in MADE.get(name, ()):
            cls = type(made_by(module, name, function))
            for method, value in _own(cls, package):
                rows[f"{function}().{method}"] = parameters(value, package)
        found[name] = dict(sorted(rows.items()))
    return found


def made_by(module: ModuleType, name: str, function: str) -> Any:
    """What a function of `MADE` returns."""
    import tensorflow as tf

    if function == "DistributedGradientTape":
        return module.DistributedGradientTape(tf.GradientTape())
    if name == "tensorflow":
        sgd = tf.compat.v1.train.GradientDescentOptimizer(0.5)
    else:
        # Named: Keras would number those that tests make otherwise.
        sgd = tf.keras.optimizers.SGD(0.5, name="made")
    return module.DistributedOptimizer(sgd)


def _rows_of(module: ModuleType, short: str, package: str) -> Iterator[tuple[str, str]]:
    for name, value in _names_of(module, short, package):
        if name in _REDUCTIONS:
            yield name, f"= {int(value)}"
        elif inspect.isroutine(value) or inspect.isclass(value):
            yield name, parameters(value, package)
        if inspect.isclass(value):
            for method, function in _own(value, package):
                yield f"{name}.{method}", parameters(function, package)


def _names_of(
    module: ModuleType, short: str, package: str
) -> Iterator[tuple[str, Any]]:
    listed = getattr(module, "__all__", None)
    for name, value in list(vars(module).items()):
        if name.startswith("_") or (listed is not None and name not in listed):
            continue
        home = str(getattr(value, "__module__", ""))
        own = home == module.__name__ or listed is not None or short in _WHOLE
        if name in _REDUCTIONS or (own and home.startswith(package)):
            yield name, value


def _own(cls: type, package: str) -> Iterator[tuple[str, Any]]:
    """Methods of a class and of bases that are hidden away, but Keras's hooks."""
    is_callback = hasattr(cls, "on_epoch_end")
    seen = set()
    for base in cls.__mro__:
        if base is not cls and not base.__module__.startswith(f"{package}._"):
            continue
        for name, value in vars(base).items():
            if isinstance(value, staticmethod | classmethod):
                value = value.__func__
            if not inspect.isfunction(value) or name.startswith("_") or name in seen:
                continue
            if value.__module__.startswith(package) and not (
                is_callback and name.startswith("on_")
            ):
                seen.add(name)
                yield name, value


def parameters(function: Any, package: str) -> str:
    """Without `self`; keywords that can't be given by place are left out."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # of an exception without an __init__ of its own
        return ""
    shown = []
    for name, parameter in signature.parameters.items():
        if name == "self" or parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            continue
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
        text = stars.get(parameter.kind, "") + name
        if parameter.default is not parameter.empty:
            text += f"={_shown(name, parameter.default, package)}"
        shown.append(text)
    return ", ".join(shown)


def _shown(name: str, default: Any, package: str) -> str:
    """A default as one writes it."""
    compression = importlib.import_module(f"{package}.tensorflow.compression")
    sets = importlib.import_module(f"{package}.common.process_sets")
    if default is compression.Compression.none:
        return "Compression.none"
    if default is sets.global_process_set:
        return "global_process_set"
    if name == "op" and isinstance(default, int):
        return _REDUCTIONS[int(default)]
    return repr(default)


if __name__ == "__main__":
    json.dump(read("horovod"), sys.stdout, indent=1)
    sys.stdout.write("\n")
