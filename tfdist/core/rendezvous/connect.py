"""Connects a process to the mesh of its job, using its environment variables."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tfdist.core import tuning
from tfdist.core.rendezvous import auth, settings_check, spaces
from tfdist.core.rendezvous.address import (
    bind,
    is_loopback,
    join_address,
    own_address,
    reachable_address,
    split_address,
)
from tfdist.core.rendezvous.environment import Placement, detect
from tfdist.core.rendezvous.errors import RendezvousError, invalid
from tfdist.core.rendezvous.mesh import build
from tfdist.core.rendezvous.mesh_types import Mesh, Settings
from tfdist.core.rendezvous.secret import MeetingPoint, parent_job, read_secret_file
from tfdist.core.rendezvous.store import StoreServer

_DRAIN_S = 2.0
_MARGIN_S = 10.0
_NEEDED = (
    "set TFDIST_RENDEZVOUS=host:port (an address of rank 0's host and a free port) and "
    "TFDIST_SECRET_FILE (a file of mode 0600 with the same 32 random bytes on every "
    "host) for all ranks"
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `connect` besides the environment.

    Attributes:
        generation: number of initializations of this process, starting with 1.
        timeout_s: time limit in seconds for connecting all ranks.
        transport: "auto", "shm" or "tcp".
        shm_bytes: size in bytes of the shared memory of one link.
        window_bytes: bytes of a rank's window (`links.Window`) for each other rank on
            its host.
        rows: table of the configuration: name → {"value", "agreed", ...}.
    """

    generation: int
    timeout_s: float
    transport: str
    shm_bytes: int
    window_bytes: int
    rows: Mapping[str, Mapping[str, Any]]


def connect(environ: Mapping[str, str], placement: Placement, options: Options) -> Mesh:
    """Connects this process with all other ranks; the size must be above 1.

    The work is done by an event loop on a separate thread, so that this function can be
    called inside a running loop (a notebook).

    Raises:
        RendezvousError: see `tfdist.core.rendezvous.mesh.build`.
    """
    result: list[Mesh] = []
    failure: list[BaseException] = []
    done = threading.Event()
    loop = asyncio.new_event_loop()
    task = loop.create_task(_connect(environ, placement, options))

    def work() -> None:
        asyncio.set_event_loop(loop)
        on_demand = None
        try:
            mesh = loop.run_until_complete(task)
            result.append(mesh)
            on_demand = mesh.on_demand
        except BaseException as error:
            failure.append(error)
        try:
            if on_demand is not None:
                done.set()
                loop.run_until_complete(on_demand.run())
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()
            done.set()

    thread = threading.Thread(target=work, name="tfdist-rendezvous", daemon=True)
    thread.start()
    try:
        done.wait(options.timeout_s + _MARGIN_S)
    except BaseException:
        # Ctrl-C: close the descriptors.
        loop.call_soon_threadsafe(task.cancel)
        thread.join(_MARGIN_S)
        raise
    if not done.is_set():
        raise RuntimeError(
            "the rendezvous outlived its own deadline (this is a bug in tfdist)"
        )
    if not result or result[0].on_demand is None:
        thread.join()  # a fork while the thread runs would be unsafe
    if failure:
        raise failure[0]
    return result[0]


def checked_address(environ: Mapping[str, str]) -> str | None:
    """Returns this machine's address selected by TFDIST_ADDRESS, or None if not set.

    Raises:
        RendezvousError: TFDIST_ADDRESS is malformed, or selects no address of this
            machine. A single IP address is checked only by `bind`.
    """
    choice = environ.get("TFDIST_ADDRESS")
    return own_address(choice) if choice else None


async def _connect(
    environ: Mapping[str, str], placement: Placement, options: Options
) -> Mesh:
    deadline = time.monotonic() + options.timeout_s
    secret_file = environ.get("TFDIST_SECRET_FILE")
    address = checked_address(environ)
    runs_store = placement.rank == 0 and not placement.launcher_runs_store
    server: StoreServer | None = None
    meeting: MeetingPoint | None = None
    try:
        if secret_file and placement.rendezvous:
            secret = read_secret_file(secret_file)
            store = split_address(placement.rendezvous)
            if runs_store:
                server = _server(placement, secret, store)
        elif not (secret_file or placement.rendezvous) and (
            space := spaces.find(environ, placement, deadline)
        ):
            text, failure = None, None
            if runs_store:
                secret = auth.new_secret()
                try:
                    own = address or reachable_address(environ)
                    server = _server(placement, secret, (own, 0))
                    text = f"{secret.hex()}@{join_address(*server.address)}"
                except RendezvousError as error:  # the others wait for an answer
                    text, failure = "@", error
            key = f"tfdist-{options.generation}"
            answer = space.exchange(key, text, deadline)
            hexadecimal, _, where = answer.partition("@")
            if failure is not None:
                raise failure
            if not where:
                raise invalid("rank 0 cannot listen for the other ranks: see its error")
            secret, store = bytes.fromhex(hexadecimal), split_address(where)
        else:
            _check_one_host(placement, secret_file, address)
            job = placement.job or parent_job(environ)
            meeting = MeetingPoint(job, options.generation, environ)
            if runs_store:
                secret = auth.new_secret()
                server = _server(placement, secret, ("127.0.0.1", 0))
                store = server.address
            else:
                where, secret = await meeting.find(deadline=deadline)
                store = split_address(where)
        if server is not None:
            server.start()
            if meeting is not None:
                meeting.publish(join_address(*store), secret)
        settings = Settings(
            placement=placement,
            generation=options.generation,
            secret=secret,
            store=store,
            deadline=deadline,
            timeout_s=options.timeout_s,
            transport=options.transport,
            shm_bytes=options.shm_bytes,
            window_bytes=options.window_bytes,
            settings=settings_check.agreed_settings(options.rows),
            address=address,
            tuning=tuning.record(environ) if placement.rank == 0 else None,
        )
        return await build(settings)
    finally:
        if server is not None:
            await server.close(drain_s=_DRAIN_S)
            if meeting is not None:
                meeting.remove()


def _server(placement: Placement, secret: bytes, where: tuple[str, int]) -> StoreServer:
    return StoreServer(bind(*where), secret, placement.job or "", placement.size)


def _check_one_host(
    placement: Placement, secret_file: str | None, address: str | None
) -> None:
    """Raises if ranks on several hosts lack a common secret or address."""
    origin = f"{placement.variables}, read as {placement.source!r}"
    if placement.launcher_runs_store:
        raise invalid(
            "tfdistrun's TFDIST_RENDEZVOUS or TFDIST_SECRET_FILE is missing from the "
            "environment of this rank; pass both variables on"
        )
    if secret_file:
        raise invalid(
            f"TFDIST_SECRET_FILE is set, but no address ({origin}); {_NEEDED}"
        )
    if placement.rendezvous:
        host = split_address(placement.rendezvous)[0]
        if not is_loopback(host):
            raise invalid(
                f"the ranks are to meet at {placement.rendezvous} ({origin}), but "
                "without a common secret only a loopback address such as 127.0.0.1 is "
                f"allowed; {_NEEDED}"
            )
    if placement.local_size is not None and placement.local_size < placement.size:
        slurm = "start them with srun --mpi=pmi2 (or pmix), or "
        raise invalid(
            f"only {placement.local_size} of {placement.size} ranks are on this host "
            f"({origin}), and no address of the others is known; "
            f"{slurm if placement.source == 'slurm' else ''}{_NEEDED}"
        )
    if address is not None and not is_loopback(address):
        raise invalid(
            f"TFDIST_ADDRESS={address} is not a loopback address, but the ranks have "
            f"no common secret; {_NEEDED}"
        )


__all__ = ["Options", "Placement", "checked_address", "connect", "detect"]
