"""Creates subclasses that keep the name of the class they extend.

Keras saves the name of an object's class. If an extended optimizer or layer keeps the
original name, it can be loaded without tfdist, as the plain class.
"""

from __future__ import annotations

from typing import Any


def subclass_under_own_name(
    cls: Any, mixin: Any, public: Any, attributes: dict[str, Any]
) -> Any:
    """Returns a subclass of `cls` in which the methods of a mixin come first.

    Args:
        cls: class of Keras or of the user.
        mixin: class whose methods override the methods of `cls`.
        public: Keras module that exports such classes, e.g. `keras.layers`.
        attributes: attributes of the new class.
    """
    is_public = getattr(public, cls.__name__, None) is cls
    names = {
        "__module__": public.__name__ if is_public else cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
    }
    extended = type(cls.__name__, (mixin, cls), {**names, **attributes})
    _save_under_registered_name(extended, cls)
    return extended


def _save_under_registered_name(extended: Any, cls: Any) -> None:
    """Makes Keras save the extended class under the registered name of `cls`."""
    import keras

    registered = keras.saving.get_registered_name(cls)
    package, separator, name = registered.partition(">")
    if separator:
        register = keras.saving.register_keras_serializable(package, name)
        register(extended)
        register(cls)  # register again: the name must load as the plain class
