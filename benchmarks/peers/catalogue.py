"""The peers: where each lives, how it is started, what it can be asked for."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

WORKERS = Path(__file__).parent / "workers"
HOME = Path(os.environ.get("PEERS_HOME", Path.home() / ".cache" / "tfdist-peers"))
SIZES, GRADIENTS, TRAINING = "sizes", "gradients", "training"
OPEN_MPI = ("--allow-run-as-root", "--oversubscribe", "--bind-to", "none")


@dataclass(frozen=True)
class Peer:
    """One column of the tables.

    Attributes:
        name: of the column.
        environment: folder below `HOME`; empty: the Python that runs this.
        worker: file in `workers/`.
        launcher: "mpirun", "horovodrun", "tfdistrun" or "env": processes that find
            each other by RANK, WORLD_SIZE and MASTER_PORT.
        tasks: of `measuring`.
        options: of the launcher.
        environ: added to the environment.
        system: programs of the system that it needs besides.
        settings: handed to the worker in its task.
    """

    name: str
    environment: str
    worker: str
    launcher: str
    tasks: tuple[str, ...] = (SIZES,)
    options: tuple[str, ...] = ()
    environ: dict[str, str] = field(default_factory=dict)
    system: tuple[str, ...] = ()
    settings: dict[str, str] = field(default_factory=dict)

    @property
    def python(self) -> Path:
        """Of its environment."""
        if not self.environment:
            return Path(sys.executable)
        return HOME / self.environment / "bin" / "python"

    def missing(self) -> str:
        """Why it cannot run here and what to do; empty when it can."""
        lacking = [name for name in self.system if not shutil.which(name)]
        if lacking:
            return (
                f"{', '.join(lacking)} not found: install Debian's openmpi-bin and "
                "libopenmpi-dev, then build the environment anew: "
                f"rm -r {HOME / self.environment}; make peers"
            )
        if not self.python.exists():
            return f"{self.python.parent.parent} not built: make peers"
        return ""


PEERS = {
    peer.name: peer
    for peer in (
        Peer("tfdist-core", "", "on_core.py", "tfdistrun"),
        Peer(
            "impi",
            "impi",
            "on_mpi.py",
            "mpirun",
            environ={"I_MPI_PIN": "0", "I_MPI_FABRICS": "shm"},
        ),
        Peer("mpich5", "mpich", "on_mpi.py", "mpirun"),
        Peer("ompi5", "ompi5", "on_mpi.py", "mpirun", options=OPEN_MPI),
        Peer(
            "torch-gloo",
            "torch",
            "on_gloo.py",
            "env",
            environ={"GLOO_SOCKET_IFNAME": "lo"},
        ),
    )
}


def chosen(names: str, task: str) -> list[Peer]:
    """The peers of a comma-separated list; "all" is all that can do `task`.

    Raises:
        ValueError: a name is not known, or that peer cannot do it.
    """
    able = [name for name, peer in PEERS.items() if task in peer.tasks]
    wanted = able if names == "all" else names.split(",")
    unable = [name for name in wanted if name not in able]
    if unable:
        raise ValueError(
            f"Expected peers that can do {task!r}: {', '.join(able)}; got "
            f"{', '.join(unable)}."
        )
    return [PEERS[name] for name in wanted]


def split(peers: Iterable[Peer]) -> tuple[list[Peer], dict[str, str]]:
    """Those that can run here, and why the others cannot."""
    present, absent = [], {}
    for peer in peers:
        if reason := peer.missing():
            absent[peer.name] = reason
        else:
            present.append(peer)
    return present, absent
