"""The table: every public name and parameter of Keras 2.15 under `tfdistrun --horovod`.

`keras_2_15.json` is Keras's own, read off its signatures (`keras2_reading`). What Keras
3 has as well is found by looking; what the mode does is read off the mode itself. Here
stands only what neither shows.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfdist.horovod import _warnings, keras2
from tfdist.horovod.keras2 import (
    _arguments,
    _models,
    _optimizer_methods,
    _removed_arguments,
)
from tfdist.horovod.keras2._spelling import Keras2SpellingWarning

KERAS_2: dict[str, dict[str, str]] = json.loads(
    (Path(__file__).parent / "keras_2_15.json").read_text()
)
FACES = ("keras", "keras._tf_keras.keras")
SAME = "as in Keras 2"
NAMES = "test_horovod_keras2_names"
ARGUMENTS = "test_horovod_keras2_arguments"
OPTIMIZERS = "test_horovod_keras2"
MODELS = "test_horovod_keras2_models"
_BY_PLACE = "the same by its place; Keras 3 has another name for it"
_KEYWORD = "Keras 3 takes it as a keyword"
_OF_KERAS = "an error of Keras 3 that says what to write"
# "what.is.called(parameters)" → what they do, and the test.
PARAMETERS = {
    "Model.call(inputs training mask)": (_BY_PLACE, NAMES),
    "layers.Layer.call(inputs)": (_BY_PLACE, NAMES),
    "layers.Layer.compute_mask(mask)": (_BY_PLACE, NAMES),
    "layers.Layer.compute_output_shape(input_shape)": (_BY_PLACE, NAMES),
    "layers.RNN.build(input_shape)": (_BY_PLACE, NAMES),
    "layers.RNN.call(inputs)": (_BY_PLACE, NAMES),
    "layers.RNN.call(constants)": ("an error: an unexpected keyword", ARGUMENTS),
    "layers.RNN.compute_mask(inputs)": (_BY_PLACE, NAMES),
    "layers.RNN.compute_output_shape(input_shape)": (_BY_PLACE, NAMES),
    "layers.RNN.reset_states(states)": ("works", ARGUMENTS),
    "Model.load_weights(by_name)": (_KEYWORD, ARGUMENTS),
    "Model.save(save_format)": (
        f"`h5`, `keras`: as there; `tf`: {_OF_KERAS}",
        ARGUMENTS,
    ),
    "models.save_model(save_format)": (
        f"`h5`, `keras`: as there; `tf`: {_OF_KERAS}",
        ARGUMENTS,
    ),
    "Model.save_weights(save_format)": (
        "`h5`: as there; `tf`: an error; write `w.weights.h5`",
        MODELS,
    ),
    "Model.train_on_batch(reset_metrics)": ("works", ARGUMENTS),
    "Model.test_on_batch(reset_metrics)": ("works", ARGUMENTS),
    "Sequential(layers name)": (_KEYWORD, ARGUMENTS),
    "callbacks.ModelCheckpoint(options)": ("None: no effect; else an error", MODELS),
    "layers.LeakyReLU(alpha)": (_KEYWORD, ARGUMENTS),
    "layers.EinsumDense(activity_regularizer)": (_KEYWORD, ARGUMENTS),
    "layers.Embedding(activity_regularizer input_length)": (_KEYWORD, ARGUMENTS),
    "layers.InputLayer(input_shape)": (_KEYWORD, ARGUMENTS),
    "layers.dot(normalize)": (_KEYWORD, ARGUMENTS),
    "layers.Layer.add_loss(losses)": ("works; write `loss`", ARGUMENTS),
    "layers.Layer.add_metric(value name)": (_OF_KERAS, ARGUMENTS),
    "optimizers.Optimizer(name weight_decay clipnorm clipvalue global_clipnorm use_ema "
    "ema_momentum ema_overwrite_frequency)": (_KEYWORD, ARGUMENTS),
    "optimizers.Optimizer.apply_gradients(name)": ("no effect", OPTIMIZERS),
    "optimizers.Optimizer.apply_gradients(skip_gradients_aggregation)": (
        "no effect, unless gradients would be reduced twice: an error",
        OPTIMIZERS,
    ),
}
# Parameters that came by **kwargs, which no signature shows.
BY_KEYWORD = {
    "layers.Layer": "input_dim input_shape batch_input_shape batch_size weights "
    "autocast implementation dynamic fused virtual_batch_size adjustment "
    "robust_masking softmax_robust_masking",
    "Model.compile": "experimental_run_tf_function experimental_steps_per_execution "
    "sample_weight_mode target_tensors distribute",
    "Model.save": "options signatures save_traces",
    "callbacks.ModelCheckpoint": "period",
    "callbacks.TensorBoard": "batch_size write_grads",
    "optimizers.Optimizer": "lr decay",
    "layers.Layer.add_weight": "caching_device collections getter partitioner "
    "experimental_autocast",
}
_TAKEN = {
    "layers.Layer(input_dim input_shape autocast implementation)": (
        _KEYWORD,
        ARGUMENTS,
    ),
    "layers.Layer(batch_input_shape batch_size weights)": ("works", ARGUMENTS),
    "callbacks.ModelCheckpoint(period)": ("1: no effect; else an error", MODELS),
    "optimizers.Optimizer(lr decay)": ("works", OPTIMIZERS),
}


def find(path: str, face: str) -> Any:
    """The meaning of a path below a face of Keras.

    Raises:
        AttributeError: nothing.
    """
    parts = path.split(".")
    for end in range(len(parts) - 1, -1, -1):
        try:
            found = importlib.import_module(".".join([face, *parts[:end]]))
        except ImportError:
            continue
        return functools.reduce(getattr, parts[end:], found)
    raise AttributeError(path)


def rows() -> dict[str, str]:
    """Path → parameters, of all names; "= path" is another name for that."""
    return {
        f"{module}.{name}".lstrip("."): text
        for module, names in KERAS_2.items()
        for name, text in names.items()
    }


def is_method(path: str) -> bool:
    """Whether a path is that of an attribute of a class."""
    return path.rpartition(".")[0].rpartition(".")[2][:1].isupper()


@functools.cache
def one_of(cls: str) -> Any:
    """An object of a class of Keras, of which all attributes are there."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return {
        "Model": lambda: model,
        "Layer": lambda: model.layers[0],
        "RNN": lambda: keras.layers.LSTM(1),
        "Loss": lambda: keras.losses.MeanSquaredError(),
        "Metric": lambda: keras.metrics.Mean(),
        "Callback": lambda: keras.callbacks.EarlyStopping(),
        "Optimizer": lambda: keras.optimizers.SGD(0.5),
        "Variable": lambda: keras.Variable([1.0]),
    }[cls]()


def natural(path: str) -> bool:
    """Whether Keras 3 has a name itself, outside of the mode, in both faces."""
    if is_method(path):
        owner, _, name = path.rpartition(".")
        cls = owner.rpartition(".")[2]
        is_gone = ".legacy." in path or cls == "PreprocessingLayer"
        return not is_gone and hasattr(one_of(cls), name)
    module, _, name = path.rpartition(".")
    if module == "optimizers.legacy":
        return False  # Keras 3 has names there whose use raises
    try:
        return all(
            hasattr(find(module, f) if module else find("", f), name) for f in FACES
        )
    except AttributeError:
        return False


def in_mode(path: str) -> str:
    """The effect of the mode on a name; "" if it is missing without a word."""
    found = {_in_mode(path, face) for face in FACES}
    if "" in found:
        return ""
    return "; ".join(sorted(found - {SAME})) or SAME


def _in_mode(path: str, face: str) -> str:
    owner, _, name = path.rpartition(".")
    if name in ("get_gradients", "get_updates"):  # methods that raise when called
        return f"an error: {_optimizer_methods._TAPE}"
    _warnings.reset()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            if is_method(path) and not owner.endswith("PreprocessingLayer"):
                getattr(one_of(owner.rpartition(".")[2]), name)
            else:
                find(path, face)
        except (AttributeError, ImportError, RuntimeError) as error:
            if owner == "Variable" and not _is_there(tf.Variable([1.0]), name):
                return "an error, as of every tf.Variable outside of a graph"
            _, separator, advice = str(error).partition(" does not exist in Keras 3. ")
            return f"an error: {advice}" if separator else ""
    told = [str(w.message) for w in caught if w.category is Keras2SpellingWarning]
    if not told:
        return "works" if is_method(path) else SAME
    return f"works; write `{told[-1].partition('Write ')[2].rstrip('.')}`"


def _is_there(thing: Any, name: str) -> bool:
    try:
        getattr(thing, name)
    except (AttributeError, RuntimeError):
        return False
    return True


def lacking(path: str) -> list[str]:
    """The parameters that Keras 3 lacks of what both have; outside of the mode."""
    text = "" if rows().get(path, "").startswith("= ") else rows().get(path, "")
    extra = BY_KEYWORD.get(path, "").split()
    for face in FACES:
        try:
            known = inspect.signature(find(path, face)).parameters
        except (AttributeError, TypeError, ValueError):
            continue
        return [one for one in text.split() if one not in known] + extra
    return extra


def effect_of(path: str, parameter: str) -> tuple[str, str]:
    """The effect of a parameter of Keras 2 and its test; "" for nothing."""
    for table in (PARAMETERS, _TAKEN):
        for key, value in table.items():
            called, _, names = key.rstrip(")").partition("(")
            if called == path and parameter in names.split():
                return value
    entry = _entry(path, parameter)
    if entry is None:
        return "", ""
    if isinstance(entry, _removed_arguments.Renamed):
        return f"works; write `{entry.new}`", ARGUMENTS
    new = entry.new.replace("{label}", path.rpartition(".")[2])
    if entry.harmless is None:
        return f"no effect; write {new}", ARGUMENTS
    values = ", ".join(map(repr, entry.harmless))
    return f"{values}: no effect; else an error: write {new}", ARGUMENTS


def _entry(
    path: str, parameter: str
) -> _removed_arguments.Dropped | _removed_arguments.Renamed | None:
    module, _, name = path.rpartition(".")
    if name == "add_weight":
        state = _arguments._OF_METRIC_STATE
        return (state if "Metric" in module else _arguments._OF_VARIABLE).get(parameter)
    if name == "add_variable_from_reference":
        return _optimizer_methods._REFERENCE.get(
            parameter
        ) or _removed_arguments.Dropped("it without", (None,))
    if path == "optimizers.Optimizer.build":
        return _optimizer_methods.BUILD.get(parameter)
    if module == "Model" and parameter in _models._READING:
        return _removed_arguments.Dropped(
            f"keras.utils.PyDataset({parameter}=...)", None
        )
    if module == "optimizers" and parameter == "jit_compile":
        return _removed_arguments.Dropped("{label}(...) without it", None)
    for table in (
        _removed_arguments.CALLABLES.get(path, {}),
        _removed_arguments.MODEL.get(name, {}),
    ):
        if parameter in table:
            return table[parameter]
    return _removed_arguments.LAYER.get(parameter) if module == "layers" else None


def parameters_of_tests() -> Iterator[tuple[str, str]]:
    """Parameter that Keras 3 lacks, as "called(parameter)", and its test."""
    assert not keras2.is_active()
    for path in sorted({*rows(), *BY_KEYWORD}):
        for name in lacking(path) if natural(path) else ():
            yield f"{path}({name})", effect_of(path, name)[1]


def table() -> Iterator[tuple[str, str, str]]:
    """Name or parameter, effect, test: of everything that is not simply the same."""
    assert not keras2.is_active()
    other = [path for path in sorted(rows()) if not natural(path)]
    parameters = [name for name, _ in parameters_of_tests()]
    keras2.activate()
    try:
        for path in other:
            yield path, in_mode(path), NAMES
    finally:
        keras2.deactivate()
    for name in parameters:
        path, _, parameter = name.rstrip(")").partition("(")
        yield name, *effect_of(path, parameter)
