"""restore: loads a checkpoint on one rank and broadcasts it to all ranks."""

from __future__ import annotations

import io
import json
import os
import re
import zipfile
from collections import Counter
from typing import Any

import keras

from tfdist.collectives.all_ranks import CoordinatedCall
from tfdist.collectives.variables import broadcast_variables
from tfdist.core import runtime
from tfdist.core.process_sets import ProcessSet, members_of
from tfdist.core.weights_state import check_not_torn
from tfdist.gradients import accumulation
from tfdist.layers.saved_generators import read_states, set_states
from tfdist.layers.seed_generators import broadcast_seed_generators
from tfdist.training.checkpoint_files import newest_checkpoint
from tfdist.training.model_building import is_built
from tfdist.training.model_optimizers import (
    members_of_attribute,
    optimizers_of,
    parts_of,
    updates_of,
)
from tfdist.training.preprocessing_layers import check_alike, follow_variables

_WEIGHTS = "model.weights.h5"
_CONFIG = "config.json"


def restore(
    model: keras.Model,
    path: str | os.PathLike[str],
    *,
    missing_ok: bool = False,
    timeout_s: float | None = None,
    process_set: ProcessSet | None = None,
) -> int:
    """Restores the weights and optimizers of a compiled model on all ranks.

    The lowest rank reads the file and broadcasts its contents, so the other ranks do
    not need access to the file. The job that saved it may have had a different number
    of ranks. Training continues as if it had not been interrupted: the optimizer gets
    its slots and its step count, which determines the learning rate of schedules.
    Optimizers in other attributes of the model (a GAN has two) are also restored. If
    the file was saved by `Checkpoint`, the random number generators of layers (dropout)
    also continue, each rank with its own stream, as after
    `tfdist.layers.broadcast_seed_generators`. `model.save` does not save generators.

    A file that `Checkpoint` has written is compared with its checksum first. Given a
    folder or a pattern, the newest undamaged file is restored. Damaged files are
    skipped, and the reason is logged (`tfdist.newest_checkpoint`).

    Args:
        model: the model, built and compiled like the saved model on all ranks. This
            function builds the optimizer of `compile`. Other optimizers have to be
            built if they were built when the file was saved.
        path: a ".keras" file written by `tfdist.callbacks.Checkpoint` or `model.save`;
            or a folder or pattern of such files, e.g. `run/step-*.keras`.
        missing_ok: whether to change nothing and return 0 if there is no such file, so
            that the same program starts training and resumes it; default False.
        timeout_s: seconds to wait for the rank that reads; default `TFDIST_TIMEOUT_S`.
        process_set: the ranks that train the model; only these ranks call the function;
            default all.

    Returns:
        Number of updates that the optimizer has done, i.e. its `iterations`. If
        `model.optimizer` is None, or the default of `compile` and unused, those of the
        first optimizer in another attribute. In a process that has not yet joined an
        elastic job, nothing is read, and the result is 0: the process gets the state
        from the other ranks.

    Raises:
        FileNotFoundError: there is no such file, and `missing_ok` is False.
        ValueError: the model is not built or not compiled, the file (or each file) is
            damaged, or it is not a checkpoint of this model and optimizer. The message
            says what was expected and found; nothing is changed.
        tfdist.RankFailedError: a different rank has failed, usually the rank that reads
            the file. The message contains its error.
        tfdist.MismatchError: a rank has joined (`tfdist.join`), or the ranks differ in
            which optimizers are built, or in state of preprocessing layers that is not
            in variables (vocabularies, bin boundaries).

    Example:
        >>> import keras, tfdist
        >>> tfdist.init()
        >>> def compiled():
        ...     model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        ...     adam = tfdist.DistributedOptimizer(keras.optimizers.Adam())
        ...     model.compile(adam, "mse")
        ...     adam.build(model.trainable_variables)
        ...     return model
        >>> import tempfile
        >>> path = tempfile.mkdtemp() + "/model.keras"
        >>> compiled().save(path)
        >>> tfdist.restore(compiled(), path)
        0
    """
    runtime.check_initialized()
    check_not_torn()
    ranks = CoordinatedCall("restore", timeout_s, process_set)
    root = members_of(process_set)[0]
    reads = runtime.rank() == root

    def check() -> tuple[str, dict[str, Any]]:
        prepare(model)
        chosen = _choose(path, missing_ok) if reads else ""
        if chosen:
            check_fits(model, chosen)
        return chosen, {"built": _built(model), "found": bool(chosen)}

    def read() -> tuple[None, dict[str, Any]]:
        if not reads:
            return None, {}
        states = read_states(chosen)
        _load(model, chosen)
        return None, {"generators": set_states(model, states)}

    chosen, facts = ranks.run("check", check)
    what = "the list of built optimizers"
    ranks.agree(facts, "built", what, "Build the same optimizers on all ranks.")
    if not facts[0]["found"]:  # the facts of the rank that reads
        return 0
    _, facts = ranks.run("read", read)
    slots = [v for one in optimizers_of(model) for v in one.variables]
    broadcast_variables(model.weights + slots, root, process_set=process_set)
    follow_variables(model)
    check_alike(model, "tfdist.restore", process_set)
    if facts[0]["generators"]:
        broadcast_seed_generators(model, root=root, process_set=process_set)
    return updates_of(model) or 0


def _choose(path: str | os.PathLike[str], missing_ok: bool) -> str:
    """Returns the newest undamaged file of a folder or pattern, or the file itself.

    If there is none and `missing_ok` is set, it returns "".
    """
    try:
        return os.fspath(newest_checkpoint(path))
    except FileNotFoundError as error:
        if missing_ok:
            return ""
        hint = " Copy it to this machine first." if "://" in os.fspath(path) else ""
        raise FileNotFoundError(f"{error}{hint}") from None


def prepare(model: keras.Model) -> None:
    """Builds the optimizer of a compiled model if it is not built yet.

    Raises:
        ValueError: the model has no weights yet, or no optimizer.
    """
    if not is_built(model) or not model.weights:
        raise ValueError(
            f"Expected a built model, got {model.name!r} without weights. Call it on "
            "data of the right shape, or call model.build(shape), before "
            "tfdist.restore."
        )
    if not optimizers_of(model):
        raise ValueError(
            f"Expected a compiled model, got {model.name!r} without an optimizer. "
            "Call model.compile(...) before tfdist.restore."
        )
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not optimizer.built:
        optimizer.build(model.trainable_variables)


def check_fits(model: keras.Model, path: str) -> None:
    """Raises ValueError if a checkpoint does not fit a compiled model."""
    config, saved = _contents(path)
    own_name = None
    if getattr(model, "optimizer", None) is not None:
        # The name of the Keras class, not of the reducing subclass.
        own = {"optimizer": keras.optimizers.serialize(model.optimizer)}
        own_name = optimizer_name({"compile_config": own})
    saved_name = optimizer_name(config)
    if saved_name is None and own_name is not None:
        raise ValueError(
            f"{path} was saved without an optimizer (or before compile), so training "
            "cannot continue from it. To load only its weights, call "
            "model.load_weights(path)."
        )
    if saved_name != own_name:
        raise ValueError(
            f"{path} contains the state of the optimizer {saved_name}, but this model "
            f"is compiled with {own_name}. Compile the model with {saved_name}."
        )
    # Keras would only warn and continue with a fresh optimizer.
    slots, weights = _divide(model, saved)
    optimizers = optimizers_of(model)
    parts = _parts(model)  # their variables are also those of the outer optimizer
    own_slots = [
        tuple(v.shape)
        for one in optimizers
        if id(one) not in parts
        for v in one.variables
    ]
    unbuilt = [type(one).__name__ for one in optimizers if not one.built]
    if unbuilt and len(slots) > len(own_slots):
        raise ValueError(
            f"{path} has the state of optimizers that are not built: "
            f"{', '.join(unbuilt)} of the model {model.name!r}. Call "
            "optimizer.build(variables) with the variables that each trains, in the "
            "same order as in the saved job, before tfdist.restore."
        )
    difference = shapes_difference(own_slots, slots)
    problem = _difference_of_weights(model, weights, path) or difference
    if problem:
        raise ValueError(
            f"{path} is a checkpoint of a different model than {model.name!r}: "
            f"{problem}. "
            "Build and compile the model as it was when it was saved."
        )


def optimizer_name(config: dict[str, Any]) -> str | None:
    """Returns the optimizer class with which a saved model was compiled, or None.

    For a `LossScaleOptimizer` this is the class of the inner optimizer: `compile` adds
    the outer one under mixed_float16, and the config does not record that.

    Args:
        config: the content of the checkpoint's "config.json".
    """
    compiled = config.get("compile_config") or {}
    optimizer = compiled.get("optimizer")
    if isinstance(optimizer, dict):
        inner = (optimizer.get("config") or {}).get("inner_optimizer")
        optimizer = inner or optimizer
        return str(optimizer.get("class_name"))
    return None if optimizer is None else str(optimizer)


def shapes_difference(
    own: list[tuple[int, ...]], saved: list[tuple[int, ...]]
) -> str | None:
    """Describes how the shapes of the optimizer's and the saved variables differ.

    Args:
        own: shapes of the optimizer's variables.
        saved: shapes of the variables in the file, in any order.

    Returns:
        A clause for a message; None if there is no difference.

    Example:
        >>> shapes_difference([(), (3, 4)], [(), (3, 5)])
        'the optimizer has no variable of shape (3, 5), but one of (3, 4)'
    """
    expected, found = Counter(own), Counter(saved)
    if expected == found:
        return None
    more, less = sorted(found - expected), sorted(expected - found)
    if more and less:
        return f"the optimizer has no variable of shape {more[0]}, but one of {less[0]}"
    return (
        f"expected {len(own)} variables of the optimizer, found {len(saved)} in the "
        f"file, {'more' if more else 'fewer'} of shape {(more or less)[0]}"
    )


def _load(model: keras.Model, path: str) -> None:
    """Loads all variables or none.

    Keras itself stops at the first missing layer, after it has loaded earlier ones.
    """
    before = [(v, keras.ops.convert_to_numpy(v)) for v in _state(model)]
    was_built = model.built
    # Keras requires a built model, and a model without `call` (a GAN) is never built.
    model.built = True
    try:
        model.load_weights(path)
    except BaseException as error:
        for variable, value in before:
            variable.assign(value)
        follow_variables(model)
        if not isinstance(error, ValueError | KeyError | TypeError):
            raise
        raise ValueError(
            f"{path} is a checkpoint of a different model than {model.name!r}, with "
            "different layers or attributes that contain them. Build and compile the "
            f"model as it was when it was saved. Error from Keras: {error}"
        ) from error
    finally:
        model.built = was_built


def _state(model: keras.Model) -> list[Any]:
    """Returns the variables that loading a checkpoint may change."""
    state = [*model.variables, *(v for one in model.metrics for v in one.variables)]
    for one in optimizers_of(model):
        inner = getattr(one, "inner_optimizer", one)
        state += [*one.variables, *accumulation.totals(inner)]
    return list({id(v): v for v in state}.values())


def _contents(path: str) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """Returns the saved model's config, and the shapes of its variables by path."""
    import h5py  # comes with Keras

    shapes: dict[str, tuple[int, ...]] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            config = json.loads(archive.read(_CONFIG))
            weights = io.BytesIO(archive.read(_WEIGHTS))
        with h5py.File(weights, "r") as file:

            def note(name: str, item: Any) -> None:
                if isinstance(item, h5py.Dataset):
                    shapes[name] = tuple(item.shape)

            file.visititems(note)
    except (zipfile.BadZipFile, KeyError, OSError, ValueError) as error:
        raise ValueError(
            f"Expected {path} to be a complete .keras file, written by "
            f"tfdist.callbacks.Checkpoint or model.save, got: {error}. Use an older "
            "checkpoint."
        ) from None
    return config, shapes


def _divide(
    model: keras.Model, saved: dict[str, tuple[int, ...]]
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Divides the saved shapes into shapes of optimizers and shapes of weights.

    Keras saves an optimizer under the name of its attribute: "second/vars/0", or
    "several/adam_1/vars/0" in a list or dict. A `LossScaleOptimizer` also has the
    variables of its inner optimizer, which are saved again in "second/inner_optimizer",
    or under the name of an attribute that holds the inner optimizer. Shapes that are
    saved again are in neither list.
    """
    attributes = {"optimizer": {""}}
    again: dict[str, set[str]] = {}
    parts = _parts(model)
    for name, value in vars(model).items():
        is_many = isinstance(value, list | tuple | dict)
        for one in members_of_attribute(value):
            if isinstance(one, keras.optimizers.Optimizer):
                name_of_class = type(one).__name__.lower().replace("_", "")
                kind = name_of_class if is_many else ""
                places = again if id(one) in parts else attributes
                places.setdefault(name, set()).add(kind)
    slots, weights = [], []
    for place, shape in saved.items():
        first, *between = place.split("/")[:-1]
        kind = re.sub(r"_\d+$|_", "", "/".join(between[:-1]))
        if between[-1:] == ["vars"] and kind in attributes.get(first, ()):
            slots.append(shape)
        elif between[-1:] == ["vars"] and kind in again.get(first, ()):
            continue
        elif first != "optimizer":
            weights.append(shape)
    return slots, weights


def _parts(model: keras.Model) -> set[int]:
    """Returns the ids of all optimizers that are inside other optimizers."""
    return {id(part) for one in optimizers_of(model) for part in parts_of(one)}


def _built(model: keras.Model) -> list[str]:
    """Returns the built optimizers, in the same order on all ranks."""
    optimizers = enumerate(optimizers_of(model))
    return [f"{type(one).__name__} {i}" for i, one in optimizers if one.built]


def _difference_of_weights(
    model: keras.Model, saved: list[tuple[int, ...]], path: str
) -> str | None:
    """Describes the first variable that is missing or has a different shape."""
    own = Counter(tuple(v.shape) for v in model.weights)
    # Random number generators and metrics may also be saved, so only a missing variable
    # is certainly wrong.
    missing = own - Counter(saved)
    if not missing:
        return None
    try:
        other = keras.saving.load_model(path, compile=False)
    except Exception:  # noqa: BLE001 - the custom class is not found
        found = sorted(Counter(saved) - own)
        but = f", but one of {found[0]}" if found else ""
        return f"the file has no variable of shape {min(missing)}{but}"
    ours = [(v.path.removeprefix(f"{model.name}/"), v.shape) for v in model.weights]
    theirs = [v.shape for v in other.weights]
    for (name, expected), found in zip(ours, theirs, strict=False):
        if tuple(expected) != tuple(found):
            return (
                f"expected {name} of shape {tuple(expected)}, found shape "
                f"{tuple(found)} in its place"
            )
    return f"expected {len(ours)} variables, found {len(theirs)}"
