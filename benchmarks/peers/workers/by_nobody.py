"""The control of training: ranks that work at the same time and never communicate."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorflow as tf

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
VERSIONS = {"tensorflow": tf.__version__, "keras": tf.keras.__version__}
DEADLINE_S = 120.0
function: Callable[..., Any] = tf.function
scope = contextlib.nullcontext


def begin(variables: list[Any]) -> None:
    """Does nothing: each rank keeps its own variables."""
    del variables


def gradients(tape: tf.GradientTape, loss: tf.Tensor, variables: list[Any]) -> Any:
    """The gradients of this rank alone."""
    return tape.gradient(loss, variables)


def all_are(what: str, folder: str) -> bool:
    """Notes that this rank is `what`; returns whether all ranks are."""
    Path(folder, f"{what}{RANK}").touch()
    return all(Path(folder, f"{what}{rank}").exists() for rank in range(SIZE))


def until_all_are(what: str, folder: str, meanwhile: Callable[[], object]) -> None:
    """Calls `meanwhile` until all ranks are `what`, for at most DEADLINE_S."""
    limit_s = time.monotonic() + DEADLINE_S
    while not all_are(what, folder):
        if time.monotonic() > limit_s:
            raise SystemExit(f"not all ranks were {what!r} within {DEADLINE_S:g} s")
        meanwhile()


def end() -> None:
    """Does nothing: there is nothing to close."""
