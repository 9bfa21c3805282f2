"""`import horovod...` loads `tfdist.horovod...`: one module object, two names."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

NAME = "horovod"
_REAL = "tfdist.horovod"
# Parts of Horovod that have no counterpart, and what to do without them.
_LAUNCHER = "start the ranks with tfdistrun, or its alias horovodrun"
_ABSENT = {
    "torch": "tfdist trains Keras models on TensorFlow; for PyTorch keep Horovod",
    "mxnet": "tfdist trains Keras models on TensorFlow",
    "spark": "start the ranks with tfdistrun",
    "ray": "start the ranks with tfdistrun",
    "run": _LAUNCHER,
}


def advice_for(part: str) -> str:
    """Returns advice for a part of Horovod that has no counterpart; "" for others."""
    return _ABSENT.get(part.partition(".")[0], "")


def _missing(part: str) -> ModuleNotFoundError:
    name, advice = f"{NAME}.{part}", advice_for(part)
    if part.startswith("runner."):  # tfdist has only the parts that programs import
        advice = _LAUNCHER
    return ModuleNotFoundError(
        f"No module named {name!r} in tfdist's replacement for Horovod"
        + (f": {advice}" if advice else " (docs/from-horovod.md)"),
        name=name,
    )


class _AliasLoader(Loader):
    """Loads a module under a second name: returns the module of the real name."""

    def __init__(self, real: str) -> None:
        self._real = real
        self._own_spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Returns the module imported under its real name."""
        module = importlib.import_module(self._real)
        self._own_spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restores the module's own spec, which the import has replaced."""
        module.__spec__ = self._own_spec


class AliasFinder(MetaPathFinder):
    """Finds `horovod` and its submodules."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Returns the spec of `horovod...`; None for any other module.

        Raises:
            ModuleNotFoundError: tfdist has no such module.
        """
        inside = fullname.removeprefix(f"{_REAL}.")
        if inside != fullname and advice_for(inside):
            # `from horovod import torch` reaches this line; without it, the error would
            # give no reason.
            raise _missing(inside)
        head, _, rest = fullname.partition(".")
        if head != NAME:
            return None
        real = f"{_REAL}.{rest}" if rest else _REAL
        spec = importlib.util.find_spec(real)
        if spec is None or rest.startswith("_"):
            raise _missing(rest)
        return ModuleSpec(
            fullname,
            _AliasLoader(real),
            origin=spec.origin,
            is_package=spec.submodule_search_locations is not None,
        )


def activate() -> None:
    """Makes `import horovod...` in this process import `tfdist.horovod...`.

    Both names refer to the same modules. An installed Horovod is not changed and not
    used. A second call does nothing. The function does not initialize tfdist.

    Raises:
        RuntimeError: Horovod itself has been imported in this process, or
            `TFDIST_ENGINE=horovod` selects it.

    Example:
        >>> import tfdist.horovod
        >>> tfdist.horovod.activate()
    """
    if os.environ.get("TFDIST_ENGINE") == NAME:
        raise RuntimeError(
            "TFDIST_ENGINE=horovod sends tensors through Horovod itself, but this "
            "process replaces Horovod with tfdist: programs that import horovod run on "
            "tfdist's own engine. Unset the variable, or start the program without "
            "--horovod."
        )
    known = sys.modules.get(NAME)
    if known is not None and known is not sys.modules[_REAL]:
        raise RuntimeError(
            "Horovod itself has been imported in this process, from "
            f"{getattr(known, '__file__', None)}. Call tfdist.horovod.activate() "
            "before the first `import horovod`, or start the program with "
            "`tfdistrun --horovod`."
        )
    if not is_active():
        # Precedes the file finder, which would load every module a second time.
        sys.meta_path.insert(0, AliasFinder())


def is_active() -> bool:
    """Returns whether `activate` has been called in this process."""
    return any(isinstance(finder, AliasFinder) for finder in sys.meta_path)
