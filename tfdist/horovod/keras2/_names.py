"""Adds the names of Keras 2 to the modules of `keras` and `tf.keras`."""

from __future__ import annotations

import functools
import importlib
import os
import sys
import types
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

import keras

from tfdist.horovod.keras2 import _removed_names
from tfdist.horovod.keras2._spelling import Patches, tell

_TF_KERAS = "keras._tf_keras.keras"
_FACES = ("keras", _TF_KERAS)
# `import tensorflow.keras.layers` loads the file of `keras.layers` a second time.
_ALIAS = "tensorflow.keras"


class Reduction:
    """`keras.losses.Reduction`; in Keras 3 its members are strings."""

    AUTO = "sum_over_batch_size"
    NONE = "none"
    SUM = "sum"
    SUM_OVER_BATCH_SIZE = "sum_over_batch_size"


def install(patches: Patches) -> None:
    """Adds the missing names to every module of `keras` and `tf.keras`."""
    of_tf = importlib.import_module(_TF_KERAS)
    for path in _paths_in(of_tf):
        try:  # as the attribute of `tf.keras`, which may be a module of `keras`
            module = functools.reduce(getattr, path.split("."), of_tf)
        except AttributeError:
            module = _module("keras", path)
        for name in (f"{_TF_KERAS}.{path}", f"{_ALIAS}.{path}"):
            patches.put(sys.modules, name, module)
    patches.put(sys.modules, _ALIAS, of_tf)
    paths = {*_paths_in(of_tf), *_removed_names.MODULES, *_removed_names.GONE}
    for face in _FACES:
        for path in sorted(paths, key=len):  # parents first
            if path and not _exists(face, path):
                _add_module(patches, face, path)
            module = _module(face, path)
            if "__getattr__" not in vars(module):
                patches.put(module, "__getattr__", _getattr(face, path))
        patches.put(_module(face, "losses"), "Reduction", Reduction)
    finder = _GoneFinder()
    sys.meta_path.insert(0, finder)
    patches.on_take_back(lambda: sys.meta_path.remove(finder))


def _paths_in(package: types.ModuleType) -> list[str]:
    """Returns the packages inside a package, such as "preprocessing.text"."""
    found = []
    for folder, _, files in os.walk(package.__path__[0]):
        path = os.path.relpath(folder, package.__path__[0]).replace(os.sep, ".")
        if "__init__.py" in files and path != ".":
            found.append(path)
    return sorted(found)


def _module(face: str, path: str) -> types.ModuleType:
    return importlib.import_module(f"{face}.{path}".rstrip("."))


def modules_of(path: str) -> list[types.ModuleType]:
    """Returns the modules at a path in `keras` and `tf.keras`, without duplicates."""
    found = [_module(face, path) for face in _FACES if _exists(face, path)]
    return list({id(module): module for module in found}.values())


def _exists(face: str, path: str) -> bool:
    try:
        _module(face, path)
    except ImportError:
        return False
    return True


def _add_module(patches: Patches, face: str, path: str) -> None:
    parent, _, name = path.rpartition(".")
    module = types.ModuleType(f"{face}.{path}")
    module.__path__ = []  # makes it a package, so that imports from it use the finder
    names = [f"{face}.{path}"] + ([f"{_ALIAS}.{path}"] if face == _TF_KERAS else [])
    for one in names:
        patches.put(sys.modules, one, module)
    patches.put(_module(face, parent), name, module)


def _getattr(face: str, path: str) -> Callable[[str], Any]:
    def __getattr__(name: str) -> Any:  # noqa: N807
        if not name.startswith("__") or name == "__internal__":
            full = f"{path}.{name}".lstrip(".")
            if _removed_names.advice_for(full):
                raise AttributeError(_removed_names.refusal(full))
            found = _found(face, path, name)
            if found is not None:
                new, value = found
                old = f"keras.{full}"
                tell(f"tf.{old}" if old == new else old, new)
                return value
        label = f"keras.{path}".rstrip(".")
        raise AttributeError(f"module {label!r} has no attribute {name!r}")

    return __getattr__


def _found(face: str, path: str, name: str) -> tuple[str, Any] | None:
    """Returns the new spelling of a name and its value; None if there is none."""
    new = _removed_names.NAMES.get(f"{path}.{name}".lstrip("."))
    if new is None and path in _removed_names.MODULES:
        new = f"{_removed_names.MODULES[path]}.{name}"
    if new is not None:
        module, _, last = new.rpartition(".")
        value = getattr(_module(face, module), last, None)
        return None if value is None else (f"keras.{new}", value)
    other = _FACES[1 - _FACES.index(face)]
    if not _exists(other, path) or name not in vars(_module(other, path)):
        return None
    value = vars(_module(other, path))[name]
    if path == "backend":
        known = f".{name}" if hasattr(keras.ops, name) else ""
        return f"keras.ops{known}", value
    own = getattr(value, "__name__", name)
    label = "keras" if own in vars(_module("keras", path)) else "tf.keras"
    return f"{label}.{path}.{own}", value


class _GoneFinder(MetaPathFinder):
    """Finder that makes `from keras.utils import name` raise advice for removed names.

    Python looks for a module `keras.utils.name`, and its own error gives no advice.
    """

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: types.ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Returns None, unless it raises.

        Raises:
            ImportError: the name existed in Keras 2 and was removed.
        """
        for prefix in (_TF_KERAS, _ALIAS, "keras"):
            if fullname.startswith(f"{prefix}."):
                inside = fullname.removeprefix(f"{prefix}.")
                if _removed_names.advice_for(inside):
                    raise ImportError(_removed_names.refusal(inside), name=fullname)
        return None
