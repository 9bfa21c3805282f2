"""BroadcastInitialState: broadcasts the initial weights of one rank to all ranks."""

from __future__ import annotations

import logging
from typing import Any

from tfdist.callbacks._base import RankCallback
from tfdist.callbacks._callback_list import is_in_fit
from tfdist.callbacks._per_rank_state import broadcast_at_start
from tfdist.core.process_sets import members_of
from tfdist.layers.seed_generators import broadcast_seed_generators, check_choice
from tfdist.training.model_building import (
    UnsyncedWeights,
    before_first_call,
    build_from_batch,
    unbuilt_layers,
)
from tfdist.training.model_optimizers import optimizers_of
from tfdist.training.preprocessing_layers import check_alike, follow_variables

_logger = logging.getLogger("tfdist")


class BroadcastInitialState(RankCallback):
    """Broadcasts the model's weights and the optimizer's state before the first step.

    The model may be built before `fit` or by its first batch. It may run as a graph,
    with `run_eagerly=True`, or with `steps_per_execution`. Weights that only `root` has
    loaded from a file reach all ranks in this way. Optimizers that are attributes of
    the model (a GAN has two) are included. Layers with weights have to be built before
    `fit` if the model's `call` does not use them, or if the model has no `call`.

    Some state is specific to each rank: local variables (`local_variables`) with their
    slots, the slots of an optimizer with `op=ReduceOp.ADASUM`, and accumulated
    gradients (`gradient_accumulation_steps`). In a later call of `fit`, each rank keeps
    this state if all ranks have trained for the same number of steps and have equal
    weights. If they differ, for example because one rank has loaded a checkpoint, this
    state is broadcast from `root` as well. Gradients that were accumulated with a
    `weight` (`optimizer.apply(..., weight=...)`) are then discarded, with a warning.

    The seeds of layers with random numbers (dropout, noise, augmentation) are derived
    from those of `root`. By default each rank gets a different seed, so that dropout
    masks of different ranks are independent, as in one process
    (`tfdist.layers.broadcast_seed_generators`).

    A `Normalization` layer that was adapted on `root` is adapted on all ranks. The
    state of other preprocessing layers (vocabularies, bin boundaries) is not broadcast
    and has to be equal on all ranks.

    Args:
        root: rank whose state is broadcast; default: the lowest rank that trains the
            model, which is 0 unless its optimizer has a `process_set`.
        seed_generators: "distinct" (default) for a different random stream on each
            rank, or "equal" for the stream of `root` on all ranks.

    Raises:
        ValueError: `seed_generators` is invalid. At the start of `fit`: the model's
            optimizer does not reduce gradients, or `root` does not train the model.
        RuntimeError: after a step: the step created weights, which were not broadcast.
        tfdist.MismatchError: at the start of `fit`: the ranks' variables or the state
            of their preprocessing layers differ.

    Example:
        >>> import tfdist
        >>> callbacks = [tfdist.callbacks.BroadcastInitialState(root=0)]
    """

    def __init__(
        self, root: int | None = None, *, seed_generators: str = "distinct"
    ) -> None:
        super().__init__()
        check_choice(seed_generators)
        self.root = root
        self.seed_generators = seed_generators
        self._waits_for_batch = False
        self._unsent: UnsyncedWeights | None = None

    def settings_of_all_ranks(self) -> dict[str, Any]:
        """Returns `root` and `seed_generators`."""
        return {"root": self.root, "seed_generators": self.seed_generators}

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Broadcasts now, or at the first batch if the model is not built."""
        super().on_train_begin(logs)
        self._unsent = None
        unbuilt = unbuilt_layers(self.model)
        # A custom loop never calls the train function.
        self._waits_for_batch = bool(unbuilt) and is_in_fit(self.model)
        if not self._waits_for_batch:
            self._broadcast()

    def on_train_batch_begin(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Builds an unbuilt model and broadcasts, just before its first step."""
        super().on_train_batch_begin(batch, logs)
        if self._waits_for_batch:
            self._waits_for_batch = False
            before_first_call(self.model, self._build_and_broadcast, self._check_sent)

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Checks that the step created no weights, which would differ between ranks."""
        self._check_sent()
        super().on_train_batch_end(batch, logs)

    def _check_sent(self, error: Exception | None = None) -> None:
        if self._unsent is not None:
            self._unsent.check(error)

    def _broadcast(self, why_unbuilt: Exception | None = None) -> None:
        model = self.model
        optimizer = model.optimizer
        trained = model.trainable_variables
        if optimizer is not None and not optimizer.built and trained:
            optimizer.build(trained)
        ranks = self._ranks
        root = members_of(ranks)[0] if self.root is None else self.root
        name = type(self).__name__
        broadcast_at_start(model, self._variables(), root, ranks, name)
        follow_variables(model)
        check_alike(model, name, ranks)
        broadcast_seed_generators(
            model, self.seed_generators, root=root, process_set=ranks
        )
        if len(members_of(ranks)) > 1:
            self._unsent = UnsyncedWeights(model, why_unbuilt)

    def _variables(self) -> list[Any]:
        """Returns the variables to send, in the same order on every rank."""
        slots = [v for one in optimizers_of(self.model) for v in one.variables]
        return self.model.weights + slots

    def _build_and_broadcast(self, batch: Any) -> None:
        self._broadcast(build_from_batch(self.model, batch))
        self._note_operations()  # the check for reductions excludes this broadcast
