"""State outside of objects of tfdist: each piece is listed here, with its reason.

What one world needs belongs into `core.runtime.State` or a resource of it; what is
known about an object of TensorFlow or Keras, into a `core.registry.WeakRegistry`.
"""

import ast
import re

from helpers.tree import ROOT

PACKAGE = ROOT / "tfdist"
# Module → names of objects on its top level that change.
STATE = {
    # This process.
    "core/runtime.py": {"state"},
    "core/world.py": {"_program"},
    "core/term_signal.py": {"_forking", "_in_child"},
    "core/failed_rank.py": {"_state"},
    "core/deadlock/watcher.py": {"callers"},
    "elastic/state.py": {"_program"},
    "callbacks/elastic.py": {"_program"},
    "launch/processes.py": {"_outsiders", "_strangers"},
    # Connections to the launcher, which opens each once.
    "core/rendezvous/spaces/__init__.py": {"_open"},
    # MPI, which a process starts and ends once.
    "core/mpi.py": {"_state"},
    # Open sockets, which a forked child closes.
    "core/rendezvous/on_demand_links.py": {"_running"},
    "core/rendezvous/stream.py": {"_streams"},
    "data/_scatter_server.py": {"_running"},
    # A port that is kept for rank 0, which binds it too.
    "ray.py": {"_reserved"},
    # The code that is being run or traced.
    "core/deadlock/one_rank_code.py": {"PLACE"},
    "core/weights_state.py": {"_uses_snapshot"},
    "training/jit_compile.py": {"_ACTIVE"},
    # Functions that other modules add.
    "collectives/_join.py": {"after_join"},
    "collectives/variables.py": {"after_broadcast"},
    # Objects of TensorFlow and Keras, by weak reference.
    "callbacks/_base.py": {"_first_step_names"},
    "callbacks/_callback_states.py": {"_named"},
    "callbacks/learning_rate_scale.py": {"_scaled"},
    "callbacks/learning_rate_warmup.py": {"_warmups"},
    "collectives/per_rank_variables.py": {
        "_accumulators",
        "_declared",
        "_broadcast_lists",
    },
    "collectives/tf_ops/op_names.py": {"_name_counts", "_labels"},
    "data/_dataset_checks.py": {"_part_counts"},
    "data/_global_batches.py": {"_sources"},
    "gradients/accumulation.py": {"_weighted"},
    "gradients/double_buffer.py": {"_buffers"},
    "gradients/noise_scale.py": {"_measured"},
    "gradients/provenance.py": {"_of_eager_tensors", "_of_graphs"},
    "gradients/sample_weights.py": {"synchronized_by"},
    "layers/synchronized.py": {"_contexts_seen"},
    "training/loss_scale.py": {"_scaling", "_warned", "_called_scale_loss"},
    # Horovod's interface is one of functions: its state is that of its modules.
    "horovod/_unreduced.py": {"_inside"},
    "horovod/_elastic_loop.py": {"_state"},
    "horovod/_keras/callbacks.py": {"_sent"},
    "horovod/_gradient_origin.py": {
        *("_local_tensors", "_local_names", "_trained_in_subsets"),
    },
    "horovod/_warnings.py": {"_warned"},
    "horovod/common/timeline.py": {"_begins_us"},
    "horovod/keras2/__init__.py": {"_active"},
}
# File → attributes that tfdist sets on an object. Those of its own classes and
# functions are here too, because Keras and TensorFlow see them.
ATTRIBUTES = {
    # Of our subclass of the class of a schedule, layer or optimizer.
    "callbacks/_learning_rates.py": {"_tfdist_factor"},
    "collectives/per_rank_variables.py": {"_tfdist_own", "_tfdist_set"},
    "layers/synchronized.py": {"_tfdist_own", "_tfdist_set"},
    "horovod/_keras/passes.py": {"_tfdist_pass", "_tfdist_own_weight"},
    "horovod/keras2/_decay.py": {"_tfdist_applies"},
    "training/optimizer.py": {"_tfdist_was_built"},
    "training/optimizer_mixins.py": {
        *("_tfdist_reduced", "_tfdist_weight", "_tfdist_updated"),
        "_tfdist_is_finite",
    },
    # Values that refer to the object, which a registry would keep alive.
    "gradients/accumulation.py": {"_tfdist_total_weight", "_tfdist_own_weight"},
    # Of an operation of a graph.
    "gradients/update_order.py": {"_tfdist_barrier"},
    # Of a function that we put in the place of another one.
    "callbacks/_loss_weighting.py": {"_tfdist_before"},
    "callbacks/_save_guard.py": {"_tfdist_guards"},
    "horovod/_unreduced.py": {"_tfdist_guarded"},
    "training/train_steps.py": {"_tfdist_parts"},
    # Also seen through wrappers of a train function.
    "training/jit_compile.py": {"_tfdist_split", "_tfdist_makes"},
}
# Files that change the class of an object of Keras or TensorFlow to a subclass of it:
# Keras keeps references to layers and optimizers, so another object would not be used.
CLASSES = {
    "callbacks/_learning_rates.py",
    "horovod/_keras/passes.py",
    "horovod/keras2/_decay.py",
    "horovod/tensorflow/tape.py",
    "layers/synchronized.py",
    "training/optimizer.py",
    "training/optimizer_mixins.py",
}
_MAKERS = {
    *("set", "dict", "list", "Counter", "deque", "defaultdict", "OrderedDict"),
    *("WeakSet", "WeakKeyDictionary", "WeakValueDictionary", "WeakRegistry"),
    *("ContextVar", "local", "State", "_State", "_Program"),
}


def sources():
    return {
        str(path.relative_to(PACKAGE)): path.read_text()
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def changing(source):
    """Names on the top level of a module that hold an empty container, or state."""
    found = set()
    for node in ast.parse(source).body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        value = node.value
        is_empty = isinstance(value, ast.Dict) and not value.keys
        is_empty |= isinstance(value, ast.List) and not value.elts
        maker = ""
        if isinstance(value, ast.Call) and not _is_copy(value):
            function = value.func
            maker = getattr(function, "attr", getattr(function, "id", ""))
        if isinstance(target, ast.Name) and (is_empty or maker in _MAKERS):
            found.add(target.id)
    return found


def _is_copy(call):
    """Whether a container is made of something, and so is probably a constant."""
    return getattr(call.func, "id", "") in ("set", "dict", "list") and bool(call.args)


def found_in(sources, find):
    return {name: found for name, text in sources.items() if (found := find(text))}


def test_module_state_is_listed():
    assert found_in(sources(), changing) == STATE


def test_attributes_on_objects_are_listed():
    names = re.compile(r"(?:\"|\.|^    )(_tfdist_[a-z_]+)\b", re.M)
    assert found_in(sources(), lambda text: set(names.findall(text))) == ATTRIBUTES


def test_changes_of_a_class_are_listed():
    found = found_in(sources(), lambda text: ".__class__ = " in text)
    assert set(found) == CLASSES


def test_the_search_sees_state():
    text = "import x\n_a: dict[int, int] = {}\nB = ()\nc = x.WeakSet()\nd = [1]\n"
    assert changing(text) == {"_a", "c"}
