"""Reads the public names of Keras 2, and the parameters of what is called.

    ~/.cache/tfdist-peers/tf215/bin/python tests/helpers/keras2_reading.py \
        > tests/helpers/keras_2_15.json

has written down those of Keras 2.15.0, on TensorFlow 2.15: module → name → names of the
parameters. "= losses.mean_squared_error" is another name of that; "" also stands for
what is not called. Of the classes in `BASES` the methods are read too, as
"Model.fit", and of `tf.Variable`, which weights were. Nothing else of Keras is in it;
this file needs nothing of tfdist.
"""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import sys
from typing import Any

# Class → the base whose methods are not read once more.
BASES = {
    "Model": "layers.Layer",
    "layers.Layer": "",
    "layers.RNN": "layers.Layer",
    "layers.experimental.preprocessing.PreprocessingLayer": "layers.Layer",
    "losses.Loss": "",
    "metrics.Metric": "layers.Layer",
    "callbacks.Callback": "",
    "optimizers.Optimizer": "",
    "optimizers.legacy.Optimizer": "",
}
_PACKAGE = "keras.api._v2.keras"


def read() -> dict[str, dict[str, str]]:
    """Module, without `keras.` in front → name → parameters."""
    package = importlib.import_module(_PACKAGE)
    inside = pkgutil.walk_packages(package.__path__, f"{_PACKAGE}.")
    modules = [_PACKAGE, *(one.name for one in inside)]
    shorts = [name.removeprefix(_PACKAGE).lstrip(".") for name in modules]
    first: dict[int, str] = {}
    found: dict[str, dict[str, str]] = {}
    for short in sorted(shorts, key=lambda name: (name.count("."), name)):
        module = importlib.import_module(f"{_PACKAGE}.{short}".rstrip("."))
        rows = {}
        for name, value in sorted(vars(module).items(), key=_long_names_first):
            if not str(getattr(value, "__module__", "")).startswith("keras.src"):
                continue
            path = f"{short}.{name}".lstrip(".")
            home = first.setdefault(id(value), path)
            rows[name] = parameters(value) if home == path else f"= {home}"
            if path in BASES:
                rows |= _methods(name, value, BASES[path])
        if rows:
            found[short] = dict(sorted(rows.items()))
    tf = importlib.import_module("tensorflow")
    for name in dir(tf.Variable(0.0)):
        if not name.startswith("_"):
            found[""][f"Variable.{name}"] = ""
    return dict(sorted(found.items()))


def _long_names_first(item: tuple[str, Any]) -> tuple[int, str]:
    return -len(item[0]), item[0]


def _methods(name: str, cls: type, base: str) -> dict[str, str]:
    module, _, above = f"{_PACKAGE}.{base}".rpartition(".")
    parent = getattr(importlib.import_module(module), above) if base else object
    return {
        f"{name}.{method}": parameters(inspect.getattr_static(cls, method))
        for method in dir(cls)
        if not method.startswith("_")
        and inspect.getattr_static(cls, method)
        is not inspect.getattr_static(parent, method, None)
        and any(
            method in vars(one) and one.__module__.startswith("keras.src")
            for one in cls.__mro__
        )
    }


def parameters(value: Any) -> str:
    """The names that can be given, without `self`; "" of what is not called."""
    value = getattr(value, "__func__", value)
    if not callable(value):
        return ""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    stars = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    names = [n for n, p in signature.parameters.items() if p.kind not in stars]
    return " ".join(n for n in names if n not in ("self", "cls", "instance"))


if __name__ == "__main__":
    json.dump(read(), sys.stdout, indent=1)
    sys.stdout.write("\n")
