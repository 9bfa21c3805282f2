"""Learning rates for ImageNet with large batches: published presets by name.

    python recipes/schedules.py goyal_2017 8192    # the rate when each epoch begins

A preset is plain data. `rate_at` is its learning rate in closed form, and `optimizer`
creates the Keras optimizer with the same rate as a schedule. To change the length or
decay, use `dataclasses.replace(PRESETS["cosine_2018"], epochs=30)`.

In both forms, step s belongs to epoch s / steps_per_epoch. Steps and epochs are counted
from 0.
"""

import argparse
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import keras
from batch_growth import Growth

from tfdist.optimizers import (
    LARS,
    MomentumSGD,
    RMSpropWarmup,
    Warmup,
    scaled_rate,
    warmup_factor,
)

IMAGENET = 1_281_167  # number of training images


@dataclasses.dataclass(frozen=True)
class Steps:
    """Multiplies the rate by `factor` at the beginning of each epoch in `epochs`."""

    epochs: tuple[float, ...]
    factor: float


@dataclasses.dataclass(frozen=True)
class Levels:
    """Multiplies the rate by `factors[i]` from epoch `epochs[i]` on."""

    epochs: tuple[float, ...]  # the first is 0
    factors: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Exponential:
    """Multiplies the rate by `factor` over `epochs` epochs, gradually in each step."""

    factor: float
    epochs: float


@dataclasses.dataclass(frozen=True)
class Cosine:
    """Half a cosine, from the rate to 0 at the end of training.

    References:
        Loshchilov & Hutter, SGDR: Stochastic Gradient Descent with Warm Restarts, ICLR
        2017, equation 5 (arXiv:1608.03983).
    """


@dataclasses.dataclass(frozen=True)
class Polynomial:
    """Multiplies the rate by (1 - completed fraction) ** power; 0 at the end."""

    power: float


Decay = Steps | Levels | Exponential | Cosine | Polynomial


@dataclasses.dataclass(frozen=True)
class Preset:
    """A published set of hyperparameters."""

    optimizer: type[MomentumSGD]
    epochs: float
    rate: float  # rate for `batch`
    batch: int | None  # the rate is scaled linearly from this batch; None: not scaled
    largest_batch: int  # for which the setting was published
    warmup_epochs: float
    warmup_from_zero: bool  # else from `rate`, before scaling
    decay: Decay
    delay: bool  # whether the decay starts at the end of the warm-up
    nesterov: bool
    momentum_correction: bool
    momentum: float = 0.9
    weight_decay: float = 1e-4  # except for biases and batch normalization
    # Center and period of RMSpropWarmup, in epochs; None for other optimizers.
    transition_epochs: tuple[float, float] | None = None


def _lars(rate: float, warmup_epochs: float, largest_batch: int) -> Preset:
    return Preset(
        optimizer=LARS,
        epochs=90,
        rate=rate,
        batch=None,
        largest_batch=largest_batch,
        warmup_epochs=warmup_epochs,
        warmup_from_zero=True,
        decay=Polynomial(2.0),
        delay=True,
        nesterov=False,
        momentum_correction=False,
    )


PRESETS = {
    # Goyal et al., Accurate, Large Minibatch SGD (arXiv:1706.02677), sections 2 and
    # 5.1; global batches up to 8192.
    "goyal_2017": Preset(
        optimizer=MomentumSGD,
        epochs=90,
        rate=0.1,
        batch=256,
        largest_batch=8192,
        warmup_epochs=5,
        warmup_from_zero=False,
        decay=Steps((30, 60, 80), 0.1),
        delay=False,
        nesterov=True,
        momentum_correction=True,
    ),
    # He et al., Bag of Tricks for Image Classification (arXiv:1812.01187), sections 3.1
    # and 5.1; a global batch of 1024.
    "cosine_2018": Preset(
        optimizer=MomentumSGD,
        epochs=120,
        rate=0.1,
        batch=256,
        largest_batch=1024,
        warmup_epochs=5,
        warmup_from_zero=True,
        decay=Cosine(),
        delay=True,
        nesterov=True,
        momentum_correction=False,
    ),
    # Akiba et al., Extremely Large Minibatch SGD (arXiv:1711.04325), section 3: RMSprop
    # warm-up and slow start; a global batch of 32768.
    "akiba_2017": Preset(
        optimizer=RMSpropWarmup,
        epochs=90,
        rate=0.1,
        batch=256,
        largest_batch=32768,
        warmup_epochs=0,
        warmup_from_zero=True,
        decay=Levels((0, 40, 70, 85), (0.5, 0.075, 0.01, 0.001)),
        delay=False,
        nesterov=False,
        momentum_correction=True,
        transition_epochs=(10, 5),
    ),
    # LARS (arXiv:1708.03888) with the rates of the ResNet-50 of Google's TPU models
    # (tensorflow/tpu, models/official/resnet/lars_util.py), chosen there by batch:
    "lars_16k": _lars(rate=25.0, warmup_epochs=5, largest_batch=16384),
    "lars_32k": _lars(rate=34.0, warmup_epochs=12, largest_batch=32768),
    "lars_64k": _lars(rate=41.0, warmup_epochs=16, largest_batch=65536),
}


DECAYS = {
    "step": Steps((30, 60, 80), 0.1),
    "cosine": Cosine(),
    # Szegedy et al., Rethinking the Inception Architecture (arXiv:1512.00567), sect. 8.
    "exponential": Exponential(0.94, 2),
    "polynomial": Polynomial(2.0),
}
_DECAYS_EPOCHS = 90  # length of the run to which the epochs above refer


def changed(
    name: str,
    *,
    epochs: float | None = None,
    rate: float | None = None,
    warmup_epochs: float | None = None,
    decay: str | None = None,
) -> Preset:
    """Returns a preset with some settings replaced; None: not replaced.

    Args:
        name: a key of PRESETS.
        epochs: number of epochs, to which warm-up and decay are scaled: with 9 epochs,
            `goyal_2017` has half an epoch of warm-up, and divides the rate by 10 at
            epochs 3, 6 and 8.
        rate: the base rate, for the preset's `batch`.
        warmup_epochs: number of warm-up epochs; it is not scaled to `epochs`.
        decay: a key of DECAYS, scaled to the resulting length.
    """
    preset = PRESETS[name]
    stretch = 1.0 if epochs is None else epochs / preset.epochs
    length = preset.epochs * stretch
    shape = _stretched(preset.decay, stretch)
    transition = preset.transition_epochs
    if transition is not None:
        transition = (transition[0] * stretch, transition[1] * stretch)
    if decay is not None:
        shape = _stretched(DECAYS[decay], length / _DECAYS_EPOCHS)
    return dataclasses.replace(
        preset,
        epochs=length,
        rate=preset.rate if rate is None else rate,
        warmup_epochs=(
            preset.warmup_epochs * stretch if warmup_epochs is None else warmup_epochs
        ),
        decay=shape,
        transition_epochs=transition,
    )


def _stretched(decay: Decay, stretch: float) -> Decay:
    match decay:
        case Steps(epochs, factor):
            return Steps(tuple(epoch * stretch for epoch in epochs), factor)
        case Levels(epochs, factors):
            return Levels(tuple(epoch * stretch for epoch in epochs), factors)
        case Exponential(factor, epochs):
            return Exponential(factor, epochs * stretch)
    return decay  # the other decays contain no epochs


def rate_at(
    preset: Preset, step: int, *, steps_per_epoch: int, global_batch: int
) -> float:
    """Returns the learning rate of a step, in closed form.

    Args:
        preset: a preset of PRESETS or a variant.
        step: index of the step from 0, over all epochs.
        steps_per_epoch: steps of one rank, the same number on all ranks.
        global_batch: examples in a step on all ranks together.
    """
    warmup, total = _lengths(preset, steps_per_epoch)
    begun, length = step, total
    if preset.delay:
        begun, length = max(step - warmup, 0), total - warmup
    rising = warmup_factor(step, warmup, _start(preset, global_batch))
    falling = _decay_factor(preset.decay, begun, length, steps_per_epoch)
    return _peak(preset, global_batch) * rising * falling


def rule(preset: Preset, batch: int) -> str:
    """Describes the rate of a preset; warns if the batch is too large for it.

    Args:
        preset: a preset of PRESETS or a variant.
        batch: examples in a step, by which the rate is scaled.

    Returns:
        One line, or two with a warning.

    Example:
        >>> print(rule(PRESETS["goyal_2017"], 1024))
        rate 0.4 = 0.1 x 1024 / 256, warm-up from 0.1 in 5 epochs, momentum correction
    """
    peak = _peak(preset, batch)
    parts = [f"rate {peak:g}"]
    if preset.batch is not None:
        parts[0] += f" = {preset.rate:g} x {batch} / {preset.batch}"
    if preset.transition_epochs is not None:
        center, period = preset.transition_epochs
        parts.append(f"RMSprop until epoch {center + period / 2:g}")
    elif preset.warmup_epochs and _start(preset, batch) < 1:
        start = _start(preset, batch) * peak
        parts.append(f"warm-up from {start:g} in {preset.warmup_epochs:.3g} epochs")
    if preset.momentum_correction:
        parts.append("momentum correction")
    line = ", ".join(parts)
    if batch <= preset.largest_batch:
        return line
    larger = [n for n, p in PRESETS.items() if p.largest_batch >= batch]
    advice = f"Use --preset={' or '.join(larger)}." if larger else "Use a smaller one."
    return (
        f"{line}\nwarning: accuracy may be lost: the preset was published for batches "
        f"up to {preset.largest_batch}, and this one has {batch}. {advice}"
    )


def momentum_at(
    preset: Preset, step: int, *, steps_per_epoch: int, global_batch: int
) -> float:
    """Returns the factor for a velocity that contains the learning rate.

    With momentum correction, v <- momentum * rate / previous rate * v + rate * g;
    otherwise v <- momentum * v + rate * g. The factor is infinite if the previous rate
    was 0, since such a velocity cannot be corrected. Arguments: see `rate_at`.

    References:
        Goyal et al., Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour, 2017,
        equation 10 (arXiv:1706.02677).
    """
    if not (preset.momentum_correction and step):
        return preset.momentum
    now, before = (
        rate_at(preset, s, steps_per_epoch=steps_per_epoch, global_batch=global_batch)
        for s in (step, step - 1)
    )
    return preset.momentum * now / before if before else math.inf


def schedule(
    preset: Preset, *, steps_per_epoch: int, global_batch: int
) -> keras.optimizers.schedules.LearningRateSchedule:
    """Returns the rates as a Keras schedule; for the arguments, see `rate_at`."""
    warmup, total = _lengths(preset, steps_per_epoch)
    length = total - warmup if preset.delay else total
    return Warmup(
        _decay_schedule(
            preset.decay, _peak(preset, global_batch), length, steps_per_epoch
        ),
        warmup,
        start=_start(preset, global_batch),
        delay=preset.delay,
    )


@keras.saving.register_keras_serializable(package="tfdist_recipes")
class OfUpdates(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule by updates, for an optimizer that counts every accumulated batch.

    Args:
        schedule: the rate of each update, from 0.
        batches: number of batches in an update.
    """

    def __init__(
        self, schedule: keras.optimizers.schedules.LearningRateSchedule, batches: int
    ) -> None:
        super().__init__()
        self.schedule, self.batches = schedule, batches

    def __call__(self, step: Any) -> Any:
        """Returns the learning rate of the update that contains a batch."""
        return self.schedule(keras.ops.cast(step, "int64") // self.batches)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments in Keras's format."""
        saved = keras.optimizers.schedules.serialize(self.schedule)
        return {"schedule": saved, "batches": self.batches}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "OfUpdates":
        """Returns the schedule with the configuration from `get_config`."""
        inner = keras.optimizers.schedules.deserialize(config["schedule"])
        return cls(inner, config["batches"])


def optimizer(
    preset: Preset,
    *,
    steps_per_epoch: int,
    global_batch: int,
    accumulation: int = 1,
    growth: Growth | None = None,
    **options: Any,
) -> keras.optimizers.Optimizer:
    """Returns the optimizer of a preset, not yet distributed.

    Args:
        preset: as in `rate_at`; a step is an update.
        steps_per_epoch: number of updates in an epoch.
        global_batch: examples in an update on all ranks together.
        accumulation: batches of a rank whose gradients are added up for an update.
        growth: how the batch grows; the other numbers are those of the first epoch.
        **options: arguments of the optimizer, passed on unchanged.
    """
    rate = schedule(preset, steps_per_epoch=steps_per_epoch, global_batch=global_batch)
    if growth is not None:
        rate = growth.of(rate)
    if accumulation > 1:
        rate = OfUpdates(rate, accumulation)
        options["gradient_accumulation_steps"] = accumulation
    if preset.transition_epochs is not None:
        center, period = preset.transition_epochs
        batches = steps_per_epoch * accumulation
        options |= {"center_steps": center * batches, "period_steps": period * batches}
    return preset.optimizer(
        rate,
        momentum=preset.momentum,
        nesterov=preset.nesterov,
        weight_decay=preset.weight_decay,
        momentum_correction=preset.momentum_correction,
        **options,
    )


def _lengths(preset: Preset, steps_per_epoch: int) -> tuple[int, int]:
    """Returns the number of steps of the warm-up and of the whole run."""
    warmup = round(preset.warmup_epochs * steps_per_epoch)
    total = round(preset.epochs * steps_per_epoch)
    if total <= warmup:
        raise ValueError(
            f"Expected more epochs than the {preset.warmup_epochs:g} of the warm-up, "
            f"got epochs={preset.epochs:g}."
        )
    return warmup, total


def _peak(preset: Preset, global_batch: int) -> float:
    if preset.batch is None:
        return preset.rate
    return scaled_rate(preset.rate, global_batch=global_batch, base_batch=preset.batch)


def _start(preset: Preset, global_batch: int) -> float:
    """Returns the first step's factor; 1 (no warm-up) if the rate is not scaled up."""
    if preset.warmup_from_zero:
        return 0.0
    return min(1.0, preset.rate / _peak(preset, global_batch))


def _decay_factor(
    decay: Decay,
    step: int,
    length: int,
    steps_per_epoch: int,
) -> float:
    match decay:
        case Steps(epochs, factor):
            return factor ** sum(step >= epoch * steps_per_epoch for epoch in epochs)
        case Levels(epochs, factors):
            begun = sum(step >= epoch * steps_per_epoch for epoch in epochs)
            return factors[begun - 1]
        case Exponential(factor, epochs):
            return factor ** (step / (epochs * steps_per_epoch))
        case Cosine():
            return (1 + math.cos(math.pi * min(step / length, 1))) / 2
        case Polynomial(power):
            return (1 - min(step / length, 1)) ** power
    raise TypeError(f"Expected a decay of this file, got {decay!r}.")


def _decay_schedule(
    decay: Decay, rate: float, length: int, steps_per_epoch: int
) -> keras.optimizers.schedules.LearningRateSchedule:
    schedules = keras.optimizers.schedules
    match decay:
        case Steps(epochs, factor):
            values = [rate * factor**i for i in range(len(epochs) + 1)]
            return schedules.PiecewiseConstantDecay(
                _last_steps(epochs, steps_per_epoch), values
            )
        case Levels(epochs, factors):
            return schedules.PiecewiseConstantDecay(
                _last_steps(epochs[1:], steps_per_epoch), [rate * f for f in factors]
            )
        case Exponential(factor, epochs):
            return schedules.ExponentialDecay(rate, epochs * steps_per_epoch, factor)
        case Cosine():
            return schedules.CosineDecay(rate, length)
        case Polynomial(power):
            return schedules.PolynomialDecay(rate, length, 0.0, power)
    raise TypeError(f"Expected a decay of this file, got {decay!r}.")


def _last_steps(epochs: Sequence[float], steps_per_epoch: int) -> list[int]:
    """Returns the step before each epoch, at which Keras still uses the old value."""
    return [math.ceil(epoch * steps_per_epoch) - 1 for epoch in epochs]


def main(words: Sequence[str] | None = None) -> None:
    """Prints the learning rate at the start of each epoch.

    Args:
        words: arguments of the command line; None: of this process.
    """
    parser = argparse.ArgumentParser(description="The learning rates of a preset.")
    parser.add_argument("preset", choices=PRESETS)
    parser.add_argument(
        "global_batch", type=int, help="images per step, of all ranks together"
    )
    flags = parser.parse_args(words)
    name, global_batch = flags.preset, flags.global_batch
    if not 1 <= global_batch <= IMAGENET:
        parser.error(
            f"expected a global_batch of 1 to {IMAGENET} (the images of ImageNet), got "
            f"{global_batch}."
        )
    preset = PRESETS[name]
    steps = IMAGENET // global_batch
    print(f"{name}, {global_batch} images in a step, {steps} in an epoch")
    for epoch in range(math.ceil(preset.epochs)):
        rate = rate_at(
            preset, epoch * steps, steps_per_epoch=steps, global_batch=global_batch
        )
        print(f"{epoch:4d}  {rate:.6g}")


if __name__ == "__main__":
    main()
