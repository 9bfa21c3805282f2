"""Keeps the job's secret, and lets ranks on one host find rank 0 without tfdistrun.

tfdistrun keeps the secret in its own memory and passes a path that only processes of
the same user can open. Under mpirun or srun on one host, rank 0 creates the secret and
the store and publishes both in a folder that only this user can enter. The other ranks
read them there.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import stat
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfdist.core.rendezvous.auth import SECRET_BYTES
from tfdist.core.rendezvous.errors import invalid, timeout

_MAX_FILE_BYTES = 4096
_POLL_S = 0.005


def boot_id() -> str:
    """Returns an ID of this machine that changes only when the machine restarts."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_time(pid: int) -> str | None:
    """Returns a process's start time, in ticks, to detect a reused process ID.

    Returns None if the process has ended.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields[19]


def read_secret_file(path: str, variable: str = "TFDIST_SECRET_FILE") -> bytes:
    """Returns the secret in a file: 32 bytes, or 64 hexadecimal digits.

    Raises:
        RendezvousError: the file is missing or has no valid secret, its owner is
            neither this user nor root, its group can write it, or other users have
            access.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise invalid(
            f"{variable}={path!r} cannot be opened: {error.strerror}"
        ) from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise invalid(f"{variable}={path!r} is not a file")
        if status.st_uid not in (os.geteuid(), 0) or status.st_mode & 0o027:
            raise invalid(
                f"{variable}={path!r} is open to other users (owner {status.st_uid}, "
                f"mode {stat.S_IMODE(status.st_mode):04o}); set its owner to "
                "this user and its mode to 0600"
            )
        data = os.pread(fd, _MAX_FILE_BYTES, 0)
    finally:
        os.close(fd)
    if len(data) != SECRET_BYTES:
        try:
            data = bytes.fromhex(data.decode("ascii").strip())
        except ValueError:
            data = b""
    if len(data) != SECRET_BYTES:
        raise invalid(
            f"{variable}={path!r} must hold {SECRET_BYTES} random bytes, or as many in "
            f"hexadecimal: `head -c {SECRET_BYTES} /dev/urandom > FILE`"
        )
    return data


def keep_in_memory(secret: bytes) -> tuple[int, str]:
    """Keeps the secret in a file that exists only as long as this process.

    Returns:
        The descriptor, and a path with which processes of this user can open the file.
    """
    fd = os.memfd_create("tfdist-secret", os.MFD_CLOEXEC)
    os.fchmod(fd, 0o600)
    os.write(fd, secret)
    return fd, f"/proc/{os.getpid()}/fd/{fd}"


def parent_job(environ: Mapping[str, str]) -> str:
    """Returns a name for a job whose launcher gives none: the launcher's process.

    This is the nearest ancestor that lacks the variables of this rank. (A shell or
    wrapper in between has them.)
    """
    names = [
        name.encode() + b"=" + environ[name].encode()
        for name in (
            "PMI_RANK",
            "PMI_FD",
            "OMPI_COMM_WORLD_RANK",
            "TFDIST_RANK",
            "RANK",
        )
        if name in environ
    ]
    pid = os.getppid()
    while pid > 1 and names:
        try:
            inherited = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
        except OSError:
            break
        if not all(name in inherited for name in names):
            break
        pid = int(parent)
    return f"parent {pid} {start_time(pid)}"


class MeetingPoint:
    """The file in which ranks of one user on one host find rank 0.

    Args:
        job: name that is common to the ranks of this job.
        generation: number of the initialization.
        environ: environment variables, for XDG_RUNTIME_DIR.
    """

    def __init__(self, job: str, generation: int, environ: Mapping[str, str]) -> None:
        self.folder = self._folder(environ)
        text = f"{os.geteuid()}\n{boot_id()}\n{job}\n{generation}"
        self.name = hashlib.sha256(os.fsencode(text)).hexdigest()[:32]

    @staticmethod
    def _folder(environ: Mapping[str, str]) -> Path:
        runtime = environ.get("XDG_RUNTIME_DIR")
        if runtime and os.access(runtime, os.W_OK | os.X_OK):
            return Path(runtime) / "tfdist"
        return Path(tempfile.gettempdir()) / f"tfdist-{os.geteuid()}"

    def _open_folder(self) -> int:
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            fd = os.open(
                self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            )
        except OSError as error:
            raise invalid(
                f"the folder {self.folder}, where ranks of this host meet, cannot be "
                f"used: {error.strerror}; remove what is there, set XDG_RUNTIME_DIR "
                "to a folder of this user on all ranks, or use tfdistrun"
            ) from error
        status = os.fstat(fd)
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            os.close(fd)
            raise invalid(
                f"the folder {self.folder} belongs to user {status.st_uid} with mode "
                f"{stat.S_IMODE(status.st_mode):04o}; expected this user "
                f"({os.geteuid()}) and 0700; remove it, or set XDG_RUNTIME_DIR to a "
                "folder of this user on all ranks"
            )
        return fd

    def publish(self, address: str, secret: bytes) -> None:
        """Publishes address and secret for the other ranks. Called by rank 0.

        Raises:
            RendezvousError: another running job has the same name.
        """
        folder = self._open_folder()
        try:
            found = self._read(folder)
            if found is not None and found["pid"] != os.getpid():
                raise invalid(
                    f"process {found['pid']} already runs rank 0 of a job with this "
                    "name; give each job its own TFDIST_JOB_ID, or use tfdistrun"
                )
            text = json.dumps(
                {
                    "address": address,
                    "secret": secret.hex(),
                    "pid": os.getpid(),
                    "started": start_time(os.getpid()),
                }
            )
            temporary = f"{self.name}.{os.getpid()}"
            self._unlink(temporary, folder)
            fd = os.open(
                temporary,
                os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC,
                0o600,
                dir_fd=folder,
            )
            with os.fdopen(fd, "w") as file:
                file.write(text)
            os.rename(temporary, self.name, src_dir_fd=folder, dst_dir_fd=folder)
            self._sweep(folder)
        finally:
            os.close(folder)

    def _sweep(self, folder: int) -> None:
        """Removes the files of jobs whose rank 0 was killed."""
        for name in os.listdir(folder):
            if name != self.name and self._owner_is_dead(folder, name):
                self._unlink(name, folder)

    def _owner_is_dead(self, folder: int, name: str) -> bool:
        if "." in name:  # a file that was being written
            pid = name.rpartition(".")[2]
            return pid.isdecimal() and start_time(int(pid)) is None
        found = self._parse(folder, name)
        return found is not None and not self._alive(found)

    def remove(self) -> None:
        """Removes the file if it belongs to this process."""
        folder = self._open_folder()
        try:
            found = self._read(folder)
            if found is not None and found["pid"] == os.getpid():
                self._unlink(self.name, folder)
        finally:
            os.close(folder)

    async def find(self, *, deadline: float) -> tuple[str, bytes]:
        """Waits for rank 0's file; returns address and secret. Called by other ranks.

        Raises:
            RendezvousError: rank 0 did not publish the file before `deadline`, a time
                on the time.monotonic() clock.
        """
        folder = self._open_folder()
        try:
            while (found := self._read(folder)) is None:
                if time.monotonic() >= deadline:
                    raise timeout(
                        "rank 0 did not call tfdist.init() within the deadline "
                        f"(looked for its file in {self.folder})",
                        "missing ranks: 0",
                    )
                await asyncio.sleep(_POLL_S)
            return found["address"], bytes.fromhex(found["secret"])
        finally:
            os.close(folder)

    @staticmethod
    def _unlink(name: str, folder: int) -> None:
        try:
            os.unlink(name, dir_fd=folder)
        except FileNotFoundError:
            pass

    def _read(self, folder: int) -> dict[str, Any] | None:
        """Returns the file's contents; None if missing, or if its writer has ended."""
        found = self._parse(folder, self.name)
        return found if found is not None and self._alive(found) else None

    @staticmethod
    def _alive(found: dict[str, Any]) -> bool:
        return start_time(found["pid"]) == found["started"]

    @staticmethod
    def _parse(folder: int, name: str) -> dict[str, Any] | None:
        try:
            fd = os.open(
                name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder
            )
        except OSError:
            return None
        with os.fdopen(fd, "rb") as file:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                return None
            try:
                found = json.loads(file.read(_MAX_FILE_BYTES))
            except ValueError:
                return None
        fields = {"address": str, "secret": str, "pid": int, "started": str}
        if isinstance(found, dict) and all(
            isinstance(found.get(name), kind) for name, kind in fields.items()
        ):
            return found
        return None
