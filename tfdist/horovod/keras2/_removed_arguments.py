"""Arguments of Keras 2.15 that Keras 3 lacks, and the values that are accepted.

Contains only tables and pure functions; `_arguments` and `_models` apply them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tfdist.horovod.keras2._spelling import refuse, tell


@dataclasses.dataclass(frozen=True)
class Dropped:
    """An argument that is not passed on.

    Attributes:
        new: code to write instead; "{label}" stands for the name of the called object.
        harmless: the values that do not affect the result; all other values are
            refused. None: every value is harmless.
    """

    new: str
    harmless: tuple[Any, ...] | None = (None, False)


@dataclasses.dataclass(frozen=True)
class Renamed:
    """An argument that has a different name in Keras 3.

    Attributes:
        new: the name in Keras 3.
    """

    new: str


_OUT = "{label}(...) without it"
_NONE = Dropped(_OUT, (None,))
_ANY = Dropped(_OUT, None)
_FORMAT = Dropped(_OUT)

# Arguments of all layers.
LAYER = {
    "dynamic": Dropped("compile(run_eagerly=True)"),
    "fused": _ANY,  # selects an implementation; Keras 3 has only one
    "virtual_batch_size": Dropped("a keras.layers.BatchNormalization without it"),
    "adjustment": Dropped("a keras.layers.BatchNormalization without it"),
    "time_major": Dropped("keras.ops.swapaxes(x, 0, 1) before the layer and after it"),
    "robust_masking": _ANY,
    "softmax_robust_masking": _ANY,
    "sparse": Dropped("keras.Input(sparse=True), or a layer without it"),
    "type_spec": Dropped("keras.Input(shape=..., dtype=...)"),
}
# Method of a model → its arguments.
MODEL: dict[str, dict[str, Dropped | Renamed]] = {
    "compile": {
        "experimental_run_tf_function": _ANY,
        "experimental_steps_per_execution": Renamed("steps_per_execution"),
        "pss_evaluation_shards": Dropped(_OUT, (None, 0)),
        "sample_weight_mode": Dropped("sample weights of the shape of y"),
        "target_tensors": Dropped("fit(x, y)"),
        "distribute": Dropped("hvd.DistributedOptimizer"),
    },
    "load_weights": {"options": _NONE},
    "save_weights": {"options": _NONE},
    "save": {
        "options": _NONE,
        "signatures": Dropped("model.export(path)"),
        "save_traces": _ANY,
    },
}
# Callable (path in `keras`) → its arguments.
CALLABLES: dict[str, dict[str, Dropped | Renamed]] = {
    "Input": {"type_spec": Dropped("keras.Input(shape=..., dtype=...)")},
    "activations.deserialize": {
        "use_legacy_format": _FORMAT,
        "name": Renamed("config"),
    },
    "activations.relu": {"alpha": Renamed("negative_slope")},
    "callbacks.BackupAndRestore": {
        "save_before_preemption": Dropped("tfdist.callbacks.Checkpoint")
    },
    "callbacks.LambdaCallback": {
        "on_batch_begin": Renamed("on_train_batch_begin"),
        "on_batch_end": Renamed("on_train_batch_end"),
    },
    "callbacks.ProgbarLogger": {"count_mode": _ANY, "stateful_metrics": _ANY},
    "callbacks.TensorBoard": {
        "batch_size": _ANY,
        "write_grads": Dropped("tf.summary.histogram in a train_step"),
    },
    "layers.RNN.get_initial_state": {
        "inputs": Dropped("get_initial_state(batch_size)", (None,)),
    },
    "utils.get_source_inputs": {"layer": _NONE, "node_index": _NONE},
    "utils.load_img": {"grayscale": Dropped("load_img(color_mode='grayscale')")},
    "utils.model_to_dot": {"layer_range": _NONE},
    "utils.plot_model": {"layer_range": _NONE},
    "utils.to_categorical": {
        "y": Renamed("x"),
        "dtype": Dropped("to_categorical(x).astype(dtype)", (None, "float32")),
    },
    **{
        f"datasets.{name}.load_data": {
            "cache_dir": Dropped(
                "load_data() with KERAS_HOME set in the environment", (None,)
            )
        }
        for name in (
            *("boston_housing", "cifar10", "cifar100", "fashion_mnist", "imdb"),
            *("mnist", "reuters"),
        )
    },
    **{
        f"{module}.{function}": {"use_legacy_format": _FORMAT}
        for module in (
            *("constraints", "initializers", "layers", "losses", "metrics"),
            *("optimizers", "optimizers.schedules", "regularizers"),
        )
        for function in ("deserialize", "serialize")
    },
    "activations.serialize": {"use_legacy_format": _FORMAT},
    **{
        f"{module}.ConvNeXt{size}": {"model_name": Renamed("name")}
        for module in ("applications", "applications.convnext")
        for size in ("Base", "Large", "Small", "Tiny", "XLarge")
    },
    **{
        f"layers.{name}.adapt": {
            "batch_size": _ANY,
            "steps": Dropped("adapt(dataset.take(steps))"),
        }
        for name in (
            *("Discretization", "IntegerLookup", "Normalization", "StringLookup"),
            "TextVectorization",
        )
    },
}


def translated(
    label: str, table: Mapping[str, Dropped | Renamed], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Translates Keras 2 arguments to Keras 3; each argument causes one warning.

    Args:
        label: name of the called object, for messages.
        table: the arguments that Keras 3 lacks.
        given: the arguments of the call: name → value.

    Raises:
        NotImplementedError: a value is not supported in Keras 3.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings(record=True):
        ...     translated("relu", CALLABLES["activations.relu"], {"alpha": 0.5})
        {'negative_slope': 0.5}
    """
    found = {}
    for name, value in given.items():
        entry = table.get(name)
        if entry is None:
            found[name] = value
        elif isinstance(entry, Renamed):
            tell(f"{label}({name}=...)", f"{label}({entry.new}=...)")
            found[entry.new] = value
        elif entry.harmless is None or any(
            value is one or (one is not None and bool(value == one))
            for one in entry.harmless
        ):
            tell(f"{label}({name}=...)", entry.new.replace("{label}", label))
        else:
            new = entry.new.replace("{label}", label)
            raise refuse(f"{label}({name}={value!r})", f"Write {new}.")
    return found
