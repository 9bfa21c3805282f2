"""MomentumSGD, LARS, LAMB against NumPy in float64, and what they take and refuse."""

import copy
import json

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.optimizers import LAMB, LARS, MomentumSGD, Warmup, warmup_factor

SLOW = pytest.mark.slow
STEPS = 50
RNG = np.random.default_rng(5)
START = {
    "kernel": RNG.normal(size=(6, 4)),
    "table": RNG.normal(size=(2, 3, 2)),
    "bias": RNG.normal(size=4),
    "gamma": np.ones(4),
}
TARGET = {name: RNG.normal(size=value.shape) for name, value in START.items()}
TILT = {name: RNG.uniform(0.5, 2, size=value.shape) for name, value in START.items()}
WARMUP = {"warmup_steps": 20, "start": 0.1}


def variables(dtype="float64", names=tuple(START)):
    return [keras.Variable(START[name], name=name, dtype=dtype) for name in names]


def slopes(values, lib=np):
    """The gradients of sum(TILT (w - TARGET)^2) / 2."""
    cast = (
        (lambda a, like: a) if lib is np else (lambda a, like: tf.cast(a, like.dtype))
    )
    return [
        cast(TILT[name], value) * (value - cast(TARGET[name], value))
        for name, value in zip(START, values, strict=False)
    ]


def run(optimizer, ws, steps=STEPS, jit=False):
    @tf.function(jit_compile=jit)
    def step():
        values = [tf.convert_to_tensor(w) for w in ws]
        optimizer.apply(slopes(values, tf), ws)

    optimizer.build(ws)
    for _ in range(steps):
        step()
    return [w.numpy().astype("float64") for w in ws]


def reference(
    rate_at,
    momentum=0.9,
    nesterov=False,
    decay=0.0,
    trust=None,
    epsilon=0.0,
    excluded=("bias", "gamma"),
    correction=False,
    steps=STEPS,
):
    """Algorithm 1 of the paper, and equation 10 of Goyal et al. for the correction."""
    ws = [value.copy() for value in START.values()]
    vs = [np.zeros_like(w) for w in ws]
    for t in range(steps):
        rate = rate_at(t)
        scale = rate / rate_at(t - 1) if correction and t else 1.0
        for i, (name, g) in enumerate(zip(START, slopes(ws), strict=True)):
            out = name in excluded
            beta = 0.0 if out else decay
            local = 1.0
            if trust and not out:
                size, slope = np.linalg.norm(ws[i]), np.linalg.norm(g)
                if size > 0 and slope > 0:
                    local = trust * size / (slope + beta * size + epsilon)
            update = rate * local * (g + beta * ws[i])
            vs[i] = momentum * scale * vs[i] + update
            ws[i] = ws[i] - (momentum * vs[i] + update if nesterov else vs[i])
    return ws


CASES = {
    "defaults": {},
    "decay": {"decay": 0.05},
    "nesterov": {"decay": 0.05, "nesterov": True},
    "no momentum": {"decay": 0.05, "momentum": 0.0},
    "correction": {"decay": 0.05, "correction": True},
    "corrected nesterov": {"correction": True, "nesterov": True},
    "others excluded": {"decay": 0.05, "excluded": ("table",)},
    "none excluded": {"decay": 0.05, "excluded": ()},
    "epsilon": {"decay": 0.05, "epsilon": 0.3, "trust": 0.02},
}
# Other cases have these options too.
PARTS = ("defaults", "decay", "correction", "none excluded")
OURS = {
    "decay": "weight_decay",
    "correction": "momentum_correction",
    "trust": "trust_coefficient",
}


def options_of(case):
    options = {OURS.get(key, key): value for key, value in case.items()}
    if "excluded" in options:
        options["exclude"] = [f"^{name}$" for name in options.pop("excluded")]
    return options


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *((case, "float64") for case in CASES if case not in PARTS),
        *(pytest.param(case, "float64", marks=SLOW) for case in PARTS),
        ("decay", "float32"),
    ],
)
def test_lars_equals_algorithm_1(case, dtype):
    case = {"trust": 0.01, **CASES[case]}
    optimizer = LARS(Warmup(2.0, **WARMUP), **options_of(case))
    if "excluded" not in case:  # the global rate is not for a bias: 2.0 diverges
        optimizer = LARS(Warmup(0.2, **WARMUP), **options_of(case))
    peak = optimizer._learning_rate.schedule
    expected = reference(lambda t: peak * warmup_factor(t, 20, 0.1), **case)
    found = run(optimizer, variables(dtype))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
    assert not np.allclose(expected[0], START["kernel"])


@pytest.mark.parametrize(
    "case", [pytest.param("decay", marks=SLOW), "nesterov", "corrected nesterov"]
)
def test_momentum_sgd_equals_the_equations(case):
    case = CASES[case]
    optimizer = MomentumSGD(Warmup(0.1, **WARMUP), **options_of(case))
    expected = reference(lambda t: 0.1 * warmup_factor(t, 20, 0.1), **case)
    for a, b in zip(run(optimizer, variables()), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def lamb_reference(rate_at, decay=0.0, excluded=("bias", "gamma"), epsilon=1e-6):
    """Algorithm 2 of the paper, with the identity for phi."""
    ws = [value.copy() for value in START.values()]
    ms, vs = ([np.zeros_like(w) for w in ws] for _ in range(2))
    for t in range(STEPS):
        for i, (name, g) in enumerate(zip(START, slopes(ws), strict=True)):
            ms[i] = 0.9 * ms[i] + 0.1 * g
            vs[i] = 0.999 * vs[i] + 0.001 * g**2
            first, second = ms[i] / (1 - 0.9 ** (t + 1)), vs[i] / (1 - 0.999 ** (t + 1))
            r = first / (np.sqrt(second) + epsilon)
            if name not in excluded:
                r = r + decay * ws[i]
                r = r * np.linalg.norm(ws[i]) / np.linalg.norm(r)
            ws[i] = ws[i] - rate_at(t) * r
    return ws


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        pytest.param({}, "float64", marks=SLOW),
        pytest.param({"decay": 0.05}, "float64", marks=SLOW),
        ({"decay": 0.05, "excluded": ()}, "float64"),
        ({"decay": 0.05, "epsilon": 0.3}, "float64"),
        ({"decay": 0.05}, "float32"),
    ],
)
def test_lamb_equals_algorithm_2(case, dtype):
    optimizer = LAMB(Warmup(0.02, **WARMUP), **options_of(case))
    expected = lamb_reference(lambda t: 0.02 * warmup_factor(t, 20, 0.1), **case)
    tolerance = 1e-6 if dtype == "float64" else 1e-5
    for a, b in zip(run(optimizer, variables(dtype)), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
    assert not np.allclose(expected[0], START["kernel"])


def test_lamb_counts_updates_when_it_accumulates():
    ends = []
    for steps in (None, 2):
        w = keras.Variable(START["kernel"], dtype="float64")
        optimizer = LAMB(0.1, weight_decay=0.1, gradient_accumulation_steps=steps)
        for _ in range(3 * (steps or 1)):
            optimizer.apply([tf.constant(TILT["kernel"])], [w])
        ends.append(w.numpy())
    np.testing.assert_allclose(ends[0], ends[1], rtol=1e-12)


@pytest.mark.parametrize("zero", ["weights", "gradient"])
def test_lamb_takes_adams_step_where_a_norm_is_zero(zero):
    w = keras.Variable(np.full((2, 2), 0.0 if zero == "weights" else 3.0))
    g = tf.fill([2, 2], 0.0 if zero == "gradient" else 5.0)
    LAMB(0.5).apply([g], [w])
    np.testing.assert_allclose(w.numpy(), -0.5 if zero == "weights" else 3.0, rtol=1e-6)


@pytest.mark.parametrize(
    ("option", "value"),
    [("beta_1", 1.0), ("beta_2", -0.1), ("beta_1", "0.9"), ("epsilon", 0.0)],
)
def test_wrong_options_of_lamb_are_refused(option, value):
    with pytest.raises((TypeError, ValueError), match=rf"^{option}: "):
        LAMB(0.1, **{option: value})


def assert_goes_on(optimizer, path):
    """Asserts that a saved model trains on as if it had not been saved."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(optimizer, "mse", jit_compile=False)
    x = np.random.default_rng(1).normal(size=(12, 3))
    fit = {"batch_size": 4, "verbose": 0, "shuffle": False}
    model.fit(x, x[:, :2], **fit)
    model.save(path)
    loaded = keras.models.load_model(path)
    assert type(loaded.optimizer) is type(optimizer)
    assert loaded.optimizer.get_config() == optimizer.get_config()
    model.fit(x, x[:, :2], **fit)
    loaded.fit(x, x[:, :2], **fit)
    for a, b in zip(model.get_weights(), loaded.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_loaded_lamb_goes_on_where_it_was(tmp_path):
    optimizer = LAMB(Warmup(0.1, 4), beta_2=0.99, weight_decay=0.01, exclude="bias")
    assert_goes_on(optimizer, tmp_path / "model.keras")


def test_without_decay_momentum_sgd_is_that_of_keras():
    ours = run(MomentumSGD(0.1, nesterov=True), variables(), 10)
    of_keras = run(keras.optimizers.SGD(0.1, 0.9, nesterov=True), variables(), 10)
    for a, b in zip(ours, of_keras, strict=True):  # Keras rounds 0.9 to float32
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize("zero", ["weights", "gradient"])
def test_the_local_rate_is_one_where_a_norm_is_zero(zero):
    w = keras.Variable(np.full((2, 2), 0.0 if zero == "weights" else 3.0))
    g = np.full((2, 2), 0.0 if zero == "gradient" else 5.0)
    LARS(0.5, weight_decay=0.1).apply([tf.constant(g, tf.float32)], [w])
    update = 0.5 * (g + 0.1 * (3.0 if zero == "gradient" else 0.0))
    start = 3.0 if zero == "gradient" else 0.0
    np.testing.assert_allclose(w.numpy(), start - update, rtol=1e-6)


def test_the_size_of_a_step_does_not_depend_on_the_size_of_the_gradient():
    ends = []
    for scale in (1e-12, 1.0, 1e12):
        w = keras.Variable(START["kernel"], dtype="float32")
        LARS(1.0).apply([tf.constant(scale * TILT["kernel"], tf.float32)], [w])
        ends.append(w.numpy())
    np.testing.assert_allclose(ends[0], ends[1], rtol=1e-5)
    np.testing.assert_allclose(ends[2], ends[1], rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_norms_of_half_precision_variables_are_float32(dtype):
    w = keras.Variable(np.full((400, 400), 1.0), dtype=dtype)  # |w|^2 is 160000
    g = tf.fill([400, 400], tf.cast(2.0, dtype))
    LARS(1.0, trust_coefficient=0.5).apply([g], [w])
    np.testing.assert_array_equal(w.numpy().astype("float32"), 0.5)


@pytest.mark.parametrize("options", [{}, {"clipnorm": 0.5}])
def test_a_sparse_gradient_is_what_its_rows_add_up_to(options):
    rows = tf.IndexedSlices(
        tf.ones([3, 2]), tf.constant([1, 4, 1]), tf.constant([5, 2])
    )
    ends = []
    for gradient in (rows, tf.convert_to_tensor(rows)):
        w = keras.Variable(np.ones((5, 2)), dtype="float32")
        optimizer = LARS(1.0, weight_decay=0.1, **options)
        for _ in range(2):
            optimizer.apply([gradient], [w])
        ends.append(w.numpy())
    np.testing.assert_array_equal(*ends)
    assert ends[0][1, 0] < ends[0][4, 0] < ends[0][0, 0] < 1


def test_xla_gives_the_same():
    optimizers = [LARS(0.2, weight_decay=0.05, nesterov=True) for _ in range(2)]
    plain = run(optimizers[0], variables(), 5)
    for a, b in zip(run(optimizers[1], variables(), 5, jit=True), plain, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10)


def test_accumulated_gradients_count_by_their_mean():
    accumulating = LARS(1.0, weight_decay=0.1, gradient_accumulation_steps=2)
    at_once = LARS(1.0, weight_decay=0.1)
    a, b = variables(names=["kernel"]), variables(names=["kernel"])
    for first, second in np.random.default_rng(2).normal(size=(3, 2, 6, 4)):
        accumulating.apply([tf.constant(first)], a)
        accumulating.apply([tf.constant(second)], a)
        at_once.apply([tf.constant((first + second) / 2)], b)
    np.testing.assert_allclose(a[0].numpy(), b[0].numpy(), rtol=1e-12)
    assert not np.allclose(a[0].numpy(), START["kernel"])


def test_a_loss_scale_does_not_change_a_step():
    inner = LARS(1.0, weight_decay=0.1)
    scaled = keras.optimizers.LossScaleOptimizer(inner, initial_scale=1024.0)
    a, b = (variables("float32", ["kernel"]) for _ in range(2))
    g = tf.constant(TILT["kernel"], tf.float32)
    scaled.apply([g * 1024], a)
    LARS(1.0, weight_decay=0.1).apply([g], b)
    np.testing.assert_array_equal(a[0].numpy(), b[0].numpy())
    scaled.apply([g * np.inf], a)
    np.testing.assert_array_equal(a[0].numpy(), b[0].numpy())


def test_moving_averages_and_clipping_are_those_of_keras():
    options = {"use_ema": True, "ema_momentum": 0.5, "global_clipnorm": 0.5}
    ours = MomentumSGD(0.1, **options)
    of_keras = keras.optimizers.SGD(0.1, 0.9, **options)
    for optimizer in (ours, of_keras):
        ws = variables()
        run(optimizer, ws, 5)
        optimizer.finalize_variable_values(ws)
        optimizer.ends = [w.numpy() for w in ws]
    for a, b in zip(ours.ends, of_keras.ends, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_what_keras_is_told_to_exclude_is_not_decayed():
    optimizer = MomentumSGD(0.1, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_names=["kernel"])
    expected = reference(lambda t: 0.1, decay=0.5, excluded=("kernel", "bias", "gamma"))
    for a, b in zip(run(optimizer, variables()), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_exclude_may_be_a_function_of_the_variable():
    optimizer = LARS(1.0, exclude=lambda v: v.name != "kernel")
    optimizer.build(variables())
    assert [optimizer._is_excluded(v) for v in optimizer._trainable_variables] == [
        *(False, True, True, True)
    ]


def test_a_pattern_that_matches_nothing_is_reported(caplog):
    LARS(1.0, exclude=["bias", "batch_normalisation"]).build(variables())
    assert [r.args[0] for r in caplog.records] == ["batch_normalisation"]
    assert "kernel, table, bias, gamma" in caplog.text


WRONG = {
    "learning_rate": ["0.1", None, True, -1.0, float("nan")],
    "momentum": ["0.9", None, True, 1.5, -0.1],
    "nesterov": [1, "yes", None],
    "trust_coefficient": ["0.1", None, True, 0.0, -1.0],
    "epsilon": ["0", None, True, -1e-9, float("inf")],
    "weight_decay": ["0", True, -1e-4],
    "exclude": [3, ["a", 3], "(", {"bias"}],
    "momentum_correction": [1, None],
    "clipnorm": ["1", True, 0.0, -1],
    "clipvalue": ["1", True, 0.0],
    "global_clipnorm": ["1", True, 0.0],
    "use_ema": [1, None],
    "ema_momentum": ["1", True, 1.1],
    "ema_overwrite_frequency": [2.0, True, 0],
    "loss_scale_factor": ["2", True, 0.0],
    "gradient_accumulation_steps": [2.0, True, 1],
    "name": [3],
}


@pytest.mark.parametrize("option", WRONG)
def test_wrong_options_are_refused(option):
    for value in WRONG[option]:
        options = {"learning_rate": 0.1, option: value}
        with pytest.raises((TypeError, ValueError), match=rf"^{option}: "):
            LARS(**options)


def test_every_option_is_in_the_list_of_wrong_ones():
    assert set(WRONG) == set(LARS(0.1).get_config())


def test_unknown_and_contradicting_options_are_refused():
    with pytest.raises(TypeError, match="decay_rate"):
        LARS(0.1, decay_rate=3)
    with pytest.raises(ValueError, match="nesterov=True needs a momentum above 0"):
        LARS(0.1, momentum=0, nesterov=True)
    optimizer = LARS(0.1, exclude=lambda v: 1)
    with pytest.raises(TypeError, match="returns True or False, got int 1 for kernel"):
        optimizer.build(variables())


@keras.saving.register_keras_serializable(package="tests")
def is_gamma(variable):
    return "gamma" in variable.path


@pytest.mark.parametrize(
    ("exclude", "wrapped"),
    [
        *(pytest.param(*c, marks=SLOW) for c in ((None, False), ("kernel", True))),
        (is_gamma, True),
    ],
)
def test_a_saved_model_goes_on_where_it_was(tmp_path, exclude, wrapped):
    tfdist.init()
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(3),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(1),
        ]
    )
    rate = Warmup(keras.optimizers.schedules.CosineDecay(0.2, 20), 4, delay=True)
    optimizer = LARS(rate, weight_decay=0.01, nesterov=True, exclude=exclude)
    if wrapped:
        optimizer = tfdist.DistributedOptimizer(optimizer)
    model.compile(optimizer, "mse", jit_compile=False)
    x = np.random.default_rng(1).normal(size=(12, 3))
    fit = {"batch_size": 4, "verbose": 0, "shuffle": False}
    model.fit(x, x[:, :1], **fit)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer) is LARS
    assert loaded.optimizer.get_config() == optimizer.get_config()
    model.fit(x, x[:, :1], **fit)
    loaded.fit(x, x[:, :1], **fit)
    for a, b in zip(model.get_weights(), loaded.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_model_loaded_without_the_module_says_which_is_missing(tmp_path, monkeypatch):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(LARS(0.1), "mse")
    model.save(tmp_path / "model.keras")
    monkeypatch.delitem(keras.saving.get_custom_objects(), "tfdist>LARS")
    with pytest.raises(TypeError, match="'LARS'.*'module': 'tfdist.optimizers.lars'"):
        keras.models.load_model(tmp_path / "model.keras")
    keras.models.load_model(tmp_path / "model.keras", compile=False)


def test_copies_have_the_same_options():
    optimizer = LARS(
        Warmup(0.3, 7, start=0.2), momentum=0.8, trust_coefficient=0.1, exclude="bias"
    )
    config = optimizer.get_config()
    json.dumps(config)
    again = [LARS.from_config(config), copy.deepcopy(optimizer)]
    assert [o.get_config() for o in again] == [config, config]


def test_the_callbacks_scale_the_rates_of_these_optimizers_and_schedules():
    from tfdist.callbacks._learning_rates import ScalableRate
    from tfdist.callbacks.learning_rate_warmup import velocities_of

    ws = variables()
    for cls in (MomentumSGD, LARS):
        optimizer = cls(Warmup(0.5, 4))
        optimizer.build(ws)
        assert len(velocities_of(optimizer)) == len(ws)
        ScalableRate(optimizer).set(3.0)
        optimizer.iterations.assign(4)
        assert float(optimizer.learning_rate) == 1.5
        saved = keras.optimizers.schedules.serialize(optimizer._learning_rate)
        assert type(keras.optimizers.schedules.deserialize(saved)) is Warmup
        corrected = cls(0.5, momentum_correction=True)
        corrected.build(ws)
        assert velocities_of(corrected) == []
