"""The timeline of a `fit` on two ranks, and the name of the one that sleeps."""

import json
import time

import keras
import numpy as np
from helpers.ranks import run_ranks

import tfdist

STEPS, EPOCHS = 6, 2
SLEEP_S = 0.1


class Sleep(keras.callbacks.Callback):
    """Makes every step of one rank late."""

    def __init__(self, rank):
        super().__init__()
        self.sleeps = tfdist.rank() == rank

    def on_train_batch_begin(self, batch, logs=None):
        if self.sleeps:
            time.sleep(SLEEP_S)


def train(sleeping):
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(256) for _ in range(4)]
    model = keras.Sequential([keras.Input((256,)), *layers])
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(1e-3))
    model.compile(optimizer, "mse", jit_compile=False)
    x = np.ones((STEPS * 512, 256), "float32")
    history = model.fit(
        x,
        x,
        batch_size=512,
        epochs=EPOCHS,
        verbose=0,
        callbacks=[
            tfdist.callbacks.BroadcastInitialState(),
            tfdist.callbacks.Progress(1024, file=open("/dev/null", "w")),  # noqa: SIM115
            Sleep(sleeping),
        ],
    ).history
    return [
        [float(v) for v in history[name]]
        for name in ("slowest_rank", "waited_for_slowest")
    ]


def test_the_trace_of_a_fit_shows_the_overlap_and_names_the_sleeping_rank(tmp_path):
    env = {
        "TFDIST_TIMELINE": str(tmp_path),
        "TFDIST_FIRST_BUCKET_BYTES": "262144",
        "TFDIST_BUCKET_BYTES": "262144",
    }
    found = run_ranks(train, 2, 1, env=env)
    assert found[0] == found[1]
    ranks, shares = found[0]
    assert ranks == [1.0] * EPOCHS
    assert min(shares) > 0.1  # a busy machine delays the other one too
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert trace["otherData"]["slowest_rank"] == 1
    waited_ms = trace["otherData"]["others_waited_for_it_ms"]
    assert waited_ms > (STEPS * EPOCHS - 2) * SLEEP_S * 1000 / 4
    exposed = trace["otherData"]["exposed_communication"]
    assert [exposed[r]["steps"] for r in "01"] == [STEPS * EPOCHS - 1] * 2
    assert exposed["0"]["mean_ms"] > exposed["1"]["mean_ms"]
    assert trace["otherData"]["longest_waits"][0]["rank"] == 1
    for rank in range(2):
        _check_rank([e for e in trace["traceEvents"] if e["pid"] == rank])


def _check_rank(events):
    tracks = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    named = {"steps", "gradients", "operations", "send", "receive", "reduce"}
    assert tracks == named
    slices = [e for e in events if e["ph"] == "X"]
    assert not [e for e in slices if e["name"] == "commit gate"]  # it is off
    steps = [e for e in slices if e["name"] == "step"]
    assert len(steps) == STEPS * EPOCHS
    backward = sorted(_interval(e) for e in slices if e["name"] == "backward")
    buckets = [e for e in slices if "gradients." in e["name"] and e["tid"] >= 1000]
    assert len(backward) == len(steps)
    assert len(buckets) == 4 * len(steps)
    for step, hidden in zip(sorted(map(_interval, steps)), backward, strict=True):
        own = [b for b in map(_interval, buckets) if step[0] <= b[0] < step[1]]
        assert len(own) == 4
        assert all(end <= step[1] for _, end in own)
        assert hidden == (min(own)[0], max(own)[0])
    # The first is on its way before the last is there: communication overlaps.
    assert sum(begin < end for begin, end in backward) > len(steps) / 2
    exposed = [e for e in events if e["name"].startswith("exposed communication")]
    assert len(exposed) == len(steps)


def _interval(event):
    return round(event["ts"]), round(event["ts"]) + round(event["dur"])
