"""The program of Horovod's compute service; see `compute_service`."""

from __future__ import annotations

from typing import NoReturn

from tfdist.horovod.tensorflow.data.compute_service import _UNSUPPORTED


def main(
    dispatchers: int, dispatcher_side: str, configfile: str, timeout: int
) -> NoReturn:
    """Starts the services of a job.

    Raises:
        NotImplementedError: always; names what to use.
    """
    raise NotImplementedError(_UNSUPPORTED)
