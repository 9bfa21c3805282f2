"""Ray Train support: the workers of a trainer are the ranks of a job (docs/ray.md).

Example::

    from ray.train import ScalingConfig
    from tfdist.ray import Report, TfdistTrainer

    def train():  # runs on every worker
        import tfdist
        tfdist.init()
        ...
        model.fit(data, callbacks=[tfdist.callbacks.MetricAverage(), Report()])

    trainer = TfdistTrainer(train, scaling_config=ScalingConfig(num_workers=2))
    print(trainer.fit().metrics)
"""

from __future__ import annotations

import os
import secrets
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras

try:
    import ray.train
    from ray.train.backend import Backend, BackendConfig
    from ray.train.tensorflow import TensorflowTrainer
except ImportError as error:
    raise ImportError(
        f'tfdist.ray needs Ray Train on every node: pip install "ray[train]" ({error})'
    ) from error

from tfdist.core import runtime, world
from tfdist.core.rendezvous.address import bind, join_address
from tfdist.core.rendezvous.auth import new_secret
from tfdist.core.rendezvous.secret import keep_in_memory

_reserved: list[socket.socket] = []  # keeps the port until rank 0 listens


class TfdistTrainer(TensorflowTrainer):
    """Runs a training function on several workers, which are the ranks of one job.

    Args:
        train_loop_per_worker: the training function; it calls `tfdist.init()`.
        options: options of `ray.train.tensorflow.TensorflowTrainer`, such as
            `scaling_config` and `run_config`; not `tensorflow_config`.
    """

    def __init__(
        self, train_loop_per_worker: Callable[..., Any], **options: Any
    ) -> None:
        config = _RanksConfig()
        super().__init__(train_loop_per_worker, tensorflow_config=config, **options)


class Report(keras.callbacks.Callback):
    """Reports metrics and a checkpoint to Ray Train after each epoch.

    The checkpoint is a folder with `model.keras`, which rank 0 saves. Pass the callback
    on every rank, after `tfdist.callbacks.MetricAverage`.
    """

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Reports the metrics of the epoch, and its index from 0 as "epoch"."""
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if runtime.rank() == 0:
                self.model.save(Path(folder) / "model.keras")
                checkpoint = ray.train.Checkpoint.from_directory(folder)
            metrics = {"epoch": epoch, **(logs or {})}
            ray.train.report(metrics, checkpoint=checkpoint)


class _Ranks(Backend):
    """Sets the environment variables of each worker for its rank."""

    def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
        size, secret = len(worker_group), new_secret()
        common = {
            "TFDIST_SIZE": str(size),
            "TFDIST_RENDEZVOUS": worker_group.execute_single(0, _reserve),
            "TFDIST_JOB_ID": f"ray:{secrets.token_hex(8)}",
        }
        for rank in range(size):
            variables = {**common, "TFDIST_RANK": str(rank)}
            worker_group.execute_single(rank, _set_variables, variables, secret)

    def on_shutdown(self, worker_group: Any, backend_config: BackendConfig) -> None:
        worker_group.execute(world.shutdown)


class _RanksConfig(BackendConfig):
    @property
    def backend_cls(self) -> type[Backend]:
        return _Ranks


def _reserve() -> str:
    """Reserves a port; returns the address at which other workers reach this worker."""
    _reserved.append(bind(ray.util.get_node_ip_address(), 0))
    return join_address(*_reserved[-1].getsockname()[:2])


def _set_variables(variables: dict[str, str], secret: bytes) -> None:
    _, path = keep_in_memory(secret)
    os.environ.update(variables, TFDIST_SECRET_FILE=path)
