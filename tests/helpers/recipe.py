"""recipes/resnet50_imagenet.py as a function that a rank of the pool can call."""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


def script() -> ModuleType:
    """The recipe's module."""
    if str(RECIPES) not in sys.path:
        sys.path.insert(0, str(RECIPES))
    return importlib.import_module("resnet50_imagenet")


def run(
    *words: str,
    seen: list[tuple[int, str]] | None = None,
    printed: list[str] | None = None,
) -> str:
    """Calls `main` with the command line `words`; returns what it prints.

    Args:
        words: flags and name=value.
        seen: filled with (step, hash of a picture) for every picture this rank has been
            given to learn from.
        printed: gets what it prints, also when it raises.
    """
    from absl import flags

    module = script()
    for name in [*module.NAMES, "config", "resume", "evaluate_only"]:
        flags.FLAGS[name].unparse()
    argv = flags.FLAGS(["resnet50_imagenet.py", *words])
    plain = module.training_batches
    if seen is not None:
        module.training_batches = lambda train, plan: _watched(
            plain(train, plan), plan.first_step, seen
        )
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output):
            module.main(argv)
    finally:
        import keras

        module.training_batches = plain
        keras.config.set_dtype_policy("float32")
        if printed is not None:
            printed.append(output.getvalue())
    return output.getvalue()


def _watched(dataset: Any, first_step: int, seen: list[tuple[int, str]]) -> Any:
    """The dataset, each batch of which is noted when it is taken."""
    import hashlib

    import tensorflow as tf

    def note(number: Any, images: Any) -> Any:
        for image in images:
            digest = hashlib.sha256(image.tobytes()).hexdigest()
            seen.append((first_step + int(number), digest))
        return images

    def watch(number: Any, batch: tuple[Any, ...]) -> tuple[Any, ...]:
        images = tf.numpy_function(note, [number, batch[0]], tf.uint8)
        images.set_shape(batch[0].shape)
        return (images, *batch[1:])

    return dataset.enumerate().map(watch)
