"""Processes that prepare data for those that train: Horovod's names.

The configuration is what it was. The services need Horovod's own runner, so to start
or use one is an error that names `tfdist.data.scatter`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

_UNSUPPORTED = (
    "Horovod's tf.data compute service needs Horovod's own runner, which tfdist "
    "replaces. Where few ranks are to read and prepare data for all, write "
    "dataset = tfdist.data.scatter(dataset, ...); or start TensorFlow's own "
    "tf.data.experimental.service and give its address to "
    "tf.data.experimental.service.distribute(...)."
)


@dataclasses.dataclass(frozen=True)
class TfDataServiceConfig:
    """Where the services of a job are.

    Attributes:
        dispatchers: how many.
        workers_per_dispatcher: how many.
        dispatcher_side: "compute" or "training".
        addresses: network interface → pairs of host and port.
        key: secret of the job.
        timeout: seconds.
    """

    dispatchers: int
    workers_per_dispatcher: int
    dispatcher_side: str
    addresses: Mapping[str, Sequence[tuple[str, int]]]
    key: bytes
    timeout: int = 60

    def compute_client(self, verbose: int = 1) -> NoReturn:
        """There are no services to talk to.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(_UNSUPPORTED)

    def to_dict(self) -> dict[str, Any]:
        """The configuration as plain data."""
        return {**dataclasses.asdict(self), "key": self.key.hex()}

    @staticmethod
    def from_dict(config: Mapping[str, Any]) -> TfDataServiceConfig:
        """The way back from `to_dict`.

        Example:
            >>> config = TfDataServiceConfig(1, 2, "compute", {"lo": [("h", 1)]}, b"k")
            >>> TfDataServiceConfig.from_dict(config.to_dict()) == config
            True
        """
        addresses = {
            interface: [(str(host), int(port)) for host, port in pairs]
            for interface, pairs in config["addresses"].items()
        }
        key = bytes.fromhex(config["key"])
        return TfDataServiceConfig(**{**config, "addresses": addresses, "key": key})

    def write(self, filename: str) -> None:
        """Writes the configuration to a file, all at once."""
        path = Path(filename)
        number, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        with os.fdopen(number, "w") as file:
            json.dump(self.to_dict(), file)
        Path(name).replace(path)

    @staticmethod
    def read(
        filename: str, wait_for_file_creation: bool = False
    ) -> TfDataServiceConfig:
        """Reads what `write` has written.

        Args:
            filename: of the file.
            wait_for_file_creation: whether to wait, 60 s at most, until it is there.

        Raises:
            FileNotFoundError: it is not there.
        """
        path = Path(filename)
        end = time.monotonic() + 60.0
        while wait_for_file_creation and not path.exists() and time.monotonic() < end:
            time.sleep(0.1)
        return TfDataServiceConfig.from_dict(json.loads(path.read_text()))


def tf_data_service(compute_config: TfDataServiceConfig, rank: int) -> NoReturn:
    """The address of a dispatcher: there is none.

    Raises:
        NotImplementedError: always; names what to use.
    """
    raise NotImplementedError(_UNSUPPORTED)


def send_to_data_service(
    dataset: Any,
    compute_config: TfDataServiceConfig,
    rank: int,
    size: int | None = None,
    processing_mode: str = "distributed_epoch",
    reuse_dataset: bool = False,
    round_robin: bool = False,
) -> NoReturn:
    """A dataset that services prepare: there are none.

    Raises:
        NotImplementedError: always; names what to use.
    """
    raise NotImplementedError(_UNSUPPORTED)


def compute_worker_fn(compute_config: TfDataServiceConfig) -> NoReturn:
    """Main function of a process that prepares data; not supported.

    Raises:
        NotImplementedError: always; names what to use.
    """
    raise NotImplementedError(_UNSUPPORTED)
