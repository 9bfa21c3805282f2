"""What was trained on several ranks is plain Keras on disk.

Saved by rank 0 of two, it loads where tfdist cannot be imported, with every slot of
the optimizer, and trains on with any number of ranks.
"""

import json
import os
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.float64 import assert_like_one_process, in_float64, state_of
from helpers.ranks import clean_environment, run_ranks

import tfdist

STEPS, GLOBAL_BATCH = 5, 12
GRAPHS_OF = "adam"  # exported too; the optimizer makes no difference there
OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(0.01),
    "ema": lambda: keras.optimizers.AdamW(
        0.01, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=3
    ),
    "scheduled": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.CosineDecay(0.1, 8), momentum=0.9
    ),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.01), initial_scale=64.0, dynamic_growth_steps=3
    ),
    "of several": lambda: keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(
            keras.optimizers.Adam(0.01), {".*first/.*": keras.optimizers.SGD(0.05)}
        )
    ),
}
# The others are slow.
SAMPLE = [GRAPHS_OF, "of several"]


def new_model():
    keras.utils.clear_session()
    return keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(5, activation="tanh", name="first"),
            keras.layers.Dense(2, name="last"),
        ]
    )


def fit(model, part, ranked):
    """Trains with the first or the second half of the data."""
    x = np.random.default_rng(3).normal(size=(2, STEPS * GLOBAL_BATCH, 4))[part]
    size, rank = (tfdist.size(), tfdist.rank()) if ranked else (1, 0)
    data = tfdist.data.shard(
        (x, np.sin(x[:, :2])), batch_size=GLOBAL_BATCH // size, size=size, rank=rank
    )
    callbacks = [tfdist.callbacks.BroadcastInitialState()] if ranked else []
    model.fit(data, verbose=0, shuffle=False, callbacks=callbacks)
    return state_of(model, model.optimizer)


@in_float64
def train_and_save(folder, names):
    """On two ranks; rank 0 saves in every format."""
    found = {}
    for name in names:
        keras.utils.set_random_seed(1 + tfdist.rank())
        model = new_model()
        optimizer = tfdist.DistributedOptimizer(OPTIMIZERS[name]())
        model.compile(optimizer, "mse", jit_compile=False)
        fit(model, 0, True)
        found[name] = [v.numpy() for v in [*model.weights, *optimizer.variables]]
        if tfdist.rank() == 0:
            base = os.path.join(folder, name)
            model.save(f"{base}.keras")
            model.save_weights(f"{base}.weights.h5")
        if tfdist.rank() == 0 and name == GRAPHS_OF:
            model.export(f"{base}.exported", verbose=False)
            tf.saved_model.save(model, f"{base}.saved_model")
            found["output"] = model.predict_on_batch(np.ones((2, 4)))
    return found


# Argument: the folder, and the names. Writes what it has loaded into NAME.npz.
LOADER = """
import sys
from pathlib import Path

class Without:  # an import hook: tfdist is not there, nor its ops
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "tfdist":
            raise ImportError("no tfdist here")

sys.meta_path.insert(0, Without())
try:
    import tfdist
    sys.exit("tfdist could be imported")
except ImportError:
    pass

import json
import keras
import numpy as np
import tensorflow as tf

keras.config.set_floatx("float64")
ones = np.ones((2, 4))
for name in sys.argv[2:]:
    base = str(Path(sys.argv[1], name))
    whole = keras.models.load_model(f"{base}.keras")
    again = keras.models.model_from_json(whole.to_json())
    of_file = whole.optimizer
    again.compile(type(of_file).from_config(of_file.get_config()), "mse")
    again.optimizer.build(again.trainable_variables)
    again.load_weights(f"{base}.weights.h5")
    found = {
        "about": np.array(json.dumps(of_file.get_config())),
        "class": np.array(f"{type(of_file).__module__}.{type(of_file).__qualname__}"),
    }
    if Path(f"{base}.exported").exists():
        exported = tf.saved_model.load(f"{base}.exported")
        found["exported"] = exported.serve(ones)
        of_tensorflow = tf.saved_model.load(f"{base}.saved_model")
        serve = of_tensorflow.signatures["serving_default"]
        [found["saved_model"]] = serve(tf.constant(ones)).values()
    for kind, model in {"keras": whole, "h5": again}.items():
        for i, v in enumerate([*model.weights, *model.optimizer.variables]):
            found[f"{kind} {i}"] = v.numpy()
    np.savez(f"{base}.npz", **found)
assert not any(n.partition(".")[0] == "tfdist" for n in sys.modules)
"""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(SAMPLE, id="sample"),
        pytest.param(
            sorted({*OPTIMIZERS} - {*SAMPLE}), id="others", marks=pytest.mark.slow
        ),
    ],
)
def saved(request, tmp_path_factory):
    """The folder, the optimizers, and what each rank had when rank 0 saved."""
    folder = str(tmp_path_factory.mktemp("saved"))
    names = list(request.param)
    return folder, names, run_ranks(train_and_save, 2, folder, names, timeout_s=100)


def test_all_that_is_saved_loads_where_tfdist_cannot_be_imported(saved):
    folder, names, ranks = saved
    loader = subprocess.run(
        [sys.executable, "-c", LOADER, folder, *names],
        capture_output=True,
        text=True,
        timeout=100,
        env=clean_environment(),
    )
    assert loader.returncode == 0, loader.stderr[-3000:]
    for name in names:
        make = OPTIMIZERS[name]
        found = np.load(os.path.join(folder, f"{name}.npz"))
        for kind in ("keras", "h5"):
            state = [found[f"{kind} {i}"] for i in range(len(ranks[0][name]))]
            assert f"{kind} {len(state)}" not in found
            for a, b in zip(ranks[0][name], state, strict=True):
                assert a.tobytes() == b.tobytes(), f"{name}, {kind}"
        keras.utils.clear_session()  # names of optimizers hold a count
        plain = in_float64(make)()
        assert str(found["class"]) == f"{type(plain).__module__}.{type(plain).__name__}"
        assert json.loads(str(found["about"])) == plain.get_config()
    if GRAPHS_OF not in names:
        return
    found = np.load(os.path.join(folder, f"{GRAPHS_OF}.npz"))
    for kind in ("exported", "saved_model"):
        np.testing.assert_allclose(found[kind], ranks[0]["output"], rtol=1e-12)


@in_float64
def train_on(folder, names):
    """Every rank loads the file of rank 0 and goes on."""
    found = {}
    for name in names:
        model = keras.models.load_model(os.path.join(folder, f"{name}.keras"))
        tfdist.DistributedOptimizer(model.optimizer)
        found[name] = fit(model, 1, True)
    return found


@in_float64
def train_alone(name):
    """Both halves in one process, never saved."""
    keras.utils.set_random_seed(1)
    model = new_model()
    model.compile(OPTIMIZERS[name](), "mse", jit_compile=False)
    fit(model, 0, False)
    return fit(model, 1, False)


@pytest.mark.parametrize("size", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_another_number_of_ranks_trains_on(saved, size):
    folder, names, _ = saved
    ranks = run_ranks(train_on, size, folder, names, timeout_s=100)
    for name in names:
        assert_like_one_process([r[name] for r in ranks], train_alone(name), name)
