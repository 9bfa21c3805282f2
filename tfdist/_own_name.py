"""Subclasses that go by the name of the class they extend.

Keras saves the name of an object's class. Under its own name an extended optimizer or
layer loads without tfdist, as the plain one.
"""

from __future__ import annotations

from typing import Any


def subclass_under_own_name(
    cls: Any, mixin: Any, public: Any, attributes: dict[str, Any]
) -> Any:
    """A subclass of `cls` with the methods of a mixin before its own.

    Args:
        cls: a class of Keras or of the user.
        mixin: what is put before it.
        public: the module of Keras that exports such classes, `keras.layers` or
            `keras.optimizers`: where Keras looks for what it exports.
        attributes: of the new class.
    """
    is_public = getattr(public, cls.__name__, None) is cls
    names = {
        "__module__": public.__name__ if is_public else cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
    }
    return type(cls.__name__, (mixin, cls), {**names, **attributes})
