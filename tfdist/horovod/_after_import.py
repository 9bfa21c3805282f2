"""Calls a function once modules have been imported, without importing them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _ToldLoader(Loader):
    """Wraps a module's loader and calls a function once the module is loaded."""

    def __init__(self, loader: Any, done: Callable[[str], None]) -> None:
        self._loader = loader
        self._done = done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Returns what the wrapped loader returns."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Loads the module as if this class were not there."""
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._done(module.__name__)


class _Finder(MetaPathFinder):
    """Finds modules with the other finders; calls a function when all are loaded."""

    def __init__(self, names: Iterable[str], act: Callable[[], None]) -> None:
        self._waits_for = set(names)
        self._act = act

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Returns the spec if `fullname` is one of the awaited modules; else None."""
        if fullname not in self._waits_for:
            return None
        for finder in sys.meta_path:
            if finder is self:
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _ToldLoader(spec.loader, self._done)
                return spec
        return None

    def _done(self, name: str) -> None:
        self._waits_for.discard(name)
        if not self._waits_for and self in sys.meta_path:
            sys.meta_path.remove(self)
            self._act()


def after_import(names: Iterable[str], act: Callable[[], None]) -> None:
    """Calls `act` once all modules with these names have been imported.

    If all of them have been imported already, calls `act` immediately. An exception
    from `act` is raised by the `import` statement that loads the last module.

    Args:
        names: module names; the modules may import one another.
        act: function to call.
    """
    missing = [name for name in names if name not in sys.modules]
    if missing:
        sys.meta_path.insert(0, _Finder(missing, act))
    else:
        act()
