"""Ranks that are workers of Ray Train, on Ray's local cluster.

Ray is large, and installed once into an environment of its own below build/ray, which
also sees the packages of this one.
"""

import os
import re
import shutil
import site
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.deadline import deadline
from helpers.launcher import clean_environment

from tfdist.core import native

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not native.LIBRARY_PATH.is_file(), reason="the core library is not built"
    ),
]

HEAD = """
import os, sys, time
import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from tfdist.ray import Report, TfdistTrainer

def trainer(train, failures=0, **options):
    return TfdistTrainer(
        train,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            storage_path=os.path.abspath("results"),
            failure_config=FailureConfig(max_failures=failures),
        ),
        **options,
    )

ray.init(num_cpus=2, include_dashboard=False)
"""
FIT = """
def train(config):
    import keras, numpy as np, tfdist
    tfdist.init()
    keras.utils.set_random_seed(1)
    checkpoint = ray.train.get_checkpoint()
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            model = keras.models.load_model(folder + "/model.keras")
    model.compile(tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    x = np.random.default_rng(0).random((64, 4))
    data = tfdist.data.shard((x, x.sum(axis=1)), batch_size=8, shuffle=True)

    class Dies(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            first = not os.path.exists(config["mark"])
            if epoch == 2 and tfdist.rank() == 1 and first:
                open(config["mark"], "w").close()
                time.sleep(5.0)  # until Ray has registered the checkpoints
                os.kill(os.getpid(), 9)

    callbacks = [
        tfdist.callbacks.BroadcastInitialState(),
        tfdist.callbacks.MetricAverage(),
        Report(),
        *([Dies()] if config["mark"] else []),
    ]
    model.fit(data, epochs=3, verbose=0, callbacks=callbacks)
    resumed = f"resumed: {checkpoint is not None}"
    print(f"rank {tfdist.rank()} of {tfdist.size()} done, {resumed}", flush=True)
"""


@pytest.fixture(scope="module")
def python():
    """An interpreter that imports Ray, and everything of this environment."""
    folder = ROOT / "build" / "ray"
    program = folder / "bin" / "python"
    if not (folder / "installed").exists():
        shutil.rmtree(folder, ignore_errors=True)
        run = {"check": True, "capture_output": True, "timeout": 120}
        try:
            subprocess.run([sys.executable, "-m", "venv", str(folder)], **run)
            (inside,) = folder.glob("lib/python*/site-packages")
            (inside / "base.pth").write_text("\n".join(site.getsitepackages()))
            subprocess.run([program, "-m", "pip", "install", "ray[train]"], **run)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            pytest.skip(f"Ray cannot be installed from PyPI: {error}")
        (folder / "installed").touch()
    return str(program)


@pytest.fixture
def run(python, tmp_path):
    """Runs a program; its workers have the same environment."""

    def work(code):
        path = f"{ROOT}{os.pathsep}{ROOT / 'recipes'}"
        environ = {"RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0"}
        return subprocess.run(
            [python, "-c", HEAD + code],
            cwd=tmp_path,
            env={**clean_environment(**environ), "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=280,
        )

    return work


@deadline(100)
def test_two_workers_train_mnist_fit(run):
    done = run(
        "def train():\n    import mnist_fit\n    mnist_fit.main()\n"
        "trainer(train).fit()\nprint('trained')\n"
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert re.search(r"same weights on all ranks: [0-9a-f]{12}", said)
    assert "on 2 ranks together" in said and "trained" in done.stdout


@deadline(100)
def test_metrics_and_checkpoints_are_reported(run):
    done = run(
        FIT + "result = trainer(train, train_loop_config={'mark': ''}).fit()\n"
        "print('metrics:', sorted(result.metrics), result.metrics['epoch'])\n"
        "with result.checkpoint.as_directory() as folder:\n"
        "    print('checkpoint:', os.listdir(folder))\n"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "metrics: ['epoch', 'loss'] 2" in done.stdout
    assert "checkpoint: ['model.keras']" in done.stdout


@deadline(100)
def test_a_killed_worker_is_an_error_of_ray(run, tmp_path):
    done = run(
        FIT + f"job = trainer(train, train_loop_config={{'mark': '{tmp_path}/mark'}})\n"
        "try:\n    job.fit()\n"
        "except ray.train.TrainingFailedError as error:\n"
        "    print('Ray says', type(error).__name__)\n"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Ray says" in done.stdout


@deadline(100)
def test_ray_starts_all_workers_again_from_the_last_checkpoint(run, tmp_path):
    options = f"failures=1, train_loop_config={{'mark': '{tmp_path}/mark'}}"
    done = run(FIT + f"trainer(train, {options}).fit()\n")
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    for rank in range(2):
        assert f"rank {rank} of 2 done, resumed: True" in said
