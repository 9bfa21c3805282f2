"""The peers: where each lives, how it is started, what it can be asked for."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tfdist.core import allocator

WORKERS = Path(__file__).parent / "workers"
HOME = Path(os.environ.get("PEERS_HOME", Path.home() / ".cache" / "tfdist-peers"))
SIZES, GRADIENTS, TRAINING = "sizes", "gradients", "training"
OPEN_MPI = ("--allow-run-as-root", "--oversubscribe", "--bind-to", "none")


@dataclass(frozen=True)
class Peer:
    """One line of the tables.

    Attributes:
        name: of the line.
        environment: folder below `HOME`; empty: the Python that runs this.
        launcher: "mpirun", "horovodrun", "tfdistrun" or "env": processes that find
            each other by RANK, WORLD_SIZE and MASTER_PORT.
        workers: what it can be asked for → the file in `workers/` that does it.
        options: of the launcher.
        environ: added to the environment.
        system: programs that the system has to have.
        settings: added to the worker's task.
    """

    name: str
    environment: str
    launcher: str
    workers: dict[str, str]
    options: tuple[str, ...] = ()
    environ: dict[str, str] = field(default_factory=dict)
    system: tuple[str, ...] = ()
    settings: dict[str, str] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """Folder of its programs."""
        if not self.environment:
            return Path(sys.executable).parent
        return HOME / self.environment / "bin"

    @property
    def python(self) -> Path:
        """Python of its environment."""
        return Path(sys.executable) if not self.environment else self.folder / "python"

    @property
    def program(self) -> str:
        """The launcher: the system's, or that of its environment."""
        if self.launcher in self.system:
            return self.launcher
        return str(self.folder / self.launcher)

    def missing(self) -> str:
        """Why it cannot run here and what to do; empty when it can."""
        lacking = [name for name in self.system if not shutil.which(name)]
        if lacking:
            return (
                f"{', '.join(lacking)} not found: install Debian's openmpi-bin and "
                f"libopenmpi-dev, rm -r {self.folder.parent}, make peers"
            )
        if not self.python.exists():
            return f"{self.folder.parent} is not built: make peers"
        starts_itself = not self.environment or self.launcher == "env"
        if not starts_itself and not shutil.which(self.program):
            return (
                f"{self.folder.parent} has no {self.launcher}: "
                f"rm -r {self.folder.parent}, make peers"
            )
        return ""


_BARE = {SIZES: "on_core.py", GRADIENTS: "on_core.py"}
_MPI = {SIZES: "on_mpi.py", GRADIENTS: "on_mpi.py"}
_OP = {SIZES: "on_tensorflow.py", GRADIENTS: "on_tensorflow.py"}
_TENSORFLOW = {**_OP, TRAINING: "train_tensorflow.py"}
_TORCH = {SIZES: "on_gloo.py", GRADIENTS: "on_gloo.py", TRAINING: "train_torch.py"}
_INTEL = {"I_MPI_PIN": "0", "I_MPI_FABRICS": "shm"}
_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"}
_BY_TFDIST, _BY_HOROVOD = {"by": "tfdist"}, {"by": "horovod"}
_FIT = {**_BY_TFDIST, "loop": "fit"}
_TRAIN = {TRAINING: "train_tensorflow.py"}
_SLICE = ("--bind-to", "slice")


def _control(name: str, **settings: str) -> Peer:
    """Ranks that exchange nothing, with the allocator that tfdist's ranks use."""
    return Peer(
        name,
        "",
        "env",
        _TRAIN,
        environ=allocator.settings({}),
        settings={"by": "nobody", **settings},
    )


_ALL = (
    Peer("tfdist", "", "tfdistrun", _TENSORFLOW, settings=_BY_TFDIST),
    Peer("tfdist-fit", "", "tfdistrun", _TRAIN, settings=_FIT),
    Peer("tfdist-slice", "", "tfdistrun", _TRAIN, _SLICE, settings=_BY_TFDIST),
    _control("alone"),
    _control("in-step", in_step="1"),
    _control("alone-fit", loop="fit"),
    Peer(
        "hvd-gloo",
        "tf215",
        "horovodrun",
        _TENSORFLOW,
        ("--gloo",),
        settings=_BY_HOROVOD,
    ),
    Peer(
        "hvd-mpi",
        "tf215",
        "mpirun",
        _TENSORFLOW,
        OPEN_MPI,
        settings=_BY_HOROVOD,
    ),
    Peer("tf-ring", "tf221", "env", _TENSORFLOW, settings={"by": "ring"}),
    Peer("torch-gloo", "torch", "env", _TORCH, environ=_LOOPBACK),
    Peer("tfdist-core", "", "tfdistrun", _BARE),
    Peer("impi", "impi", "mpirun", _MPI, environ=_INTEL),
    Peer("mpich5", "mpich", "mpirun", _MPI),
    Peer("ompi4", "ompi4", "mpirun", _MPI, OPEN_MPI, system=("mpirun", "mpicxx")),
    Peer("ompi5", "ompi5", "mpirun", _MPI, OPEN_MPI),
)
PEERS = {peer.name: peer for peer in _ALL}


def chosen(names: str, task: str) -> list[Peer]:
    """The peers of a comma-separated list; "all" is all that can do `task`.

    Raises:
        ValueError: a name is not known, or that peer cannot do it.
    """
    able = [name for name, peer in PEERS.items() if task in peer.workers]
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
    reasons = {peer.name: (peer, peer.missing()) for peer in peers}
    present = [peer for peer, reason in reasons.values() if not reason]
    return present, {name: reason for name, (_, reason) in reasons.items() if reason}
