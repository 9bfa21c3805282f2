"""Checks of one machine, each a function that returns its findings.

The checks load the core, but not TensorFlow. They raise the limits of this process, as
tfdistrun does before it starts ranks, and change nothing else.
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import re
import socket
import sys
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path

from tfdist.core import mpi, native, op_compiler
from tfdist.core.rendezvous.address import is_loopback, split_address
from tfdist.core.rendezvous.environment import check_working_folder, detect
from tfdist.core.rendezvous.secret import read_secret_file
from tfdist.core.rendezvous.settings_check import tensorflow_version
from tfdist.core.version import __version__
from tfdist.launch import preflight
from tfdist.tools.doctor.finding import ERROR, OK, WARNING, Finding

PYTHONS = ((3, 11), (3, 13))
TENSORFLOWS = ((2, 16), (2, 21))
OLDEST_KERAS = (3, 11)
SLOW_LOOKUP_S = 1.0
LEAST_TEMPORARY_BYTES = 64 << 20
# Microseconds that a control group may use, in how many: version 2, version 1.
_QUOTA_FILES = (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us"))


def machine(environ: Mapping[str, str], ranks: int) -> list[Finding]:
    """Runs all checks of this machine.

    Args:
        environ: the environment variables of the job.
        ranks: number of ranks on this machine.
    """
    checks: tuple[Callable[[], list[Finding]], ...] = (
        lambda: launcher(environ),
        lambda: settings(environ),
        lambda: meeting(environ),
        python,
        packages,
        bytecode,
        libraries,
        lambda: engine(environ),
        lambda: limits(ranks),
        processors,
        names,
        lambda: folders(environ),
    )
    return [finding for check in checks for finding in check()]


def launcher(environ: Mapping[str, str]) -> list[Finding]:
    """Checks which launcher's variables give rank and size."""
    try:
        found = detect(environ)
    except native.CoreError as error:
        return [Finding("launcher", ERROR, error.message)]
    if found.source == "single":
        return [Finding("launcher", OK, "none: this process is the only rank")]
    text = f"rank {found.rank} of {found.size} by {found.source} ({found.variables})"
    return [Finding("launcher", OK, text)]


def settings(environ: Mapping[str, str]) -> list[Finding]:
    """Checks that all TFDIST_* variables are known and have valid values."""
    names_set = sorted(name for name in environ if name.startswith("TFDIST_"))
    try:
        native.config()
    except ImportError:
        return []  # reported by `libraries`
    except native.CoreError as error:
        return [Finding("settings", ERROR, error.message)]
    return [Finding("settings", OK, ", ".join(names_set) or "all have their defaults")]


def meeting(environ: Mapping[str, str]) -> list[Finding]:
    """Checks that the address and the secret of the job can be used on this machine."""
    try:
        address = environ.get("TFDIST_RENDEZVOUS") or detect(environ).rendezvous
    except native.CoreError:
        return []  # reported by `launcher`
    secret = environ.get("TFDIST_SECRET_FILE")
    found = []
    try:
        if secret:
            read_secret_file(secret)
            found.append(Finding("secret", OK, secret))
        if address:
            host, port = split_address(address)
            where = _lookup(host)
            found.append(Finding("address of rank 0", OK, f"{address} is {where}"))
    except native.CoreError as error:
        return [*found, Finding("rendezvous", ERROR, error.message)]
    except (OSError, UnicodeError) as error:
        remedy = "Set TFDIST_RENDEZVOUS to an IP address and a port."
        text = f"the host of {address} is not known here: {error}"
        return [*found, Finding("rendezvous", ERROR, text, remedy)]
    if bool(secret) != bool(address):
        name = "TFDIST_RENDEZVOUS" if secret else "TFDIST_SECRET_FILE"
        if secret or not is_loopback(split_address(address or "")[0]):
            remedy = "Ranks on several hosts need both (docs/launchers.md)."
            found.append(Finding("rendezvous", WARNING, f"{name} is not set", remedy))
    return found


def _lookup(host: str) -> str:
    return ", ".join(sorted({str(i[4][0]) for i in socket.getaddrinfo(host, None)}))


def python() -> list[Finding]:
    """Checks that tfdist is tested with this version of Python."""
    text = f"{sys.version.split()[0]}, {sys.executable}"
    if PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]:
        return [Finding("Python", OK, text)]
    return [Finding("Python", ERROR, text, "Use Python 3.11, 3.12 or 3.13.")]


def packages() -> list[Finding]:
    """Checks the versions of tfdist, TensorFlow and Keras."""
    found = [Finding("tfdist", OK, f"{__version__}, {Path(__file__).parents[2]}")]
    version = tensorflow_version()
    both = [name for name in ("tensorflow", "tensorflow-cpu") if _version(name)]
    supported = "2.16 to 2.21"
    if not version:
        remedy = "pip install tensorflow-cpu, or tensorflow, in this environment"
        found.append(Finding("TensorFlow", ERROR, "is not installed", remedy))
    elif len(both) == 2:
        text = f"{' and '.join(both)} are installed, and each overwrites the other"
        remedy = f"pip uninstall {' '.join(both)}; then install one of them"
        found.append(Finding("TensorFlow", WARNING, text, remedy))
    elif not TENSORFLOWS[0] <= _pair(version) <= TENSORFLOWS[1]:
        remedy = f"tfdist is tested with TensorFlow {supported}."
        found.append(Finding("TensorFlow", WARNING, version, remedy))
    else:
        found.append(Finding("TensorFlow", OK, version))
    keras = _version("keras")
    if version and _pair(keras or "0.0") < OLDEST_KERAS:
        remedy = "pip install 'keras>=3.11'"
        found.append(Finding("Keras", ERROR, keras or "is not installed", remedy))
    elif keras:
        found.append(Finding("Keras", OK, keras))
    return found


def bytecode() -> list[Finding]:
    """Checks that ranks need not compile the modules of TensorFlow at every start.

    They have to if the modules were installed without bytecode (by uv, or by `pip
    install --no-compile`) and Python cannot or must not cache it. Only Keras is
    checked, as an example for all packages.
    """
    keras = importlib.util.find_spec("keras")
    if keras is None or keras.origin is None:
        return []  # reported by `packages`
    cached = Path(importlib.util.cache_from_source(keras.origin))
    # Not Path.exists: it raises PermissionError in a folder that is not ours.
    folder = next(one for one in cached.parents if os.path.exists(one))
    is_readable = os.access(cached, os.R_OK)
    is_kept = not sys.dont_write_bytecode and os.access(folder, os.W_OK | os.X_OK)
    if is_readable or is_kept:
        state = "is installed" if is_readable else "is kept by the first import"
        return [Finding("bytecode", OK, state)]
    reason = f"{folder} cannot be written"
    if sys.dont_write_bytecode:
        reason = "PYTHONDONTWRITEBYTECODE (or python -B) is set"
    text = (
        f"Keras is installed without bytecode, and {reason}: each rank compiles the "
        "modules of TensorFlow and Keras at every start, which takes several seconds"
    )
    packages = Path(keras.origin).parents[1]
    remedy = (
        f"Run once, as a user who can write to {packages}: {sys.executable} -m "
        f"compileall -q {packages}"
    )
    return [Finding("bytecode", WARNING, text, remedy)]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _pair(version: str) -> tuple[int, int]:
    numbers = re.findall(r"\d+", version)[:2]
    return int(numbers[0]), int(numbers[1])


def libraries() -> list[Finding]:
    """Checks that the core loads, and which operations TensorFlow will load."""
    try:
        about = native.build_info()
    except ImportError as error:
        return [Finding("core", ERROR, str(error))]
    found = [Finding("core", OK, f"{about['version']}, built by {about['compiler']}")]
    version = tensorflow_version()
    if not version:
        return found
    path = native.LIBRARY_FOLDER / op_compiler.library_name(version)
    if op_compiler.fits(op_compiler.built_for(path), version):
        return [*found, Finding("operations", OK, path.name)]
    text = f"there are none for TensorFlow {version}"
    try:
        compiler = op_compiler.find_compiler()[0]
    except op_compiler.CompileError as error:
        return [*found, Finding("operations", ERROR, f"{text}, and {error}")]
    remedy = f"They are compiled on first use by {compiler}; this takes a minute, once."
    return [*found, Finding("operations", WARNING, text, remedy)]


def engine(environ: Mapping[str, str]) -> list[Finding]:
    """Checks that the MPI engine, if it is selected, has a matching library."""
    if environ.get("TFDIST_ENGINE") != mpi.NAME:
        return []
    try:
        version = mpi.check_launcher(detect(environ))
    except native.CoreError as error:
        return [Finding("MPI engine", ERROR, error.message)]
    return [Finding("MPI engine", OK, version)]


def limits(ranks: int) -> list[Finding]:
    """Checks open files, stack, memory and processors for this number of ranks."""
    try:
        uses_tcp = native.value("TFDIST_TRANSPORT") == "tcp"
        shm_bytes = 0 if uses_tcp else native.shm_bytes() + 2 * native.window_bytes()
    except (ImportError, native.CoreError):
        return []  # reported by `libraries` or `settings`
    found = preflight.check(ranks, shm_bytes=shm_bytes)
    findings = [Finding("limits", ERROR, text) for text in found.errors]
    findings += [Finding("limits", WARNING, text) for text in found.warnings]
    free_gib = preflight.available_memory() / 2**30
    plural = "s" if ranks > 1 else ""
    text = f"enough for {ranks} rank{plural}; {free_gib:.1f} GiB of memory are free"
    return findings or [Finding("limits", OK, text)]


def processors() -> list[Finding]:
    """Checks how many of the machine's processors this process may use."""
    usable, present = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    quota = cpu_quota(Path("/sys/fs/cgroup"), _text_of(Path("/proc/self/cgroup")))
    text = f"{usable} of {present} usable"
    if quota is not None and quota < usable:
        text += f", but a control group limits this machine to {quota:g}"
        remedy = (
            "TensorFlow starts more threads than that. Raise the limit of the "
            "container, or bind the ranks (docs/binding.md)."
        )
        return [Finding("processors", WARNING, text, remedy)]
    return [Finding("processors", OK, text)]


def cpu_quota(root: Path, groups: str) -> float | None:
    """Returns the number of processors that control groups allow; None: no limit.

    Args:
        root: folder where the control groups are mounted: version 2 there or in
            `unified`, version 1 in a folder for each set of controllers.
        groups: content of `/proc/self/cgroup`. Its lines "0::/a/b" (version 2) and
            "4:cpu,cpuacct:/a/b" (version 1) name the groups of this process, whose
            parents can have limits too.
    """
    folders = {root}  # in a container, only the root may exist
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        mounts: tuple[Path, ...] = (root, root / "unified")
        if controllers:
            has_cpu = "cpu" in controllers.split(",")
            mounts = (root / controllers, root / "cpu") if has_cpu else ()
        for mount in mounts:
            own = mount / path.lstrip("/")
            folders |= {own, *own.parents}
    quotas = [_quota_in(folder) for folder in folders]
    return min((quota for quota in quotas if quota is not None), default=None)


def _text_of(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


def _quota_in(group: Path) -> float | None:
    for files in _QUOTA_FILES:
        words = " ".join(_text_of(group / name) for name in files).split()
        if len(words) == 2 and all(word.isdecimal() for word in words):
            return int(words[0]) / int(words[1])  # else "max", -1, or no file
    return None


def names() -> list[Finding]:
    """Checks that this machine can resolve its own host name."""
    name = socket.gethostname()
    begin_s = time.monotonic()
    try:
        addresses = _lookup(name)
    except (OSError, UnicodeError) as error:
        text = f"{name} is not known to this machine: {error}"
        remedy = (
            "Add it to /etc/hosts, or set TFDIST_ADDRESS for jobs on several hosts."
        )
        return [Finding("host name", WARNING, text, remedy)]
    lookup_s = time.monotonic() - begin_s
    if lookup_s > SLOW_LOOKUP_S:
        text = f"looking up {name} took {lookup_s:.1f} s"
        remedy = "Repair the name servers in /etc/resolv.conf, or add it to /etc/hosts."
        return [Finding("host name", WARNING, text, remedy)]
    if all(is_loopback(address) for address in addresses.split(", ")):
        text = f"{name} is {addresses} on this machine, which other hosts cannot reach"
        return [Finding("host name", OK, text)]
    return [Finding("host name", OK, f"{name} is {addresses}")]


def folders(environ: Mapping[str, str]) -> list[Finding]:
    """Checks that the folders to which training writes are writable."""
    found = []
    try:
        check_working_folder()
        if not os.access(os.getcwd(), os.W_OK):
            text = f"the working folder {os.getcwd()} cannot be written"
            remedy = "Start in a folder where logs and checkpoints can be written."
            found.append(Finding("folders", WARNING, text, remedy))
    except native.CoreError as error:
        found.append(Finding("folders", ERROR, error.message))
    home = environ.get("HOME", "")
    if not (home and os.access(home, os.W_OK)):
        text = f"the home folder {home or '(HOME is not set)'} cannot be written"
        remedy = (
            "Set HOME, or KERAS_HOME for Keras's data sets and XDG_CACHE_HOME for "
            "operations that are compiled on first use."
        )
        found.append(Finding("folders", WARNING, text, remedy))
    temporary = Path(environ.get("TMPDIR") or "/tmp")  # noqa: S108 - the default
    try:
        free = os.statvfs(temporary)
        if not os.access(temporary, os.W_OK):
            text = f"the temporary folder {temporary} cannot be written"
            remedy = "Set TMPDIR to a writable folder."
            found.append(Finding("folders", ERROR, text, remedy))
        elif free.f_bavail * free.f_frsize < LEAST_TEMPORARY_BYTES:
            least = f"{LEAST_TEMPORARY_BYTES >> 20} MiB"
            text = f"{temporary} has less than {least} of free space"
            remedy = "Free space there, or set TMPDIR to another folder."
            found.append(Finding("folders", ERROR, text, remedy))
    except OSError as error:
        text = f"{temporary} cannot be used: {error.strerror}"
        remedy = "Set TMPDIR to a writable folder."
        found.append(Finding("folders", ERROR, text, remedy))
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        text = f"the user {os.getuid()} has no name on this machine"
        remedy = "tfdist needs none. Programs that ask for it need LOGNAME and HOME."
        found.append(Finding("user", WARNING, text, remedy))
    return found or [Finding("folders", OK, "working, home and temporary")]
