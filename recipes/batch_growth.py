"""A global batch size that grows during training.

This module is for the flags --batch_growth and --image_growth of resnet50_imagenet.py.

At the epochs at which a schedule would divide the learning rate, the batch size is
multiplied instead (Smith et al. 2018; Mikami et al. 2018). The rate of a preset, except
LARS, is scaled to the batch size of each epoch. For example, `goyal_2017` divides the
rate by 10 at epoch 30. If the batch is 10 times as large from epoch 30 on, the rate
does not change there.

References:
    Smith, Kindermans, Ying & Le, Don't Decay the Learning Rate, Increase the Batch
    Size, ICLR 2018 (arXiv:1711.00489). Mikami et al., Massively Distributed SGD:
    ImageNet/ResNet-50 Training in a Flash, 2018, section 2.1 (arXiv:1811.05233).
"""

from typing import Any

import keras
from keras import ops

from tfdist.data import BatchSchedule


def parse(text: str, first: int) -> BatchSchedule:
    """Parses the value of --batch_growth.

    Args:
        text: epochs and the batch sizes from these epochs on, like "30:1024,60:4096";
            "" if the batch does not grow.
        first: the batch size from epoch 0 on.

    Raises:
        ValueError: the text is not of this form, or the batch sizes decrease.

    Example:
        >>> from batch_growth import parse
        >>> parse("30:1024,60:4096", 256)
        BatchSchedule({0: 256, 30: 1024, 60: 4096})
    """
    found = by_epoch(text)
    batches = [first, *(found or {}).values()]
    if found is None or 0 in found or batches != sorted(batches):
        raise ValueError(
            "Expected --batch_growth=EPOCH:BATCH,EPOCH:BATCH,... with epochs from 1 on,"
            f" and batches that grow from --global_batch={first}, e.g. 30:{4 * first},"
            f"60:{16 * first}, got {text!r}."
        )
    return BatchSchedule({0: first, **found})


def parse_sizes(text: str, last: int) -> dict[int, int]:
    """Parses the value of --image_growth; returns image sizes by first epoch.

    Args:
        text: epochs and sizes, like "0:128,18:176,28:224"; "": always `last`.
        last: the image size of validation; the last training size must equal it.

    Raises:
        ValueError: the text is not of this form, the sizes do not grow, or the last one
            is not `last`.

    Example:
        >>> from batch_growth import parse_sizes
        >>> parse_sizes("0:128,18:224", 224)
        {0: 128, 18: 224}
    """
    found = by_epoch(text or f"0:{last}")
    sizes = list(found.values()) if found else []
    if not found or 0 not in found or sizes != sorted(sizes) or sizes[-1] != last:
        raise ValueError(
            "Expected --image_growth=0:SIZE,EPOCH:SIZE,... with sizes that grow to "
            f"--image_size={last}, e.g. 0:{max(last // 2, 32)},18:{last}, got {text!r}."
        )
    if sizes[0] < 32:
        raise ValueError(f"Expected image sizes of at least 32 pixels, got {sizes[0]}.")
    return found


def by_epoch(text: str) -> dict[int, int] | None:
    """Parses a text like "1:2,3:4" to {1: 2, 3: 4}; returns None if it is invalid."""
    found = {}
    for part in filter(None, text.split(",")):
        epoch, colon, number = (one.strip() for one in part.partition(":"))
        if not (colon and epoch.isdecimal() and number.isdecimal()):
            return None
        if int(epoch) in found:
            return None
        found[int(epoch)] = int(number)
    return dict(sorted(found.items()))


class Growth:
    """Maps steps with the growing batch to equivalent steps with the first batch size.

    Args:
        batches: the global batch size of each epoch.
        examples: samples in an epoch.
        scales_rate: whether the rate is proportional to the batch size.
    """

    def __init__(
        self, batches: BatchSchedule, examples: int, *, scales_rate: bool
    ) -> None:
        first = batches.batch_of(0)
        steps = examples // first
        # Of each stage: its first step, the equivalent step with the first batch size,
        # the steps of an epoch, and the factor of the learning rate.
        self.stages = [
            (
                batches.steps_before(epoch, total=examples),
                epoch * steps,
                examples // batch,
                batch / first if scales_rate else 1.0,
            )
            for epoch, batch in batches.batches.items()
        ]
        self.steps_per_epoch = steps

    def place_of(self, step: int) -> tuple[int, float]:
        """Returns the equivalent step with the first batch size, and the rate's factor.

        Example:
            >>> from batch_growth import Growth, parse
            >>> growth = Growth(parse("2:40", 20), 80, scales_rate=True)
            >>> [growth.place_of(step) for step in (7, 8, 9, 10)]
            [(7, 1.0), (8, 2.0), (10, 2.0), (12, 2.0)]
        """
        begin, first, steps, factor = max(s for s in self.stages if s[0] <= step)
        return first + (step - begin) * self.steps_per_epoch // steps, factor

    def of(
        self, schedule: keras.optimizers.schedules.LearningRateSchedule
    ) -> keras.optimizers.schedules.LearningRateSchedule:
        """Converts a schedule for the first batch size to one for the growing batch."""
        if len(self.stages) == 1:
            return schedule
        return Grown(schedule, self.stages, self.steps_per_epoch)


@keras.saving.register_keras_serializable(package="tfdist_recipes")
class Grown(keras.optimizers.schedules.LearningRateSchedule):
    """Learning-rate schedule for a growing batch; created by `Growth.of`."""

    def __init__(
        self,
        schedule: keras.optimizers.schedules.LearningRateSchedule,
        stages: list[tuple[int, int, int, float]],
        steps_per_epoch: int,
    ) -> None:
        super().__init__()
        self.schedule, self.stages = schedule, stages
        self.steps_per_epoch = steps_per_epoch

    def __call__(self, step: Any) -> Any:
        """Returns the learning rate of a step."""
        step = ops.cast(step, "int64")
        begins, firsts, steps, factors = zip(*self.stages, strict=True)
        stage = ops.sum(ops.cast(step >= ops.array(begins, "int64"), "int32")) - 1

        def of_stage(values: tuple[Any, ...], dtype: str) -> Any:
            return ops.take(ops.array(values, dtype), stage)

        since = (step - of_stage(begins, "int64")) * self.steps_per_epoch
        place = of_stage(firsts, "int64") + since // of_stage(steps, "int64")
        rate = self.schedule(place)
        return rate * ops.cast(of_stage(factors, "float32"), rate.dtype)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments in Keras's format."""
        return {
            "schedule": keras.optimizers.schedules.serialize(self.schedule),
            "stages": [list(stage) for stage in self.stages],
            "steps_per_epoch": self.steps_per_epoch,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Grown":
        """Returns the schedule with the configuration from `get_config`."""
        inner = keras.optimizers.schedules.deserialize(config["schedule"])
        stages = [tuple(stage) for stage in config["stages"]]
        return cls(inner, stages, config["steps_per_epoch"])
