"""Inputs and outputs of the rendezvous."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tfdist.core import native, tuning
from tfdist.core.rendezvous.environment import Placement

if TYPE_CHECKING:
    from tfdist.core.rendezvous.links import LinkCredentials, Window
    from tfdist.core.rendezvous.on_demand_links import OnDemandLinks

# Seconds that a rank waits for the others after the deadline of the start, so that a
# rank that fails at the deadline can still report the reason.
GRACE_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of the mesh, read once.

    Attributes:
        placement: placement of this rank.
        generation: number of the initialization; part of every key and handshake.
        secret: secret of the job.
        store: host and port of the store.
        deadline: time by which all ranks must be connected, on the time.monotonic()
            clock, in seconds.
        timeout_s: time limit in seconds for connecting all ranks, and later for opening
            a link on demand.
        transport: "auto", "shm" or "tcp".
        shm_bytes: size in bytes of the shared memory of one link.
        window_bytes: bytes of a rank's window (`links.Window`) for each other rank on
            its host.
        settings: variables that must be equal on all ranks, with their values.
        address: IP address to listen on; None: the address that reaches the store.
        tuning: result of `tuning.record` on rank 0; None on other ranks.
    """

    placement: Placement
    generation: int
    secret: bytes = field(repr=False)
    store: tuple[str, int]
    deadline: float
    timeout_s: float
    transport: str
    shm_bytes: int
    window_bytes: int
    settings: dict[str, Any]
    address: str | None = None
    tuning: dict[str, str] | None = None

    @property
    def job(self) -> str:
        """Name of the job; "" if the launcher gave it no name."""
        return self.placement.job or ""

    @property
    def mesh_ranks(self) -> int:
        """Largest size with a full mesh (TFDIST_MESH_RANKS), equal on all ranks."""
        return int(self.settings.get("TFDIST_MESH_RANKS", 16))

    @property
    def sockets(self) -> int:
        """Connections in each TCP link (TFDIST_TCP_SOCKETS), equal on all ranks."""
        return int(self.settings.get("TFDIST_TCP_SOCKETS", 1))

    @property
    def left_s(self) -> float:
        """Seconds left until the deadline."""
        return max(0.0, self.deadline - time.monotonic())


@dataclass
class Mesh:
    """Data for starting the core; owns the descriptors until the core takes over.

    Attributes:
        hosts: name of each rank's host.
        pids: process id of each rank.
        sharing: number of ranks on this host, including this rank, that may run on a
            CPU of this rank; 0 if unknown.
        window: window of this rank. In a full mesh, close it after the core has
            started; otherwise `on_demand` closes it.
        on_demand: opens further links; None in a full mesh.
        credentials: credentials of this rank's links; None for one rank.
        address: IP address on which this rank listens; "" for one rank.
        tuning: tuning file of rank 0; None if it has none.
    """

    topology: native.Topology
    host: str
    generation: int
    own_doorbell_fd: int
    links: list[native.LinkEnd] = field(default_factory=list)
    hosts: list[str] = field(default_factory=list)
    pids: list[int] = field(default_factory=list)
    sharing: int = 0
    on_demand: OnDemandLinks | None = None
    window: Window | None = None
    credentials: LinkCredentials | None = None
    address: str = ""
    tuning: tuning.Tuning | None = None

    def close(self) -> None:
        """Closes all descriptors."""
        if self.on_demand is not None:
            self.on_demand.stop()  # its own thread also closes the window
            self.on_demand = None
        elif self.window is not None:
            self.window.close()
        close_ends(self.links)
        self.links.clear()
        if self.own_doorbell_fd >= 0:
            os.close(self.own_doorbell_fd)
            self.own_doorbell_fd = -1


def close_ends(ends: list[native.LinkEnd]) -> None:
    """Closes the descriptors of links that the core did not take over."""
    for end in ends:
        for fd in (
            end.socket_fd,
            end.memory_fd,
            end.peer_doorbell_fd,
            end.window_fd,
            *end.more_socket_fds,
        ):
            if fd >= 0:
                os.close(fd)
