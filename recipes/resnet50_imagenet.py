"""Trains ResNet-50 on ImageNet, on one or more ranks.

    tfdistrun -np 2 python recipes/resnet50_imagenet.py --data_dir=DATA

The defaults follow Goyal et al. 2017 (90 epochs, batch 256, SGD with momentum), except
that labels are smoothed. recipes/make_tiny_imagenet.py creates example pictures for a
first try, and docs/imagenet.md explains how to use the real ones. The sections of this
file, from top to bottom: flags, data, network, trainer, evaluation, save.

References:
    Goyal et al., Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour, 2017
    (arXiv:1706.02677).
    Szegedy et al., Rethinking the Inception Architecture for Computer Vision, CVPR
    2016, section 7: label smoothing (arXiv:1512.00567).
"""

import contextlib
import itertools
import math
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import batch_growth
import imagenet_data
import imagenet_examples
import interrupted_epoch
import keras
import mixup
import numpy as np
import resnet
import run_folder
import schedules
import summary
import tensorflow as tf
from absl import app, flags, logging

import tfdist

# ------------------------------------------------------------------------------- flags

FLAGS = flags.FLAGS
NAMES = set(FLAGS)  # flags that other modules have defined; ours come below

flags.DEFINE_string("data_dir", None, "Folder with the data.")
flags.DEFINE_enum("data_format", "tfds", imagenet_data.FORMATS, "Storage format.")
flags.DEFINE_integer("classes", 1000, "Number of classes.", lower_bound=2)
flags.DEFINE_integer("label_offset", 0, "Label of the first class: 0 or 1.")
flags.DEFINE_integer("image_size", 224, "Image side in pixels.", lower_bound=32)
flags.DEFINE_string(
    "image_growth", "", "Training image size by epoch, e.g. 0:128,18:176,28:224."
)
flags.DEFINE_integer(
    "synthetic", None, "Number of images per split of synthetic data.", lower_bound=1
)
flags.DEFINE_bool("skip_corrupt", False, "Skip corrupt images, and count them.")
flags.DEFINE_integer(
    "readers",
    None,
    "Number of ranks that read the files for all ranks; default: each reads its own.",
    lower_bound=1,
)
flags.DEFINE_integer(
    "data_threads", 0, "Decoding threads per rank; 0: automatic.", lower_bound=0
)

flags.DEFINE_enum("network", "resnet50", list(resnet.NETWORKS), "Model.")
flags.DEFINE_bool("sync_batch_norm", False, "Use batch statistics of all ranks.")
flags.DEFINE_enum(
    "precision",
    "float32",
    ["float32", "mixed_float16", "mixed_bfloat16"],
    "Keras dtype policy.",
)

flags.DEFINE_enum(
    "preset", "goyal_2017", list(schedules.PRESETS), "Hyperparameter preset."
)
flags.DEFINE_integer("global_batch", 256, "Images per step, of all ranks together.")
flags.DEFINE_integer("accumulation", 1, "Batches per rank in a step.", lower_bound=1)
flags.DEFINE_integer(
    "epochs", None, "Number of epochs; the preset is rescaled.", lower_bound=1
)
flags.DEFINE_float(
    "rate", None, "Base learning rate; overrides the preset.", lower_bound=0.0
)
flags.DEFINE_float(
    "warmup_epochs", None, "Warm-up epochs; overrides the preset.", lower_bound=0.0
)
flags.DEFINE_enum(
    "decay", None, list(schedules.DECAYS), "Learning-rate decay; overrides the preset."
)
flags.DEFINE_string(
    "batch_growth", "", "Larger global batches by epoch, e.g. 30:1024,60:4096."
)
flags.DEFINE_float("label_smoothing", 0.1, "Label-smoothing factor.", 0.0, 1.0)
flags.DEFINE_float(
    "mixup", 0.0, "Mixup's alpha, e.g. 0.2; 0: no mixup.", lower_bound=0.0
)
flags.DEFINE_enum(
    "reduction", "average", ["average", "adasum"], "How gradients are combined."
)
flags.DEFINE_enum("compression", None, ["fp16", "bf16"], "Gradient compression.")
flags.DEFINE_bool(
    "double_buffering", False, "Reduce gradients during the next step, for slow links."
)
flags.DEFINE_enum("loop", "fit", ["fit", "custom"], "model.fit or a custom loop.")
flags.DEFINE_integer("seed", 1, "Random seed.", lower_bound=0)

flags.DEFINE_string("output_dir", "runs", "Folder in which a run creates its folder.")
flags.DEFINE_string("resume", None, "Folder of the run to resume, e.g. runs/latest.")
flags.DEFINE_integer(
    "checkpoint_steps", 0, "Also save every N steps; 0: only per epoch.", lower_bound=0
)
flags.DEFINE_integer("keep", 3, "Number of checkpoints to keep.", lower_bound=1)
flags.DEFINE_bool("tensorboard", True, "Write TensorBoard logs.")
flags.DEFINE_bool("evaluate_only", False, "Only evaluate the run given by --resume.")

CONFIG = flags.DEFINE_multi_string("config", [], "YAML file with values of flags.")
NAMES = set(FLAGS) - NAMES - {"config", "resume", "evaluate_only"}
# Flags that must not change when a run is resumed; otherwise step numbers would have a
# different meaning.
FIXED = (
    *("network", "classes", "image_size", "preset", "epochs", "rate", "warmup_epochs"),
    *("decay", "label_smoothing", "global_batch", "seed", "precision", "accumulation"),
    *("mixup", "reduction", "double_buffering", "batch_growth", "image_growth"),
)


class Plan(NamedTuple):
    """The numbers of a stage: epochs with the same batch size and image size.

    A step is one update of the weights.

    Attributes:
        examples: number of training pictures.
        batches: the global batch size of each epoch, in all stages.
        accumulation: batches of a rank in a step.
        first_epoch: the first epoch of the stage.
        epochs: the first epoch after the stage.
        first_step: the first step to run, counted over all stages.
        image_size: height and width of the training images, in pixels.
    """

    examples: int
    batches: tfdist.data.BatchSchedule
    accumulation: int
    first_epoch: int
    epochs: int
    first_step: int
    image_size: int = 224

    @property
    def global_batch(self) -> int:
        """Pictures in a step of this stage."""
        return self.batches.batch_of(self.first_epoch)

    @property
    def per_rank_batch(self) -> int:
        """Pictures in a batch of a rank."""
        return self.global_batch // (tfdist.size() * self.accumulation)

    @property
    def steps_per_epoch(self) -> int:
        """Steps in an epoch of this stage."""
        return self.examples // self.global_batch

    def steps_before(self, epoch: int) -> int:
        """Returns the number of steps in all epochs before `epoch`."""
        return self.batches.steps_before(epoch, total=self.examples)

    def place_of(self, step: int) -> tuple[int, int]:
        """Returns the epoch of a step, and the number of earlier steps in it."""
        return self.batches.place_of(step, total=self.examples)

    @property
    def rate_batch(self) -> int:
        """Batch size to which the rate is scaled; with Adasum, that of one rank."""
        if FLAGS.reduction == "adasum":
            return self.per_rank_batch * self.accumulation
        return self.global_batch

    def spans(self) -> Iterator[tuple[int, int, int]]:
        """Yields the arguments of `fit`: first epoch, end epoch (exclusive), steps.

        If a run is resumed within an epoch, the first item is the rest of that epoch.
        """
        epoch, done = self.place_of(self.first_step)
        if done and epoch < self.epochs:
            yield epoch, epoch + 1, self.steps_per_epoch - done
            epoch += 1
        if epoch < self.epochs:
            yield epoch, self.epochs, self.steps_per_epoch


def main(argv: Sequence[str]) -> None:
    """Trains, evaluates and saves the model."""
    logging.set_verbosity(logging.WARNING)  # also for tensorflow-datasets
    tfdist.init()
    config = configure(argv[1:])
    keras.utils.set_random_seed(FLAGS.seed)
    keras.config.set_dtype_policy(FLAGS.precision)

    train, validation = open_data()
    if FLAGS.resume and not FLAGS.evaluate_only:
        run_folder.check_pictures(Path(FLAGS.resume), len(train))
    stages = make_stages(len(train))
    model = build_model(stages[0])
    folder = open_folder()
    if FLAGS.resume:
        stages = from_step(stages, resume(model, folder))
    plan = stages[0]
    say(describe(stages, model, train, validation, folder))

    with naming_pictures(train, validation), telling_how_to_resume(argv[0], folder):
        if not FLAGS.evaluate_only:
            if tfdist.rank() == 0:
                run_folder.save(folder, config)
                run_folder.save(folder, {"train": len(train)}, run_folder.PICTURES)
                epoch, done = plan.place_of(plan.first_step)
                epochs_done = epoch + done / plan.steps_per_epoch
                run_folder.set_aside_damaged(folder, plan.first_step)
                run_folder.tidy(folder, int(epochs_done))
                summary.note_run(folder, epochs_done, tfdist.size())
            fit = fit_by_hand if FLAGS.loop == "custom" else keras.Model.fit
            for stage in stages:
                run(fit, model, stage, train, validation, folder)
        results = evaluate(model, plan, validation)
    skipped = {"train": count_skipped(train), "validation": count_skipped(validation)}
    if tfdist.rank() == 0:
        if not FLAGS.evaluate_only:
            model.save(folder / "final.keras")
        run_folder.save(folder, results, "results.yaml")
        say(summary.write_summary(folder, results, skipped))


# -------------------------------------------------------------------------------- data


def open_data() -> tuple[imagenet_data.Split, imagenet_data.Split]:
    """Returns the training and validation pictures, the same on all ranks."""
    train, validation = (
        imagenet_data.open_split(
            FLAGS.data_format,
            FLAGS.data_dir,
            name,
            classes=FLAGS.classes,
            label_offset=FLAGS.label_offset,
            examples=FLAGS.synthetic,
        )
        for name in ("train", "validation")
    )
    return train, validation


def make_stages(examples: int) -> list[Plan]:
    """Divides the epochs into stages with one batch size and image size.

    Returns:
        The stages: one, or several with --batch_growth or --image_growth.

    Raises:
        ValueError: a global batch cannot be divided or is larger than the data, or a
            batch or image size changes too early or too late.
    """
    preset = make_preset()
    epochs = round(preset.epochs)
    check_batch("global_batch", FLAGS.global_batch, examples)
    batches = batch_growth.parse(FLAGS.batch_growth, FLAGS.global_batch)
    sizes = batch_growth.parse_sizes(FLAGS.image_growth, FLAGS.image_size)
    if max(sizes) >= epochs:
        raise ValueError(
            f"Expected epochs below {epochs} in --image_growth, got {max(sizes)}."
        )
    for epoch in list(batches.batches)[1:]:
        check_batch("batch_growth", batches.batch_of(epoch), examples)
        least = preset.warmup_epochs
        if preset.transition_epochs is not None:
            least = preset.transition_epochs[0] + preset.transition_epochs[1] / 2
        if not least <= epoch < epochs:
            raise ValueError(
                f"Expected epochs from {math.ceil(least)} (the end of the warm-up) to "
                f"{epochs - 1} in --batch_growth, got {epoch}."
            )
    begins = sorted({*batches.batches, *sizes})
    return [
        Plan(
            examples=examples,
            batches=batches,
            accumulation=FLAGS.accumulation,
            first_epoch=begin,
            epochs=end,
            first_step=batches.steps_before(begin, total=examples),
            image_size=sizes[max(epoch for epoch in sizes if epoch <= begin)],
        )
        for begin, end in itertools.pairwise([*begins, epochs])
    ]


def check_batch(flag: str, batch: int, examples: int) -> None:
    """Raises ValueError if the ranks cannot share a batch, or it is too large."""
    parts = tfdist.size() * FLAGS.accumulation
    most = examples // parts * parts
    if not most:
        raise ValueError(
            f"Expected at least {parts} training pictures for {tfdist.size()} ranks "
            f"with {FLAGS.accumulation} batches each, got {examples}. Start at most "
            f"{examples // FLAGS.accumulation} ranks."
        )
    if batch < 1 or batch % parts:
        lower = min(max(batch // parts * parts, parts), most)
        near = sorted({lower, min(lower + parts, most)})
        advice = f"Use {' or '.join(map(str, near))} in --{flag}."
        if FLAGS.resume:
            advice = "The run began with this batch: use another number of ranks."
        raise ValueError(
            f"Expected a global batch that {tfdist.size()} ranks with "
            f"{FLAGS.accumulation} batches each can share, got {batch}. " + advice
        )
    if examples < batch:
        raise ValueError(
            f"Expected at least one global batch of {batch} training pictures, got "
            f"{examples}. Use {most} or less in --{flag}."
        )


def from_step(stages: Sequence[Plan], step: int) -> list[Plan]:
    """Returns the stages that are left after a number of steps; at least the last."""
    left = [s for s in stages if s.steps_before(s.epochs) > step] or [stages[-1]]
    return [left[0]._replace(first_step=step), *left[1:]]


def training_batches(train: imagenet_data.Split, plan: Plan) -> tf.data.Dataset:
    """Returns this rank's part of every batch, from the plan's first step on."""
    epoch, done = plan.place_of(plan.first_step)
    batches = train.training_batches(
        # Steps are counted as if all epochs had the batch size of this stage.
        first_step=epoch * plan.steps_per_epoch + done,
        last_step=plan.epochs * plan.steps_per_epoch,
        global_batch=plan.global_batch,
        accumulation=plan.accumulation,
        seed=FLAGS.seed,
        **pipeline(plan.image_size),
    )
    if not FLAGS.mixup:
        return batches
    return mixup.mixed(
        batches,
        alpha=FLAGS.mixup,
        seed=FLAGS.seed,
        rank=tfdist.rank(),
        first_batch=plan.first_step * plan.accumulation,
    ).prefetch(2)


def validation_batches(validation: imagenet_data.Split, plan: Plan) -> tf.data.Dataset:
    """Returns this rank's share of the pictures; each picture is used once."""
    return validation.validation_batches(
        batch=plan.per_rank_batch, **pipeline(FLAGS.image_size)
    )


def pipeline(image_size: int) -> dict[str, Any]:
    """Returns the options shared by the training and validation batches."""
    return {
        "image_size": image_size,
        "threads": FLAGS.data_threads or imagenet_examples.own_threads(),
        "skip_corrupt": FLAGS.skip_corrupt,
        "readers": FLAGS.readers,
    }


@contextlib.contextmanager
def naming_pictures(*splits: imagenet_data.Split) -> Iterator[None]:
    """Replaces an error of TensorFlow by one that names the picture that caused it."""
    try:
        yield
    except tf.errors.OpError:
        for split in splits:
            if split.failure:
                raise ValueError(split.failure) from None
        raise


def count_skipped(split: imagenet_data.Split) -> int:
    """Returns the number of broken pictures that any rank skipped; prints up to ten."""
    skipped = np.zeros(len(split), bool)  # not a list, which could get too long to send
    skipped[list(split.skipped)] = True
    by_any = tfdist.allreduce(skipped, op=tfdist.ReduceOp.LOGICAL_OR)
    positions = np.flatnonzero(by_any)
    for position in positions[:10].tolist():
        say(f"skipped, because it is broken: {split.locate(position)}")
    return len(positions)


# ----------------------------------------------------------------------------- network


def make_preset() -> schedules.Preset:
    """Returns the published preset, with the changes from the flags."""
    return schedules.changed(
        FLAGS.preset,
        epochs=FLAGS.epochs,
        rate=FLAGS.rate,
        warmup_epochs=FLAGS.warmup_epochs,
        decay=FLAGS.decay,
    )


def build_model(plan: Plan) -> keras.Model:
    """Builds and compiles the network."""
    model = resnet.build(
        FLAGS.network,
        image_size=None if FLAGS.image_growth else FLAGS.image_size,
        classes=FLAGS.classes,
    )
    if FLAGS.sync_batch_norm:
        model = tfdist.layers.synchronize_batch_normalization(model)
    optimizer = schedules.optimizer(
        make_preset(),
        steps_per_epoch=plan.steps_per_epoch,
        global_batch=plan.rate_batch,
        accumulation=plan.accumulation,
        growth=growth_of(plan),
    )
    if not tape_reduces():
        optimizer = tfdist.DistributedOptimizer(
            optimizer,
            op=reduction(),
            compression=FLAGS.compression,
            double_buffering=FLAGS.double_buffering,
        )
    model.compile(
        optimizer,
        keras.losses.CategoricalCrossentropy(
            from_logits=True,
            label_smoothing=FLAGS.label_smoothing,
            # Averaged over the pictures that are not skipped.
            reduction="mean_with_sample_weight"
            if FLAGS.skip_corrupt
            else "sum_over_batch_size",
        ),
        weighted_metrics=[
            keras.metrics.CategoricalAccuracy("top_1"),
            keras.metrics.TopKCategoricalAccuracy(5, "top_5"),
        ],
    )
    return model


def growth_of(plan: Plan) -> batch_growth.Growth:
    """Returns the growth of the batch, and of the rate if the preset scales it."""
    scales_rate = make_preset().batch is not None
    return batch_growth.Growth(plan.batches, plan.examples, scales_rate=scales_rate)


def tape_reduces() -> bool:
    """Returns whether the tape, and not the optimizer, reduces the gradients.

    With double buffering, the optimizer reduces, because it can skip the first update.
    """
    return FLAGS.loop == "custom" and not FLAGS.double_buffering


def reduction() -> tfdist.ReduceOp:
    """Returns the operation that combines the gradients of the ranks."""
    return tfdist.ReduceOp[FLAGS.reduction.upper()]


# ----------------------------------------------------------------------------- trainer


def run(
    fit: Any,
    model: keras.Model,
    plan: Plan,
    train: imagenet_data.Split,
    validation: imagenet_data.Split,
    folder: Path,
) -> None:
    """Trains from the plan's first step to its last."""
    callbacks = make_callbacks(plan, folder)
    for epoch, end, steps in plan.spans():
        rest = plan._replace(first_step=plan.steps_before(epoch + 1) - steps)
        fit(
            model,
            training_batches(train, rest),
            validation_data=validation_batches(validation, plan),
            initial_epoch=epoch,
            epochs=end,
            steps_per_epoch=steps * plan.accumulation,
            callbacks=callbacks,
            verbose=0,
            shuffle=False,  # the pictures are already in the order of the epoch
        )


def make_callbacks(plan: Plan, folder: Path) -> list[keras.callbacks.Callback]:
    """Returns the same callbacks on all ranks; those that write do so on rank 0."""
    ours, of_keras = tfdist.callbacks, keras.callbacks
    images = plan.global_batch // plan.accumulation
    done = plan.place_of(plan.first_step)[1]
    resumed = done > 0
    part = interrupted_epoch.load_part(folder, plan.first_step) if resumed else None
    whole_epoch = interrupted_epoch.WholeEpoch(part, resumed=resumed, images=images)
    checkpoint = RunCheckpoint(folder, plan, whole_epoch)
    listed = [
        ours.BroadcastInitialState(),
        ours.CombineMovingStatistics(),
        whole_epoch,
        ours.MetricAverage(),
        CountSteps(plan, checkpoint),
        ours.Progress(
            images,
            unit="images",
            total_epochs=round(make_preset().epochs),
            steps_per_epoch=plan.steps_per_epoch * plan.accumulation,
            first_step=done * plan.accumulation,
        ),
        of_keras.LambdaCallback(on_epoch_end=whole_epoch.complete),
        ours.Checkpoint(
            run_folder.as_template(folder / "best.keras"),
            monitor="val_top_1",
            mode="max",
            save_best_only=True,
            background=True,
            initial_value_threshold=summary.best(folder, "val_top_1"),
        ),
        ours.RankZeroOnly(of_keras.CSVLogger(folder / run_folder.LOG, append=True)),
    ]
    if FLAGS.tensorboard:
        board = of_keras.TensorBoard(folder / "tensorboard", write_graph=False)
        listed.append(ours.RankZeroOnly(board))
    # StopOnSignal saves, so no work is lost at the time limit of a batch system.
    return [*listed, ours.StopOnSignal(checkpoint)]


def rate_at(plan: Plan, step: int) -> float:
    """Returns the learning rate of a step, counted over all stages."""
    growth = growth_of(plan)
    place, factor = growth.place_of(step)
    first = plan._replace(first_epoch=0)
    return factor * schedules.rate_at(
        make_preset(),
        place,
        steps_per_epoch=first.steps_per_epoch,
        global_batch=first.rate_batch,
    )


class RunCheckpoint(tfdist.callbacks.Checkpoint):
    """Saves models, named by the number of completed steps; keeps the last few.

    Files are written in the background. A full disk does not stop the run.

    Args:
        folder: folder of the run.
        plan: the numbers of the stage.
        whole_epoch: callback with the measurements of the epoch.

    Attributes:
        steps: number of completed steps.
    """

    def __init__(
        self, folder: Path, plan: Plan, whole_epoch: interrupted_epoch.WholeEpoch
    ) -> None:
        within = run_folder.as_template(folder / run_folder.CHECKPOINTS)
        super().__init__(f"{within}/step-{{steps:08d}}.keras", background=True)
        self._folder, self._plan, self._whole_epoch = folder, plan, whole_epoch
        self.steps = plan.first_step

    def save_now(self, logs: dict[str, Any], batch: int | None) -> None:
        """Saves the model; within an epoch, first saves the measurements so far."""
        logs["steps"] = self.steps
        in_epoch = self._plan.place_of(self.steps)[1]
        part = self._whole_epoch.part() if in_epoch else None
        if part and tfdist.rank() == 0:
            try:
                interrupted_epoch.save_part(self._folder, self.steps, part)
            except OSError as error:
                logging.warning("The metrics of this epoch were not saved: %s", error)
        super().save_now(logs, batch)

    def on_saved(self, path: Path) -> None:
        """Removes old checkpoints on rank 0 when a new one is complete."""
        run_folder.remove_old_checkpoints(
            self._folder, FLAGS.keep, lambda steps: not self._plan.place_of(steps)[1]
        )


class CountSteps(keras.callbacks.Callback):
    """Adds the step count to the logs, for file names; saves at the end of each epoch.

    Unlike the optimizer's count, this count includes steps that are skipped because of
    the loss scale, since their pictures have been used. An epoch is saved before its
    validation, which may fail. At the end of an epoch, the learning rate of the last
    step is added to the logs.

    Args:
        plan: the numbers of the stage.
        checkpoint: saves after each epoch, and after every `--checkpoint_steps` steps.
    """

    def __init__(self, plan: Plan, checkpoint: RunCheckpoint) -> None:
        super().__init__()
        self._plan = plan
        self._checkpoint = checkpoint
        self._end = 0  # end of the epoch, in batches

    def set_model(self, model: keras.Model) -> None:
        """Also sets the model of the checkpoint, which is not passed to `fit`."""
        super().set_model(model)
        self._checkpoint.set_model(model)

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Sets the end of the epoch; a resumed run may begin in its middle."""
        self._end = self._plan.steps_before(epoch + 1) * self._plan.accumulation

    def on_train_batch_end(self, batch: int, logs: dict[str, float]) -> None:
        """Counts the steps, and saves; runs before the other callbacks that save."""
        left = self.params["steps"] - (batch + 1)
        steps, rest = divmod(self._end - left, self._plan.accumulation)
        logs["steps"] = self._checkpoint.steps = steps
        every = FLAGS.checkpoint_steps
        if not left or (every and not rest and steps % every == 0):
            self._checkpoint.save_now(logs, batch)

    def on_train_end(self, logs: dict[str, float] | None = None) -> None:
        """Waits until the last checkpoint is complete."""
        self._checkpoint.wait_until_finished()

    def on_epoch_end(self, epoch: int, logs: dict[str, float]) -> None:
        """Adds to the logs; runs before the callbacks that save or show them."""
        logs["steps"] = self._plan.steps_before(epoch + 1)
        logs["learning_rate"] = rate_at(self._plan, logs["steps"] - 1)


def fit_by_hand(
    model: keras.Model,
    batches: tf.data.Dataset,
    *,
    validation_data: tf.data.Dataset,
    initial_epoch: int,
    epochs: int,
    steps_per_epoch: int,
    callbacks: list[keras.callbacks.Callback],
    **_: Any,
) -> None:
    """Trains as `model.fit` does in `run`, in a custom loop with the gradient tape."""

    def make_tape() -> tf.GradientTape | tfdist.DistributedGradientTape:
        if not tape_reduces():
            return tf.GradientTape()
        return tfdist.DistributedGradientTape(
            op=reduction(), compression=FLAGS.compression
        )

    optimizer = model.optimizer
    mean_loss = next(metric for metric in model.metrics if metric.name == "loss")

    @tf.function
    def step(images: tf.Tensor, labels: tf.Tensor, *weights: tf.Tensor) -> None:
        with make_tape() as tape:
            logits = model(images, training=True)
            loss = model.compute_loss(images, labels, logits, *weights)
            scaled = optimizer.scale_loss(loss)  # in mixed_float16
        gradients = tape.gradient(scaled, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        mean_loss.update_state(loss, sample_weight=tf.shape(images)[0])
        model.compute_metrics(images, labels, logits, *weights)

    listed = keras.callbacks.CallbackList(
        callbacks, model=model, epochs=epochs, steps=steps_per_epoch, verbose=0
    )
    listed.on_train_begin()
    iterator = iter(batches)
    for epoch in range(initial_epoch, epochs):
        model.reset_metrics()
        listed.on_epoch_begin(epoch)
        for number in range(steps_per_epoch):
            listed.on_train_batch_begin(number)
            step(*next(iterator))
            listed.on_train_batch_end(number, model.get_metrics_result())
        logs = dict(model.get_metrics_result())
        results = model.evaluate(
            validation_data, callbacks=listed, return_dict=True, verbose=0
        )
        logs |= {f"val_{name}": value for name, value in results.items()}
        listed.on_epoch_end(epoch, logs)
    listed.on_train_end()


# -------------------------------------------------------------------------- evaluation


def evaluate(
    model: keras.Model, plan: Plan, validation: imagenet_data.Split
) -> dict[str, float]:
    """Returns loss and accuracies over all pictures, the same on all ranks."""
    return model.evaluate(
        validation_batches(validation, plan),
        # These callbacks combine the numbers of all ranks' shares.
        callbacks=[
            tfdist.callbacks.CombineMovingStatistics(),
            tfdist.callbacks.MetricAverage(),
        ],
        return_dict=True,
        verbose=0,
    )


# -------------------------------------------------------------------------------- save


def configure(words: Sequence[str]) -> dict[str, Any]:
    """Sets the flags from the resumed run, YAML files and the command line.

    Raises:
        ValueError: the configuration contains an unknown or invalid value.
        FileNotFoundError: the resumed run has no configuration.
    """
    before, files = {}, CONFIG.value
    if FLAGS.resume:
        saved = Path(FLAGS.resume, run_folder.CONFIG)
        before, files = run_folder.read(saved), [saved, *files]
    elif FLAGS.evaluate_only:
        raise ValueError("--evaluate_only needs --resume, the run to evaluate.")
    config = run_folder.configuration(FLAGS, NAMES, words, *files)
    run_folder.check_same(config, before, FIXED)
    if FLAGS.loop == "custom" and FLAGS.accumulation > 1:
        raise ValueError(
            "--loop=custom uses one batch per step, got --accumulation="
            f"{FLAGS.accumulation}. Write --loop=fit."
        )
    if FLAGS.reduction == "adasum" and FLAGS.accumulation > 1:
        raise ValueError(
            "--reduction=adasum uses one batch per step, got --accumulation="
            f"{FLAGS.accumulation}. Write --reduction=average."
        )
    if FLAGS.double_buffering and FLAGS.accumulation > 1:
        raise ValueError(
            "--double_buffering uses one batch per step, got --accumulation="
            f"{FLAGS.accumulation}. Omit one of them."
        )
    return config


@contextlib.contextmanager
def telling_how_to_resume(script: str, folder: Path) -> Iterator[None]:
    """If a signal ends the run, prints the command that resumes it.

    Args:
        script: path of this file, as it was called.
        folder: folder of the run.
    """
    try:
        yield
    except (SystemExit, KeyboardInterrupt):
        saved = run_folder.checkpoints(folder)
        if saved and not FLAGS.evaluate_only:
            command = ["python", script, f"--resume={folder}"]
            if tfdist.size() > 1:
                command = ["tfdistrun", "-np", str(tfdist.size()), *command]
            say(
                f"saved at step {run_folder.steps_of(saved[-1])}; to resume, with this "
                "or a different number of ranks:\n"
                f"  {shlex.join(command)}"
            )
        raise


def open_folder() -> Path:
    """Returns the run's folder, on all ranks: a new one, or the one of --resume."""
    folder = FLAGS.resume
    if not folder and tfdist.rank() == 0:
        folder = str(run_folder.new(FLAGS.output_dir, FLAGS.network))
    return Path(tfdist.broadcast_object(folder)).resolve()


def resume(model: keras.Model, folder: Path) -> int:
    """Restores a run's newest undamaged checkpoint; returns its number of steps."""
    newest = run_folder.last_checkpoint(folder) if tfdist.rank() == 0 else ""
    newest = tfdist.broadcast_object(str(newest))
    tfdist.restore(model, newest)
    return run_folder.steps_of(Path(newest))


def describe(
    stages: Sequence[Plan],
    model: keras.Model,
    train: imagenet_data.Split,
    validation: imagenet_data.Split,
    folder: Path,
) -> str:
    """Returns a description of the run, to be printed before it starts."""
    plan = stages[0]
    ranks = "1 rank" if tfdist.size() == 1 else f"{tfdist.size()} ranks"
    batch = f"{ranks} x {plan.per_rank_batch}"
    if plan.accumulation > 1:
        batch += f" x {plan.accumulation} accumulated"
    begin = f", from step {plan.first_step} on" if plan.first_step else ""
    of_one_rank = " for one rank, with Adasum" if FLAGS.reduction == "adasum" else ""
    rule = schedules.rule(make_preset(), plan.rate_batch)
    if "\n" not in rule:  # the warning, if any, is that of the largest batch
        largest = schedules.rule(make_preset(), stages[-1].rate_batch)
        rule += "".join(largest.partition("\n")[1:])
    growth = "".join(
        f"from epoch {stage.first_epoch + 1} on: global batch {stage.global_batch}, "
        f"{stage.steps_per_epoch} steps, {stage.image_size} pixels\n"
        for stage in stages
        if len(stages) > 1
    )
    return (
        f"{FLAGS.network}, {model.count_params():,} weights, {FLAGS.precision}; "
        f"{len(train):,} training pictures, {len(validation):,} validation pictures\n"
        f"global batch {plan.global_batch} = {batch}; {plan.epochs} epochs of "
        f"{plan.steps_per_epoch} steps{begin}\n{growth}"
        f"preset {FLAGS.preset}{of_one_rank}: {rule}\n"
        f"run folder {folder}"
    )


def say(text: str) -> None:
    """Prints text on rank 0."""
    if tfdist.rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)
    app.run(main)
