"""A host of `--nnodes` other than the first: connects to it, and runs its own ranks."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import time
from collections.abc import Mapping
from typing import Any

from tfdist.core.rendezvous.auth import AuthenticationError, RefusedError
from tfdist.core.rendezvous.channel import Channel, connect_channel
from tfdist.launch.agent import Agent
from tfdist.launch.connection import SealedConnection, watch_for_loss
from tfdist.launch.nodes.accept import NOTICE_S
from tfdist.launch.nodes.place import NodePlace, NodesError, claims, job_secret
from tfdist.launch.output import complain
from tfdist.launch.signals import PASSED_ON

_USAGE_ERROR = 2
_END_S = 5.0  # for the first host to read the last data that was sent


def join(
    options: argparse.Namespace,
    place: NodePlace,
    secret: bytes,
    environ: Mapping[str, str],
    timeout_s: float,
) -> int:
    """Runs the ranks of this host as the first host requests.

    Args:
        options: options of the command line; `command` has been checked.
        place: place of this host.
        secret: the secret that all hosts share.
        environ: environment variables for the ranks of this host.
        timeout_s: seconds within which this host must connect to the first one.

    Returns:
        The exit code of the job.

    Raises:
        NodesError: the first host cannot be reached, or does not start the job.
        OSError: no process or descriptor is available.
    """
    for number in PASSED_ON:  # there are no ranks yet that could handle these signals
        signal.signal(number, signal.SIG_IGN)
    channel = asyncio.run(_connect(options, place, secret, timeout_s))
    complain(
        f"this is node {place.rank} of {place.count}; tfdistrun on the first host "
        f"({place.where}) shows and saves the output of all ranks"
    )
    own = {k: v for k, v in os.environ.items() if k == "TFDIST_ADDRESS"}

    def complete(job: dict[str, Any]) -> dict[str, Any]:
        """Adds values that each host decides for itself, and the secret of the job."""
        name = job["environ"]["TFDIST_JOB_ID"]
        return {
            **job,
            "cwd": os.getcwd(),
            "command": options.command,
            "path": "",
            "environ": {**job["environ"], **own, **environ},
            "secret": job_secret(secret, name).hex(),
        }

    connection = SealedConnection(*channel.release())
    agent = Agent(connection, complete)
    try:
        code = agent.run()
    finally:
        connection.finish(_END_S)
    if agent.has_finished and code != 0:
        complain(
            f"the job ended with exit code {code}: see the output of tfdistrun on the "
            "first host"
        )
    elif code == 1:
        complain(
            f"the connection to the first host ({place.where}) ended, and with it the "
            "ranks of this host: see the output of tfdistrun there"
        )
    return code


async def _connect(
    options: argparse.Namespace, place: NodePlace, secret: bytes, timeout_s: float
) -> Channel:
    """Connects to the first host, and waits until all other hosts have connected.

    Raises:
        NodesError: the first host cannot be reached, or does not start the job.
    """
    notice = asyncio.get_running_loop().call_later(
        NOTICE_S, complain, f"waiting for the other hosts at {place.where}"
    )
    try:
        channel = await _reach(options, place, secret, timeout_s)
        await _begin(channel, place)
        return channel
    finally:
        notice.cancel()


async def _reach(
    options: argparse.Namespace, place: NodePlace, secret: bytes, timeout_s: float
) -> Channel:
    """Connects to the first host; returns once it has accepted this host."""
    own = claims(options, place, socket.gethostname())
    deadline = time.monotonic() + timeout_s
    try:
        return await connect_channel(place.address, secret, own, deadline, place.count)
    except RefusedError as error:
        raise NodesError(f"the first host refuses: {error}", _USAGE_ERROR) from None
    except AuthenticationError as error:
        raise NodesError(
            f"the program that listens at {place.where} does not belong to this job: "
            f"{error}; is the content of TFDIST_SECRET_FILE the same on all hosts?",
            _USAGE_ERROR,
        ) from None
    except (OSError, TimeoutError) as error:
        reason = str(error) or "no answer"
        raise NodesError(
            f"the first host cannot be reached at {place.where} within {timeout_s:g} s "
            f"(--host-timeout-s): {reason}; start `tfdistrun --node-rank 0` there, and "
            "make sure that no firewall blocks the port",
            1,
        ) from None


async def _begin(channel: Channel, place: NodePlace) -> None:
    """Waits until the job begins."""
    watch_for_loss(channel.sock)
    try:
        message = await channel.receive()
    except (OSError, AuthenticationError) as error:
        raise NodesError(
            f"the connection to the first host ({place.where}) ended before the job "
            f"began: {error}; see the output of tfdistrun there, and start all hosts "
            "again",
            1,
        ) from None
    if message.get("begin") is not True:
        why, code = message.get("why"), message.get("code")
        raise NodesError(f"the job does not begin: {why!s:.1000}", int(code or 1))
