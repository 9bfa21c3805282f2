"""Whether larger or smaller values of a metric are better."""

from __future__ import annotations

import keras


def mode_of(monitor: str, model: keras.Model) -> str:
    """Returns "max" or "min": whether larger or smaller values of a metric are better.

    Raises:
        ValueError: the direction is unknown.
    """
    modes = {"loss": "min"}
    for metric in model.metrics:
        for one in getattr(metric, "metrics", None) or [metric]:
            if hasattr(one, "_direction"):  # as in Keras's callbacks
                modes[one.name] = "max" if one._direction == "up" else "min"
    name = monitor.removeprefix("val_")
    outputs = getattr(model, "output_names", None) or ()
    for known in (name, *(name.removeprefix(f"{output}_") for output in outputs)):
        if known in modes:
            return modes[known]
    if any(word in name for word in ("acc", "auc", "precision", "recall", "f1")):
        return "max"
    if name.endswith("loss"):
        return "min"
    raise ValueError(
        f"Expected monitor to be one of {sorted(modes)}, or a mode, got {monitor!r} "
        "without a mode: it is unknown whether larger or smaller values are better. "
        "Pass mode='max' to keep the model with the largest value, or mode='min' for "
        "the smallest."
    )
