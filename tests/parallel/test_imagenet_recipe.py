"""The ImageNet recipe, with a small network, on pictures that the real builder read."""

import re
from pathlib import Path

import keras
import numpy as np
import pytest
import yaml
from helpers import pictures, recipe
from helpers.checkpoints import checkpoints_in
from helpers.outcome import outcome
from helpers.ranks import run_ranks

import tfdist

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("--network=resnet8", "--image_size=32", "--classes=1000", "--notensorboard")
STEPS = 200 // 24  # of an epoch of the 200 pictures


def folder_of(words):
    [folder] = [w.partition("=")[2] for w in words if w.startswith("--output_dir=")]
    return folder


def trained(words, kill_after=None, loss_scale=None):
    """What main prints, the pictures it saw; ended by a signal after some steps."""
    import os
    import signal

    module = recipe.script()
    seen = []
    make, build = module.make_callbacks, module.build_model
    if loss_scale is not None:

        def scaled(plan):
            model = build(plan)
            model.optimizer.initial_scale = loss_scale
            return model

        module.build_model = scaled
    if kill_after is not None:

        def at(batch, logs):
            steps.append(batch)
            if len(steps) == max(kill_after, 1):
                os.kill(os.getpid(), signal.SIGTERM)

        steps = []
        kill = keras.callbacks.LambdaCallback(
            on_train_batch_end=at,
            on_epoch_begin=lambda epoch, logs: None if kill_after else at(0, logs),
        )
        module.make_callbacks = lambda plan, folder: [kill, *make(plan, folder)]
    code = 0
    printed = []
    try:
        recipe.run(*words, seen=seen, printed=printed)
    except SystemExit as exit:
        code = exit.code
    finally:
        module.make_callbacks, module.build_model = make, build
    return [printed[0], code, [list(one) for one in seen]]


def weights_of(path):
    return [np.array(w) for w in keras.saving.load_model(path, compile=False).weights]


def summary_of(run):
    return recipe.script().summary.read_history(run / "log.csv")


def results_of(folder):
    return yaml.safe_load((folder / "runs/latest/results.yaml").read_text())


@pytest.fixture
def words(tiny_imagenet, tmp_path):
    return [
        f"--data_dir={tiny_imagenet}",
        f"--output_dir={tmp_path / 'runs'}",
        *SMALL,
        "--sync_batch_norm",
        "global_batch=24",
        "epochs=2",
        "decay=cosine",
        "rate=1.0",
    ]


@pytest.mark.parametrize(
    ("loop", "compares", "ranks"),
    [
        ("fit", False, (1, 2)),
        pytest.param("fit", True, (2, 3), marks=pytest.mark.slow),
        pytest.param("custom", True, (2, 3), marks=pytest.mark.slow),
    ],
)
def test_interrupted_in_mid_epoch_and_resumed_with_one_rank_more(
    loop, compares, ranks, words, tmp_path
):
    words = [*words, f"loop={loop}"]
    if not compares:
        words.remove("--sync_batch_norm")  # takes long to build
    if compares:
        whole = run_ranks(trained, ranks[0], words, timeout_s=110)
        expected = weights_of(tmp_path / "runs/latest/final.keras")
        whole_log = summary_of(tmp_path / "runs/latest")

    stop = STEPS + 3  # in the second epoch
    before = run_ranks(trained, ranks[0], words, stop, timeout_s=110)
    assert [code for _, code, _ in before] == [128 + 15] * ranks[0]
    files = checkpoints_in(tmp_path / "runs/latest/checkpoints")
    assert files[-1] == f"step-{stop:08d}.keras"
    how = rf"saved at step {stop}; to resume.*\n  (tfdistrun -np \d )?python resnet50_"
    assert re.search(how + r"imagenet.py --resume=/.*/runs/resnet8-", before[0][0])
    parts = yaml.safe_load((tmp_path / "runs/latest/interrupted.yaml").read_text())
    assert parts[str(stop)]["batches"] == stop - STEPS - 1
    assert parts[str(stop)]["sums"]["top_1/count"] == (stop - STEPS) * 24

    resumed = [f"--resume={tmp_path / 'runs/latest'}"]
    after = run_ranks(trained, ranks[1], resumed, timeout_s=110)
    assert f"from step {stop} on" in after[0][0]
    log = summary_of(tmp_path / "runs/latest")
    assert log.epochs == [1, 2]
    assert log.columns["epoch_s"][1] > parts[str(stop)]["epoch_s"]
    shares = f"{ranks[1]} ranks x {24 // ranks[1]}"
    assert f"global batch 24 = {shares}" in after[0][0]
    # Crops are another one in each epoch, so equal hashes are the same picture in it.
    taken = [tuple(one) for _, _, seen in before for one in seen if one[0] < stop]
    rest = [tuple(one) for _, _, seen in after for one in seen]
    steps = [step for step, _ in taken + rest]
    assert all(steps.count(step) == 24 for step in range(2 * STEPS))
    assert len({picture for _, picture in taken + rest}) == 2 * STEPS * 24
    if not compares:
        return
    assert {*taken, *rest} == {tuple(one) for _, _, seen in whole for one in seen}
    # Statistics of all ranks: the number of ranks only changes how sums are rounded.
    for name in ("loss", "top_1", "top_5", "val_loss", "learning_rate", "steps"):
        one = whole_log.columns[name]
        np.testing.assert_allclose(log.columns[name], one, rtol=2e-3, atol=5e-3)
    for a, b in zip(
        weights_of(tmp_path / "runs/latest/final.keras"), expected, strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-4)


@pytest.mark.slow
def test_a_resumed_run_of_the_same_size_ends_with_the_same_bits(words, tmp_path):
    words = [w for w in words if w != "--sync_batch_norm"] + ["checkpoint_steps=5"]
    run_ranks(trained, 2, words, timeout_s=110)
    expected = weights_of(tmp_path / "runs/latest/final.keras")
    run_ranks(trained, 2, words, 5, timeout_s=110)
    resumed = [f"--resume={tmp_path / 'runs/latest'}"]
    run_ranks(trained, 2, resumed, timeout_s=110)
    log = (tmp_path / "runs/latest/log.csv").read_text().splitlines()
    assert len(log) == 1 + 2
    for a, b in zip(
        weights_of(tmp_path / "runs/latest/final.keras"), expected, strict=True
    ):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["fit", "custom"])
def test_a_batch_that_grows_uses_each_picture_once(loop, words, tmp_path):
    """Epochs of 8, 4 and 4 steps, interrupted in the second and resumed by 3 ranks."""
    words = [w for w in words if not w.startswith(("epochs", "decay"))]
    words += ["epochs=3", "decay=step", "batch_growth=1:48", f"loop={loop}"]
    [(printed, _, seen), *_] = run_ranks(trained, 2, words, timeout_s=110)
    assert "from epoch 2 on: global batch 48, 4 steps, 32 pixels" in printed
    expected = weights_of(tmp_path / "runs/latest/final.keras")
    whole = summary_of(tmp_path / "runs/latest").columns
    assert whole["steps"] == [8, 12, 16]
    before = run_ranks(trained, 2, words, STEPS + 2, timeout_s=110)
    resumed = [f"--resume={tmp_path / 'runs/latest'}"]
    after = run_ranks(trained, 3, resumed, timeout_s=110)
    assert f"from step {STEPS + 2} on" in after[0][0]
    taken = [tuple(one) for _, _, seen in before for one in seen if one[0] < STEPS + 2]
    taken += [tuple(one) for _, _, seen in after for one in seen]
    steps = [step for step, _ in taken]
    sizes = [24] * 8 + [48] * 8
    assert [steps.count(step) for step in range(16)] == sizes
    assert len({picture for _, picture in taken}) == sum(sizes)
    log = summary_of(tmp_path / "runs/latest").columns
    for name in ("loss", "val_loss", "learning_rate", "steps"):
        np.testing.assert_allclose(log[name], whole[name], rtol=2e-3, atol=5e-3)
    for a, b in zip(
        weights_of(tmp_path / "runs/latest/final.keras"), expected, strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-4)


def sizes_of_images(words):
    """The step with which each dataset begins, and the height of its images."""
    module = recipe.script()
    plain, found = module.training_batches, []

    def noted(train, plan):
        batches = plain(train, plan)
        found.append([plan.first_step, batches.element_spec[0].shape[1]])
        return batches

    module.training_batches = noted
    try:
        return found, recipe.run(*words)
    finally:
        module.training_batches = plain


@pytest.mark.slow
def test_images_that_grow_end_with_those_of_the_validation(words, tmp_path):
    words = [w for w in words if not w.startswith(("epochs", "decay", "--image_size"))]
    words += ["epochs=3", "decay=step", "batch_growth=2:48"]
    words += ["image_size=64", "image_growth=0:32,1:48,2:64"]
    ranks = run_ranks(sizes_of_images, 2, words, timeout_s=110)
    for found, _ in ranks:
        assert found == [[0, 32], [8, 48], [16, 64]]
    assert "from epoch 3 on: global batch 48, 4 steps, 64 pixels" in ranks[0][1]
    log = summary_of(tmp_path / "runs/latest").columns
    assert log["steps"] == [8, 16, 20] and np.isfinite(log["val_loss"]).all()
    model = keras.saving.load_model(tmp_path / "runs/latest/final.keras", compile=False)
    assert model(np.zeros((1, 64, 64, 3), "uint8")).shape == (1, 1000)


@pytest.mark.slow
def test_the_example_with_mixed_and_growing_images_runs(words, tmp_path):
    """That of docs/imagenet.md."""
    text = (ROOT / "docs" / "imagenet.md").read_text(encoding="utf-8")
    [line] = [
        one
        for one in text.splitlines()
        if one.startswith("tfdistrun") and "--image_growth" in one
    ]
    flags = [one for one in line.split() if one.startswith("--")]
    assert "--data_dir=data" in flags and len(flags) == 8
    flags = [one for one in flags if one != "--data_dir=data"]
    run_ranks(trained, 2, [*words[:2], "--notensorboard", *flags], timeout_s=300)
    log = summary_of(tmp_path / "runs/latest").columns
    assert len(log["loss"]) == 30
    assert log["loss"][-1] < 0.6 * log["loss"][0]


@pytest.mark.slow
@pytest.mark.parametrize("loops", [("fit", "custom"), ("custom", "fit")])
def test_a_step_that_the_loss_scale_skips_counts(loops, words, tmp_path):
    words = [*words, "precision=mixed_float16", f"loop={loops[0]}"]
    stop = STEPS + 2
    before = run_ranks(trained, 2, words, stop, 2.0**30, timeout_s=110)
    assert [code for _, code, _ in before] == [128 + 15] * 2
    files = checkpoints_in(tmp_path / "runs/latest/checkpoints")
    assert files[-1] == f"step-{stop:08d}.keras"
    resumed = [f"--resume={tmp_path / 'runs/latest'}", f"loop={loops[1]}"]
    after = run_ranks(trained, 2, resumed, timeout_s=110)
    assert f"from step {stop} on" in after[0][0]
    steps = sorted({one[0] for _, _, seen in after for one in seen})
    assert steps == list(range(stop, 2 * STEPS))


@pytest.mark.slow
def test_an_older_checkpoint_counts_when_the_newest_is_torn(words, tmp_path):
    run_ranks(trained, 2, words, 2 * STEPS - 1, timeout_s=110)
    run = tmp_path / "runs/latest"
    newest = run / "checkpoints" / checkpoints_in(run / "checkpoints")[-1]
    newest.write_bytes(newest.read_bytes()[: newest.stat().st_size // 2])
    with (run / "log.csv").open("a") as log:
        log.write("1,6.")
    [(printed, code, _), _] = run_ranks(trained, 2, [f"--resume={run}"], timeout_s=110)
    assert code == 0
    assert f"from step {STEPS} on" in printed
    assert len((run / "log.csv").read_text().splitlines()) == 1 + 2


@pytest.mark.slow
def test_two_ranks_evaluate_as_one_process_does(words, tmp_path):
    run_ranks(trained, 2, words, timeout_s=110)
    together = results_of(tmp_path)
    judged = [f"--resume={tmp_path / 'runs/latest'}", "--evaluate_only"]
    for ranks in (1, 3):
        run_ranks(trained, ranks, judged)
        other = results_of(tmp_path)
        assert (other["top_1"], other["top_5"]) == (
            together["top_1"],
            together["top_5"],
        )
        np.testing.assert_allclose(other["loss"], together["loss"], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("option", ["reduction=average", "double_buffering=true"])
def test_the_loop_by_hand_ends_with_the_weights_of_fit(option, words, tmp_path):
    ends = []
    for loop in ("fit", "custom"):
        words = [*words, option, "precision=float32"]
        run_ranks(trained, 2, [*words, f"loop={loop}"])
        ends.append(weights_of(tmp_path / "runs/latest/final.keras"))
        log = (tmp_path / "runs/latest/log.csv").read_text().splitlines()
        ends[-1].append(np.array([float(x) for x in log[-1].split(",")]))
        names = log[0].split(",")
    speed = [names.index(n) for n in names if re.search("_s$|communication|slowest", n)]
    for a, b in zip(*ends, strict=True):
        if a.shape == (len(names),):
            a, b = np.delete(a, speed), np.delete(b, speed)
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ["precision=mixed_bfloat16", "accumulation=3", "compression=bf16", "readers=1"],
        ["precision=mixed_float16", "preset=lars_16k", "rate=5"],
        ["mixup=0.2", "reduction=adasum", "loop=custom"],
        ["mixup=0.2", "reduction=adasum", "skip_corrupt=true"],
        ["double_buffering=true", "compression=fp16", "preset=lars_16k", "rate=5"],
        ["data_format=synthetic", "synthetic=96", "classes=10", "preset=cosine_2018"],
    ],
)
def test_options_go_together(options, words, tmp_path):
    dropped = ["rate", "--classes"]
    if "data_format=synthetic" in options:
        dropped.append("--data_dir")
    words = [w for w in words if w.split("=")[0] not in dropped]
    words = [*words, "label_smoothing=0.0", *options]
    for printed, code, _ in run_ranks(trained, 2, words, timeout_s=110):
        assert code == 0, printed
    log = (tmp_path / "runs/latest/log.csv").read_text().splitlines()
    values = [float(x) for line in log[1:] for x in line.split(",")]
    assert np.isfinite(values).all()


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["fit", "custom"])
def test_interrupted_before_the_first_step_and_resumed(loop, words, tmp_path):
    words = [*words, f"loop={loop}", "epochs=1"]
    words.remove("--sync_batch_norm")  # takes long to build
    before = run_ranks(trained, 2, words, 0, timeout_s=110)
    assert [code for _, code, _ in before] == [128 + 15] * 2
    files = checkpoints_in(tmp_path / "runs/latest/checkpoints")
    assert files == ["step-00000000.keras"]
    resumed = [f"--resume={tmp_path / 'runs/latest'}"]
    after = run_ranks(trained, 2, resumed, timeout_s=110)
    assert [code for _, code, _ in after] == [0, 0]
    assert results_of(tmp_path)


def rates(words, kill_after=None):
    """The learning rate that the optimizer has before each batch, and those to have."""
    import os
    import signal

    module = recipe.script()
    found, expected = [], []
    make = module.make_callbacks

    def callbacks(plan, folder):
        preset = module.make_preset()
        begin = plan.first_step * plan.accumulation

        def note(batch, logs):
            if len(found) == kill_after:
                os.kill(os.getpid(), signal.SIGTERM)
            step = (begin + len(found)) // plan.accumulation
            found.append(float(watch.model.optimizer.learning_rate))
            setting = {"steps_per_epoch": plan.steps_per_epoch, "global_batch": 24}
            expected.append(module.schedules.rate_at(preset, step, **setting))

        watch = keras.callbacks.LambdaCallback(on_train_batch_begin=note)
        return [watch, *make(plan, folder)]

    module.make_callbacks = callbacks
    try:
        recipe.run(*words)
    except SystemExit:
        pass
    finally:
        module.make_callbacks = make
    return [found, expected]


@pytest.mark.slow
@pytest.mark.parametrize("options", [["loop=custom"], ["accumulation=3"]])
def test_each_step_has_the_rate_of_the_preset(options, words, tmp_path):
    words = [*words, *options, "warmup_epochs=0.5", "preset=cosine_2018"]
    batches = 3 if "accumulation=3" in options else 1
    first = run_ranks(rates, 2, words, (STEPS + 3) * batches, timeout_s=110)
    resumed = [f"--resume={tmp_path / 'runs/latest'}"]
    second = run_ranks(rates, 2, resumed, timeout_s=110)
    count = 0
    for found, expected in (first[0], second[0]):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-8)
        count += len(found)
    # The step in which the signal came was finished, and not done again.
    assert count == 2 * STEPS * batches


@pytest.mark.slow
def test_few_ranks_that_read_change_nothing(words, tmp_path):
    ends = []
    for readers in ([], ["readers=1"]):
        run_ranks(trained, 2, [*words, *readers], timeout_s=110)
        ends.append(weights_of(tmp_path / "runs/latest/final.keras"))
    for a, b in zip(*ends, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["fit", "custom"])
def test_an_epoch_is_saved_though_its_validation_fails(
    loop, words, tiny_imagenet, tmp_path
):
    folder = pictures.as_folders(tiny_imagenet, tmp_path / "pictures")
    broken = sorted((folder / "validation").glob("*/*.JPEG"))[7]
    broken.write_bytes(b"junk")
    words = [w for w in words if "data_dir" not in w]
    words = [*words, f"--data_dir={folder}", "data_format=folder", f"loop={loop}"]
    results = run_ranks(refused, 2, words)
    [message] = [r["message"] for r in results if r["class"] == "ValueError"]
    assert str(broken) in message
    run = tmp_path / "runs/latest"
    assert checkpoints_in(run / "checkpoints") == [f"step-{STEPS:08d}.keras"]

    resumed = [f"--resume={run}", "--skip_corrupt"]
    [(printed, code, _), _] = run_ranks(trained, 2, resumed, timeout_s=110)
    assert code == 0
    assert f"from step {STEPS} on" in printed
    assert "1 (validation)" in printed


@pytest.mark.slow
def test_a_broken_picture_is_as_if_it_were_not_there(words, tiny_imagenet, tmp_path):
    folder = pictures.as_folders(tiny_imagenet, tmp_path / "pictures")
    broken = sorted((folder / "validation").glob("*/*.JPEG"))[7]
    broken.write_bytes(b"junk")
    words = [w for w in words if "data_dir" not in w and "epochs" not in w]
    words = [*words, f"--data_dir={folder}", "data_format=folder", "epochs=1"]
    [(printed, _, _), _] = run_ranks(trained, 2, [*words, "skip_corrupt=true"])
    assert str(broken) in printed
    without = results_of(tmp_path)

    judged = [f"--resume={tmp_path / 'runs/latest'}", "--evaluate_only"]
    results = run_ranks(refused, 2, [*judged, "--noskip_corrupt"])
    [message] = [r["message"] for r in results if r["class"] == "ValueError"]
    assert str(broken) in message
    assert "--skip_corrupt" in message
    assert "function_node" not in message
    assert {r["class"] for r in results} <= {"ValueError", "RankFailedError"}

    broken.unlink()
    run_ranks(trained, 1, judged)
    expected = results_of(tmp_path)
    assert without["top_1"] == pytest.approx(expected["top_1"], rel=1e-6)
    assert without["loss"] == pytest.approx(expected["loss"], rel=1e-3)


def refused(words):
    return outcome(lambda: recipe.run(*words))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["global_batch=25"],
            "2 ranks with 1 batches each can share, got 25.*24 or 26",
        ),
        (["global_batch=202"], "at least one global batch of 202 .* got 200"),
        (["glbal_batch=16"], "Unknown name 'glbal_batch'.*Did you mean global_batch"),
        (["epochs=two"], "epochs: 'two' in the command line"),
        (["classes=50"], "Expected at most 50 classes"),
        (["--loop=custom", "accumulation=2"], "--loop=custom uses one batch per step"),
        (["reduction=adasum", "accumulation=2"], "--reduction=adasum uses one batch"),
        (["--double_buffering", "accumulation=2"], "--double_buffering uses one batch"),
        (["batch_growth=1:48,2:64"], "Expected epochs from 1 .*to 1 in --batch_growth"),
        (["batch_growth=1:25"], "got 25. Use 24 or 26 in --batch_growth"),
        (["image_growth=0:16,1:32"], "at least 32 pixels, got 16"),
        (["image_growth=0:32,2:32"], "Expected epochs below 2 in --image_growth"),
        (["batch_growth=soon"], "Expected --batch_growth=EPOCH:BATCH"),
        (["--evaluate_only"], "--evaluate_only needs --resume"),
        (["--resume=nowhere"], "nowhere/config.yaml.*--resume expects the folder of a"),
        (["--config=none.yaml"], "configuration none.yaml, found none.*a YAML file"),
        (["label_smoothing=1.5"], r"1.5 is not .*\[0.0, 1.0\]"),
        (["epochs=0"], "epochs: 0 in the command line"),
        (["checkpoint_steps=-1"], "checkpoint_steps: -1 in the command line"),
    ],
)
def test_what_cannot_be_is_refused_on_all_ranks(options, message, words, tmp_path):
    taken = {o.lstrip("-").split("=")[0] for o in options}
    words = [w for w in words if w.lstrip("-").split("=")[0] not in taken]
    for result in run_ranks(refused, 2, [*words, *options]):
        assert result["class"] in ("ValueError", "FileNotFoundError")
        assert re.search(message, result["message"]), result["message"]
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_run_does_not_go_on_as_another(words, tmp_path):
    run_ranks(trained, 2, words, 2)
    for option in ("network=resnet18", "global_batch=48", "--seed=7"):
        resumed = [f"--resume={tmp_path / 'runs/latest'}", option]
        for result in run_ranks(refused, 2, resumed):
            assert "cannot continue with" in result["message"]


@pytest.fixture
def made_up(tmp_path):
    """Words for three epochs of two steps, in a folder with braces in its name."""
    data = ["--data_format=synthetic", "--synthetic=48", "--classes=10"]
    small = [w for w in SMALL if not w.startswith("--classes")]
    folder = f"--output_dir={tmp_path / 'runs {epoch}'}"
    return [*data, *small, folder, "global_batch=24", "epochs=3", "keep=1"]


@pytest.mark.slow
def test_a_run_that_was_stopped_in_its_first_epoch_is_judged_and_goes_on(
    made_up, tmp_path
):
    run_ranks(trained, 2, made_up, 1, timeout_s=110)
    run = tmp_path / "runs {epoch}/latest"
    assert not (run / "log.csv").read_text()
    resumed = [f"--resume={run}"]
    other = [*resumed, "--synthetic=72"]
    [(printed, *_), _] = run_ranks(trained, 2, [*other, "--evaluate_only"])
    assert "none has ended" in printed and "evaluation" in printed
    for result in run_ranks(refused, 2, other):
        assert result["class"] == "ValueError"
        expected = "with 48 training pictures, and cannot continue with 72"
        assert expected in result["message"]
    (run / "pictures.yaml").unlink()  # as of a run from before there was one
    [(printed, code, _), _] = run_ranks(trained, 2, resumed, timeout_s=110)
    assert code == 0 and "from step 1 on" in printed
    log = summary_of(run)
    assert log.epochs == [1, 2, 3]
    # One batch, which built the graph, says nothing about the speed.
    assert np.isnan(log.columns["samples_per_s"]).tolist() == [True, False, False]
    assert checkpoints_in(run / "checkpoints") == ["step-00000006.keras"]
    assert (run / "best.keras").exists()


def measured(first, count, earlier):
    """Batches `first` to `first + count` of an epoch of six, on a model that stays."""
    recipe.script()  # finds the recipe's modules
    import interrupted_epoch

    earlier = earlier and interrupted_epoch.Part(**earlier)
    whole = interrupted_epoch.WholeEpoch(earlier, resumed=first > 0, images=4)
    keras.utils.set_random_seed(1)
    layers = [keras.Input((3,)), keras.layers.Dense(2, activation="softmax")]
    model = keras.Sequential(layers)
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(0.0))
    model.compile(
        optimizer, "sparse_categorical_crossentropy", weighted_metrics=["accuracy"]
    )
    x = np.random.default_rng(2).normal(size=(24, 3)).astype("float32")
    y, weights = np.arange(24) % 2, (np.arange(24) % 3 > 0).astype("float32")
    rows = np.arange(4 * first, 4 * (first + count)).reshape(count, 4)
    rows = rows[:, tfdist.rank() :: tfdist.size()].ravel()
    parts = []
    note = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: parts.append(whole.part())
    )
    history = model.fit(
        *(x[rows], y[rows]),
        sample_weight=weights[rows],
        batch_size=4 // tfdist.size(),
        shuffle=False,
        epochs=2,
        verbose=0,
        callbacks=[whole, tfdist.callbacks.MetricAverage(), note],
    ).history
    return [history["loss"], history["accuracy"], parts[count - 1]._asdict()]


def test_an_epoch_in_three_runs_has_the_metrics_of_one():
    [(loss, accuracy, _)] = run_ranks(measured, 1, 0, 6, None)
    [(_, _, part)] = run_ranks(measured, 1, 0, 3, None)
    (_, _, part), other = run_ranks(measured, 2, 3, 2, part)
    assert other[2]["sums"] == part["sums"] and part["batches"] == 2 + 1
    rest = run_ranks(measured, 2, 5, 1, part)
    for found in rest:
        assert found[0][0] == pytest.approx(loss[0], rel=1e-6)
        assert found[1][0] == pytest.approx(accuracy[0], rel=1e-6)
        # The next epoch is on its own: that of one batch.
        assert found[0][1] != pytest.approx(loss[1], rel=1e-3)


class Damaged:
    """A split of which each rank has left out many pictures, some as others have."""

    def __init__(self):
        begin = 100_000 * tfdist.rank()
        self.skipped = dict.fromkeys(range(begin, begin + 150_000), 1)

    def __len__(self):
        return 300_000

    def locate(self, position):
        return f"picture {position}"


def damaged():
    import contextlib
    import io

    module = recipe.script()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        count = module.count_skipped(Damaged())
    return [count, printed.getvalue().splitlines()]


def test_any_number_of_pictures_that_were_left_out_is_counted():
    (count, said), (other, silent) = run_ranks(damaged, 2)
    assert count == other == 250_000 and not silent
    assert len(said) == 10 and said[-1].endswith("it is broken: picture 9")
