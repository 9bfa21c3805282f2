"""The table: every name, parameter and default of Horovod 0.28.1's interface.

`horovod_0_28_1.json` is Horovod's own, read off its signatures (`horovod_reading`);
here stands what is not as there, and why. A row is "module:name", without the package:
"tensorflow:allreduce", "common.elastic:State.commit"; what a function returns has
methods in rows like "tensorflow:DistributedGradientTape().gradient".
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from helpers import horovod_reading

HOROVOD: dict[str, dict[str, str]] = json.loads(
    (Path(__file__).parent / "horovod_0_28_1.json").read_text()
)
_HELPER = "a helper of Horovod's own code, of which scripts have no use"
_LIBRARY = "about the library that Horovod compiles for each framework"
_TYPE = "stands for a type in annotations"
LEFT_OUT = {
    "tensorflow:BroadcastGlobalVariablesHook.after_create_session": "there is no hook",
    "tensorflow:BroadcastGlobalVariablesHook.begin": "there is no hook",
    "tensorflow:LocalGradientAggregationHelper": _HELPER,
    "tensorflow:LocalGradientAggregationHelper.apply_gradients": _HELPER,
    "tensorflow:LocalGradientAggregationHelper.compute_gradients": _HELPER,
    "tensorflow:LocalGradientAggregationHelper.register_local_var": _HELPER,
    "tensorflow:SyncBatchNormalization.call": "what is made is a layer of Keras's",
    "tensorflow:check_extension": _LIBRARY,
    "tensorflow:refs_to_vars": _HELPER,
    "tensorflow:split_list": _HELPER,
    "tensorflow:vars_to_refs": _HELPER,
    "tensorflow.mpi_ops:check_installed_version": _LIBRARY,
    "tensorflow.mpi_ops:get_average_backwards_compatibility_fun": _HELPER,
    "tensorflow.mpi_ops:get_ext_suffix": _LIBRARY,
    "tensorflow.util:refs_to_vars": _HELPER,
    "tensorflow.util:vars_to_refs": _HELPER,
    "tensorflow.keras:DistributedOptimizer().compute_gradients": "of Keras 2",
    "tensorflow.keras:DistributedOptimizer().get_gradients": "of Keras 2",
    "tensorflow.keras:is_version_greater_equal_than": _HELPER,
    "common.basics:MPI": _TYPE,
    "common.elastic:State.on_hosts_updated": "`commit` and `check_host_updates` ask",
    "common.elastic:run_fn": "`run` is what scripts call",
    "common.process_sets:HorovodBasics": _TYPE,
    "common.process_sets:MPI": _TYPE,
    "common.util:check_extension": _LIBRARY,
    "common.util:check_installed_version": _LIBRARY,
    "common.util:get_average_backwards_compatibility_fun": _HELPER,
    "common.util:get_ext_suffix": _LIBRARY,
    "common.util:get_extension_full_path": _LIBRARY,
}
# Horovod hides these behind a cache or a call with *args.
_OF_INIT = "comm=None, process_sets=None"
_OF_GPU = "ext_base_name, verbose=False"
_VERBOSE = "verbose=False"
# `horovod.keras` is `horovod.tensorflow.keras` here: what comes later in Horovod's
# own list is given by name.
_OF_KERAS = HOROVOD["tensorflow.keras"]["DistributedOptimizer"]
DIFFERENT = {
    "tensorflow:gpu_available": _OF_GPU,
    "tensorflow:init": _OF_INIT,
    "tensorflow.mpi_ops:gpu_available": _OF_GPU,
    "tensorflow.mpi_ops:init": _OF_INIT,
    "tensorflow.keras:DistributedOptimizer().apply_gradients": "grads_and_vars, **own",
    "tensorflow.keras:init": _OF_INIT,
    "keras:DistributedOptimizer": _OF_KERAS,
    "keras:PartialDistributedOptimizer": _OF_KERAS.replace(
        "scale_local", "local_layers=None, scale_local"
    ),
    "keras:init": _OF_INIT,
    "keras.callbacks:BestModelCheckpoint": HOROVOD["tensorflow.keras.callbacks"][
        "BestModelCheckpoint"
    ],
    # Before Horovod 0.21 they were called without `initial_lr`.
    **{
        f"{module}:{name}": HOROVOD[module][name]
        .replace("initial_lr", "initial_lr=(not given)")
        .replace("multiplier", "multiplier=(not given)")
        for module in ("keras.callbacks", "tensorflow.keras.callbacks")
        for name in ("LearningRateScheduleCallback", "LearningRateWarmupCallback")
    },
    "common.basics:HorovodBasics": "",  # there is no library to be found
    "common.util:ccl_built": _VERBOSE,
    "common.util:ddl_built": _VERBOSE,
    "common.util:gloo_built": _VERBOSE,
    "common.util:gpu_available": _OF_GPU,
    "common.util:is_version_greater_equal_than": "ver, target",
    "common.util:mpi_built": _VERBOSE,
    "common.util:nccl_built": _VERBOSE,
}
# Parameters that cannot mean anything here → what is done when they are given.
WARNS, RAISES = "warns", "raises"
WITHOUT_MEANING = {
    # Gradients are reduced in host memory.
    **{
        f"{function}({parameter})": WARNS
        for function in (
            "tensorflow:DistributedGradientTape",
            "tensorflow:PartialDistributedGradientTape",
            "tensorflow:DistributedOptimizer",
            "tensorflow.keras:DistributedOptimizer",
            "keras:PartialDistributedOptimizer",
        )
        for parameter in ("device_dense", "device_sparse")
    },
    "tensorflow.keras.callbacks:BroadcastGlobalVariablesCallback(device)": WARNS,
    "tensorflow.keras.callbacks:MetricAverageCallback(device)": WARNS,
    # There are no cycles.
    "tensorflow:start_timeline(mark_cycles)": WARNS,
    # Session hooks, and sessions of elastic states, are TensorFlow 1's.
    "tensorflow:BroadcastGlobalVariablesHook(root_rank)": RAISES,
    "tensorflow:BroadcastGlobalVariablesHook(device)": RAISES,
    "tensorflow.elastic:TensorFlowState(session)": RAISES,
    "tensorflow.elastic:TensorFlowKerasState(backend)": RAISES,
    # Keras 3 has no fused layer.
    "tensorflow:SyncBatchNormalization(fused)": RAISES,
}

# Names that differ from Horovod's → how, and the test. All others do the same.
# docs/from-horovod.md says why.
DIFFERS = {
    "tensorflow:join": (
        "as in Horovod, but an average is over the ranks that still call it; not in "
        "allreduce alone",
        "test_horovod_tensorflow",
    ),
    "tensorflow:allreduce": (
        "as in Horovod; `tf.IndexedSlices` have every index once",
        "test_horovod_tensorflow",
    ),
    "tensorflow:grouped_allreduce": (
        "as in Horovod; `tf.IndexedSlices` have every index once",
        "test_horovod_tensorflow",
    ),
    "tensorflow:broadcast_object": (
        "as in Horovod, of plain data; other objects with `TFDIST_OBJECTS=pickle`",
        "test_pickled_objects",
    ),
    "tensorflow:allgather_object": (
        "as in Horovod, of plain data; other objects with `TFDIST_OBJECTS=pickle`",
        "test_pickled_objects",
    ),
    "tensorflow:DistributedOptimizer": (
        "as in Horovod; the same object comes back",
        "test_horovod_keras",
    ),
    "tensorflow:SyncBatchNormalization": (
        "as in Horovod, weighted by the sizes of the batches",
        "test_horovod_gradients",
    ),
    "tensorflow:init": (
        "as in Horovod; a list of some ranks is a ValueError",
        "test_horovod_tensorflow",
    ),
    "tensorflow.keras.callbacks:BroadcastGlobalVariablesCallback": (
        "before the first step, not after it",
        "test_horovod_callbacks",
    ),
    "tensorflow.keras.callbacks:MetricAverageCallback": (
        "of all samples, not the mean of the ranks' numbers",
        "test_horovod_callbacks",
    ),
    **{
        f"tensorflow.keras.callbacks:{name}": (
            "as in Horovod; without `initial_lr` as before 0.21, with a warning",
            "test_horovod_keras_callbacks",
        )
        for name in ("LearningRateScheduleCallback", "LearningRateWarmupCallback")
    },
    "tensorflow.elastic:run": (
        "as in Horovod, under `tfdistrun --min-np`; otherwise it calls `func` once",
        "test_horovod_elastic_jobs",
    ),
    "common.elastic:ObjectState.sync": (
        "as in Horovod; sends the current values, not those of the last commit",
        "test_horovod_elastic",
    ),
    **{
        f"tensorflow:{name}": (f"always {answer}", "test_horovod_tensorflow")
        for names, answer in (
            (
                "mpi_built mpi_enabled ddl_built ccl_built cuda_built rocm_built",
                "False",
            ),
            ("gloo_built gloo_enabled", "True"),
            ("nccl_built", "0"),
            ("mpi_threads_supported", "a ValueError: there is no MPI"),
        )
        for name in names.split()
    },
}


@functools.cache
def rows() -> dict[str, str]:
    """Row → its parameters, of all that is called; constants are none."""
    return {
        f"{module}:{name}": DIFFERENT.get(f"{module}:{name}", text)
        for module, names in HOROVOD.items()
        for name, text in names.items()
        if f"{module}:{name}" not in LEFT_OUT and not text.startswith("= ")
    }


def constants() -> dict[str, str]:
    """Row → value, of Horovod's constants."""
    return {
        f"{module}:{name}": text.removeprefix("= ")
        for module, names in HOROVOD.items()
        for name, text in names.items()
        if text.startswith("= ")
    }


def find(row: str) -> Any:
    """What tfdist has in this place.

    Raises:
        AttributeError: nothing.
    """
    module, _, name = row.partition(":")
    found: Any = importlib.import_module(f"tfdist.horovod.{module}")
    for part in name.split("."):
        found = _made(module, part) if part.endswith("()") else getattr(found, part)
    return found


@functools.cache
def place_of(row: str) -> tuple[Any, str]:
    """Where it stands: a module or class, and the name in it.

    Of a class it is the method that makes the objects.
    """
    module, _, name = row.partition(":")
    path, _, last = name.rpartition(".")
    if path:
        cls = find(f"{module}:{path}")
        return _definer(cls if inspect.isclass(cls) else type(cls), last), last
    found = find(row)
    if not inspect.isclass(found):
        return importlib.import_module(f"tfdist.horovod.{module}"), last
    makes = "__new__" if "__new__" in vars(found) else "__init__"
    return _definer(found, makes), makes


def _definer(cls: Any, name: str) -> Any:
    return next(base for base in cls.__mro__ if name in vars(base))


@functools.cache
def _made(module: str, function: str) -> Any:
    found = importlib.import_module(f"tfdist.horovod.{module}")
    return horovod_reading.made_by(found, module, function.removesuffix("()"))


@functools.cache
def called_as() -> dict[str, str]:
    """Row → the first row of the same function, under which its calls are noted.

    Without classes that have nothing to be made with, like `Compression`.
    """
    first: dict[int, str] = {}
    same = {}
    for row in rows():
        owner, name = place_of(row)
        if inspect.isclass(owner) and not owner.__module__.startswith("tfdist."):
            continue
        function = vars(owner)[name]
        # `hvd.rank` is a method of the object of HorovodBasics.
        function = getattr(function, "__func__", function)
        same[row] = first.setdefault(id(function), row)
    return same


def wanted() -> set[str]:
    """What tests have to call: every row, and each of its parameters.

    But what only passes on what it is given, by `*args, **kwargs`; and `**own`, which
    are arguments of a class of the user's own.
    """
    found = set()
    for row, first in called_as().items():
        found.add(first)
        if rows()[row] == "*args, **kwargs":
            continue
        parts = [part for part in rows()[row].split(", ") if part != "**own"]
        names = [part.partition("=")[0].strip("*") for part in parts]
        found |= {f"{first}({name})" for name in names if name}
    return found


def table() -> Iterator[tuple[str, str, str]]:
    """Name with its parameters, effect, test: of all that Horovod has."""
    same, uses = "as in Horovod", "test_horovod_uses"
    for row, text in rows().items():
        if called_as().get(row, row) != row:
            continue  # the same function under another name
        yield f"{row}({text})", *DIFFERS.get(row, (same, uses))
    for row, value in constants().items():
        yield row, f"{same}: {value}", "test_horovod_interface"
    for use, what in WITHOUT_MEANING.items():
        effect = {WARNS: "no effect: a warning", RAISES: "an error"}[what]
        yield use, effect, uses
    for row, reason in LEFT_OUT.items():
        yield row, f"an AttributeError: {reason}", "test_horovod_interface"
