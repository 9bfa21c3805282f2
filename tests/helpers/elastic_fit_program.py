"""An elastic `fit` whose result shows each sample and each step that counted.

    tfdistrun -np 3 --min-np 2 python -m helpers.elastic_fit_program FOLDER EPOCHS JSON

JSON has options of `compile`, "slow_member": 1 to make this member slow and replace it,
and "checkpoint": true to save the model in FOLDER/saved every 50 steps and on SIGTERM,
and to continue with the newest file there; each model with a smaller error than before
is saved as FOLDER/best-STEP.keras. With "per_rank_batch", each rank uses so many
samples in a step, so that the number of steps of an epoch follows the number of ranks.
"batches" has the global batch from an epoch on, by epoch.

The model counts how often each sample was used, exactly. Each rank appends a line for
each step that has ended to FOLDER/commits, with the number of tries, of which all but
one were undone. It writes its history to FOLDER/history-MEMBER.json; rank 0 writes
FOLDER/result.npz. A member writes FOLDER/traced-MEMBER when it has run a step, alone
if it is a newcomer.

A file FOLDER/kill-MEMBER-EPOCH-STEP-PLACE makes a member kill itself at this place:
"before" or "after" the step, after a step of the "validation", or at the "end" of the
epoch (STEP is the last one) or of `fit` (EPOCH and STEP are the last ones, PLACE is
"fit"), or when it shares its state with others (0, 0, "share"). FOLDER/term-... makes
it send SIGTERM to itself; FOLDER/hold-... makes it wait until the file is removed. If
there is a file FOLDER/stop with a number, all ranks stop after so many epochs.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
from helpers.elastic_program import stops_after
from helpers.json_lines import lines

SAMPLES, GLOBAL_BATCH, SEED = 53, 10, 4
STEPS = SAMPLES // GLOBAL_BATCH
SLOW_STEP_S = 0.02
VALIDATION_FREQ = 10


def _expected(ends_of_steps):
    """The uses of each sample, and the mean absolute errors of each epoch.

    Those of its steps, and those of all samples after it. `ends_of_steps` has for each
    epoch the numbers of samples that were used after each of its steps.
    """
    from tfdist.data import epoch_order

    uses, metrics, after = np.zeros(SAMPLES), [], []
    for epoch, ends in enumerate(ends_of_steps):
        order = epoch_order(SAMPLES, seed=SEED, epoch=epoch)
        rows = order[: ends[-1]]  # each is used once
        metrics.append(abs(rows - uses[rows]).mean())
        uses[rows] += 1
        after.append(abs(np.arange(SAMPLES) - uses).mean())
    return uses, np.array(metrics), np.array(after)


def ends_of_steps(folder, epochs):
    """The numbers of samples of each epoch after each step, as all ranks saw them."""
    rows = lines(folder / "commits")
    if "used" not in rows[0]:
        return [[(step + 1) * GLOBAL_BATCH for step in range(STEPS)]] * epochs
    used = {}
    for row in rows:
        known = used.setdefault((row["epoch"], row["step"]), row["used"])
        assert known == row["used"], f"{row} and {known} uses on another rank"
    found, before = [], 0
    for epoch in range(epochs):
        steps = sorted(step for one, step in used if one == epoch)
        found.append([used[epoch, step] - before for step in steps])
        before += found[-1][-1]
    return found


def steps_of(folder):
    """The steps that each member has ended, as it wrote them down; by member."""
    found = {}
    for step in lines(folder / "commits"):
        found.setdefault(step["member"], []).append(step)
    return found


def check_uses(folder, epochs):
    """Asserts that the whole training has used each sample as often as it should."""
    result = np.load(folder / "result.npz")["uses"]
    uses, _, _ = _expected(ends_of_steps(folder, epochs))
    off = np.flatnonzero(result.round() != uses)
    assert not len(off), f"uses of samples {off}: {result[off]} and not {uses[off]}"


def check(folder, epochs, *, every_step=True):
    """Asserts that the run in `folder` has the result of one without a failure.

    `every_step`: whether the hooks were called after every step.
    """
    check_uses(folder, epochs)
    ends = ends_of_steps(folder, epochs)
    _, metrics, after = _expected(ends)
    places = [
        (epoch, step) for epoch, one in enumerate(ends) for step in range(len(one))
    ]
    for member, steps in steps_of(folder).items():
        own = [(step["epoch"], step["step"]) for step in steps]
        if every_step:
            first = places.index(own[0])
            whole = places[first : first + len(own)]
            assert own == whole, f"member {member} left out or repeated a step"
    sizes = {}  # that the first hook of a step saw, and those who ran it
    for member, steps in steps_of(folder).items():
        for step in (one for one in steps if one["size_before"] is not None):
            place = sizes.setdefault((step["epoch"], step["step"]), {})
            place.setdefault(step["size_before"], []).append(member)
    wrong = {place: found for place, found in sizes.items() if len(found) > 1}
    assert not wrong, f"the first hook of a step saw several numbers of ranks: {wrong}"
    histories = [json.loads(f.read_text()) for f in folder.glob("history-*.json")]
    assert histories and all(one == histories[0] for one in histories), "histories"
    found = np.array(histories[0]["mae"])
    off = np.flatnonzero(~np.isclose(found, metrics, rtol=1e-5, atol=0.0))
    assert not len(off), f"epochs {off}: {found[off]} and not {metrics[off]}"
    validated = after[VALIDATION_FREQ - 1 :: VALIDATION_FREQ]
    found = np.array(histories[0].get("val_mae", []))
    assert np.allclose(found, validated, rtol=1e-5, atol=0.0), (found, validated)
    # A rank 0 that is lost after it has written a row is replaced by one that writes
    # the same row again.
    rows = len(set((folder / "log.csv").read_text().splitlines()))
    assert rows == epochs + 1, f"{rows} different rows in the CSV file"
    return histories[0]


def main(folder, epochs, options):
    import keras
    import tensorflow as tf

    import tfdist
    from tfdist.callbacks._fit_state import FitState

    tfdist.init()
    member, size = int(os.environ.get("TFDIST_MEMBER", tfdist.rank())), tfdist.size()
    commits = os.open(folder / "commits", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    traces = []

    def kill_if_asked(epoch, step, place):
        for name, number in (("kill", signal.SIGKILL), ("term", signal.SIGTERM)):
            wish = folder / f"{name}-{member}-{epoch}-{step}-{place}"
            if wish.exists():
                wish.unlink()  # else its replacement would die of it too
                os.kill(os.getpid(), number)
        while (folder / f"hold-{member}-{epoch}-{step}-{place}").exists():
            time.sleep(0.01)

    broadcast = FitState._broadcast

    def broadcast_or_die(*arguments):
        kill_if_asked(0, 0, "share")
        return broadcast(*arguments)

    FitState._broadcast = broadcast_or_die

    class Counting(keras.Model):
        """Its weights are the uses of the samples; its loss is their sum."""

        def __init__(self):
            super().__init__()
            self.uses = self.add_weight(shape=(SAMPLES,), name="uses")
            self.uses.assign(tf.zeros([SAMPLES]))
            self.batch = self.add_weight(shape=(), trainable=False, name="batch")
            self.built = True

        def call(self, rows):
            traces.append(1)
            return tf.gather(self.uses, tf.cast(rows, tf.int32))[:, tf.newaxis]

    class Watch(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.tries, self.size_before = 0, None
            function = self.model.train_function

            def count(iterator):
                self.tries += 1
                logs = function(iterator)
                (folder / f"traced-{member}").touch()
                return logs

            self.model.train_function = count

        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

        def on_train_batch_begin(self, batch, logs=None):
            self.size_before = tfdist.size()
            self.model.batch.assign(batches.batch_of(self.epoch))
            if member == slow_member:
                time.sleep(2 * SLOW_STEP_S)
            kill_if_asked(self.epoch, batch, "before")

        def on_train_batch_end(self, batch, logs=None):
            line = {
                **{"member": member, "epoch": self.epoch, "step": batch},
                **{"rank": tfdist.rank(), "size": tfdist.size()},
                **{"pid": os.getpid(), "time_s": time.monotonic()},
                **{"tries": self.tries, "size_before": self.size_before},
            }
            if is_varied:
                line["used"] = int(self.model.uses.numpy().sum())
            self.tries, self.size_before = 0, None
            os.write(commits, (json.dumps(line) + "\n").encode())
            kill_if_asked(self.epoch, batch, "after")
            if tfdist.size() < size or (folder / "slow").exists():
                time.sleep(SLOW_STEP_S)

        def on_test_batch_end(self, batch, logs=None):
            kill_if_asked(self.epoch, batch, "validation")

        def on_epoch_end(self, epoch, logs=None):
            kill_if_asked(epoch, STEPS - 1, "end")
            if stops_after(folder, epoch + 1):
                self.model.stop_training = True

        def on_train_end(self, logs=None):
            kill_if_asked(epochs - 1, STEPS - 1, "fit")

    class CountsEpochs(keras.callbacks.Callback):
        """Has a state of its own, on rank 0 only."""

        def __init__(self, epochs):
            super().__init__()
            self.epochs = epochs

        def on_epoch_end(self, epoch, logs=None):
            self.epochs += 1
            assert self.epochs == epoch + 1, (self.epochs, epoch)

    rows = np.arange(SAMPLES, dtype=np.int64)
    per_rank = options.pop("per_rank_batch", None)
    growing = options.pop("batches", {"0": GLOBAL_BATCH})
    is_varied = per_rank is not None or len(growing) > 1
    batches = tfdist.data.BatchSchedule({int(e): batch for e, batch in growing.items()})
    train = tfdist.data.global_batches(
        (rows, rows.astype(np.float32)[:, np.newaxis]),
        global_batch=batches if per_rank is None else None,
        per_rank_batch=per_rank,
        seed=SEED,
    )
    valid = tfdist.data.global_batches(
        (rows, rows.astype(np.float32)[:, np.newaxis]),
        global_batch=GLOBAL_BATCH,
        shuffle=False,
        drop_remainder=False,
    )
    model = Counting()
    saves = options.pop("checkpoint", False)
    slow_member = options.pop("slow_member", None)
    others = []
    if slow_member is not None:
        others = [tfdist.callbacks.Stragglers(factor=2, seconds=1, replace=True)]

    def loss(y_true, y_pred):
        """Its gradient is the mean over the samples of a step, or of a rank."""
        return -y_pred * (model.batch if per_rank is None else per_rank)

    op = tfdist.ReduceOp.AVERAGE if per_rank is None else tfdist.ReduceOp.SUM
    model.compile(
        tfdist.DistributedOptimizer(keras.optimizers.SGD(1.0), op=op),
        loss,
        metrics=[keras.metrics.MeanAbsoluteError(name="mae")],
        **options,
    )
    start, of_checkpoint = 0, []
    if saves:
        folder_saved = folder / "saved"
        start = tfdist.restore(model, folder_saved, missing_ok=True)
        latest = tfdist.callbacks.Checkpoint(
            folder_saved / "{step:07d}.keras", save_freq=50, keep=2, background=True
        )
        best = tfdist.callbacks.Checkpoint(
            folder / "best-{step}.keras", monitor="mae", mode="min", save_best_only=True
        )
        of_checkpoint = [latest, best, tfdist.callbacks.StopOnSignal(latest)]
    counts = CountsEpochs(start // STEPS)
    history = model.fit(
        train,
        epochs=epochs,
        verbose=0,
        validation_data=valid,
        validation_freq=VALIDATION_FREQ,
        callbacks=[
            tfdist.callbacks.Elastic(start=start),
            Watch(),
            tfdist.callbacks.MetricAverage(),
            *of_checkpoint,
            *others,
            tfdist.callbacks.RankZeroOnly(
                keras.callbacks.CSVLogger(str(folder / "log.csv"))
            ),
            tfdist.callbacks.RankZeroOnly(counts),
            keras.callbacks.EarlyStopping(monitor="mae", patience=10**6),
        ],
    )
    if not options.get("run_eagerly"):
        assert len(traces) <= 3, f"traced {len(traces)} times"
    (folder / f"history-{member}.json").write_text(json.dumps(history.history))
    if tfdist.rank() == 0:
        np.savez(folder / "result.npz", uses=model.uses.numpy())


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
