"""Compiles the TensorFlow operations of tfdist for one version of TensorFlow.

TensorFlow's C++ interface changes with every minor version, so there is one library for
each: `libtfdist_tf-2.21.so` for TensorFlow 2.21. A source installation has the library
of the installed TensorFlow, and the wheel has one for every supported version. For
another TensorFlow, `op_library` compiles the operations on first use and keeps the
library in the user's cache.

All operations are compiled as one file, because almost all of the compile time goes
into TensorFlow's headers. This module imports neither tfdist nor TensorFlow, because
setup.py loads it from its file.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

COMPILE_TIMEOUT_S = 1200.0
# Source files of the core that are also compiled into the operations, because the core
# exports only its C interface.
SHARED = ("base/status.cc", "transport/crc32c.cc")
FLAGS = (
    *("-shared", "-fPIC", "-O3", "-ffp-contract=off"),
    *("-fvisibility=hidden", "-fvisibility-inlines-hidden"),
    *("-Wall", "-Wextra", "-Wno-deprecated-declarations"),
)
FRAMEWORK = "libtensorflow_framework.so.2"
COMPILERS = ("c++", "g++", "clang++")
_REMEDY = "Set XDG_CACHE_HOME to a folder to which only you can write"
_INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)


class CompileError(RuntimeError):
    """The operations cannot be compiled; the message says why and what to do."""


@dataclass(frozen=True)
class TensorFlow:
    """The properties of an installed TensorFlow that the compiler needs.

    Attributes:
        version: e.g. `2.21.0`.
        include: folder of the headers, `tf.sysconfig.get_include()`.
        library: folder of the libraries, `tf.sysconfig.get_lib()`.
        flags: `tf.sysconfig.get_compile_flags()`, with the C++ standard and ABI.
    """

    version: str
    include: str
    library: str
    flags: tuple[str, ...]


def library_name(version: str) -> str:
    """Returns the file name of the operations for a version of TensorFlow.

    Example:
        >>> from tfdist.core import op_compiler
        >>> op_compiler.library_name("2.21.0")
        'libtfdist_tf-2.21.so'
    """
    return f"libtfdist_tf-{'.'.join(version.split('.')[:2])}.so"


def fits(built: str, running: str) -> bool:
    """Returns whether operations built for one TensorFlow load into another.

    Releases of the same minor version have the same C++ interface. A pre-release or a
    nightly build fits only itself.

    Example:
        >>> from tfdist.core import op_compiler
        >>> op_compiler.fits("2.18.0", "2.18.1"), op_compiler.fits("2.18.1", "2.19.1")
        (True, False)
    """
    releases = all(re.fullmatch(r"\d+\.\d+\.\d+", v) for v in (built, running))
    same_minor = library_name(built) == library_name(running)
    return built == running or (releases and same_minor)


def built_for(path: Path) -> str:
    """Returns the version of TensorFlow that the library at `path` was built for.

    The version is read from the file, because loading the library would run its code.
    Returns "" if there is no such file, or no version in it.
    """
    found = re.search(
        rb"tfdist ops built for TensorFlow ([0-9A-Za-z.+-]+);",
        path.read_bytes() if path.is_file() else b"",
    )
    return found.group(1).decode() if found else ""


def source_files(folder: Path) -> list[Path]:
    """Returns the files of tfdist that the operations are compiled from.

    Args:
        folder: folder `tfdist_ops`, or a copy of it.
    """
    found = [*sorted((folder / "tf").glob("*.cc")), *(folder / x for x in SHARED)]
    for file in found:  # `found` grows: headers include headers
        names = _INCLUDE.findall(file.read_text())
        headers = [folder / name for name in names if (folder / name).is_file()]
        found += [header for header in dict.fromkeys(headers) if header not in found]
    return found


def cache_key(source: Path, tensorflow: TensorFlow) -> str:
    """Returns a hash of the sources, the options and the build of TensorFlow."""
    flags = (*FLAGS, *tensorflow.flags, *_words("CXXFLAGS"), platform.machine())
    try:
        found = os.stat(Path(tensorflow.library) / FRAMEWORK)
        build = (found.st_size, found.st_mtime_ns)
    except OSError:
        build = (0, 0)
    digest = hashlib.sha256(repr((tensorflow.version, flags, build)).encode())
    for file in source_files(source):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def find_compiler() -> list[str]:
    """Returns the command of a C++ compiler: `CXX`, or the first one on the PATH.

    Raises:
        CompileError: there is no C++ compiler.
    """
    named = _words("CXX")
    for words in [named] if named else [[name] for name in COMPILERS]:
        if shutil.which(words[0]):
            return words
    tried = " ".join(named) or ", ".join(COMPILERS)
    raise CompileError(
        f"no C++17 compiler was found (tried {tried}). Install g++ 9 or newer (Debian, "
        "Ubuntu: apt install g++), or name a compiler in the environment variable CXX"
    )


def compile_operations(
    tensorflow: TensorFlow, source: Path, core: Path, output: Path
) -> str:
    """Compiles the operations; `output` appears only when it is complete.

    Args:
        tensorflow: the TensorFlow that will load them.
        source: folder `tfdist_ops`.
        core: folder of `libtfdist_core.so`.
        output: path of the library. When loaded, the library finds the core in its own
            folder, or uses the core that the process has already loaded.

    Returns:
        The warnings of the compiler.

    Raises:
        CompileError: there is no compiler, or it failed.
    """
    partial = output.with_name(f".{output.name}.partial")
    command = [
        *(*find_compiler(), *FLAGS),
        *(flag for flag in tensorflow.flags if not flag.startswith("-I")),
        # -isystem silences the warnings in TensorFlow's headers. The prefix maps keep
        # the paths of this machine out of the library.
        *("-isystem", tensorflow.include, "-I", str(source)),
        f"-ffile-prefix-map={tensorflow.include}=tensorflow",
        f"-ffile-prefix-map={source}=tfdist_ops",
        f'-DTFDIST_TF_VERSION="{tensorflow.version}"',
        *_words("CXXFLAGS"),
        *("-x", "c++", "-", "-x", "none", "-o", str(partial)),
        *("-L", str(core), "-l:libtfdist_core.so"),
        *("-L", tensorflow.library, f"-l:{FRAMEWORK}"),
        *("-Wl,-z,defs", "-Wl,-rpath,$ORIGIN", "-s"),
    ]
    units = [file for file in source_files(source) if file.suffix == ".cc"]
    text = "".join(f'#include "{file.relative_to(source)}"\n' for file in units)
    try:
        done = subprocess.run(  # noqa: S603 - the user's compiler, no shell
            command,
            input=text,
            capture_output=True,
            text=True,
            cwd=source,
            timeout=COMPILE_TIMEOUT_S,
        )
        if done.returncode != 0:
            raise CompileError(
                f"{command[0]} failed (exit code {done.returncode}) for TensorFlow "
                f"{tensorflow.version}. Its output ends with:\n{done.stderr[-3000:]}"
            )
        # The umask may let a group write it; `_check_private` would then refuse it.
        partial.chmod(partial.stat().st_mode & ~0o022)
        partial.replace(output)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompileError(f"compiling {output} failed: {error}") from None
    finally:
        partial.unlink(missing_ok=True)
    return done.stderr


def compiled_on_first_use(
    tensorflow: TensorFlow, source: Path, core: Path, say: Callable[[str], None]
) -> Path:
    """Returns the path of the operations in the cache; compiles them if missing.

    Of several ranks on one host, one compiles and the others wait for it.

    Args:
        tensorflow: the running TensorFlow.
        source: folder of the operations' source files.
        core: folder of `libtfdist_core.so`.
        say: function that is called with one line of text before a compilation begins.

    Raises:
        CompileError: there is no compiler, it failed, or the cache cannot be written.
    """
    folder = cache_folder() / cache_key(source, tensorflow)
    path = folder / library_name(tensorflow.version)
    if path.is_file():
        _check_private(folder.parent, folder, path)
        return path
    find_compiler()  # before a folder is created
    try:
        for made in (folder.parent, folder):
            made.mkdir(parents=True, exist_ok=True, mode=0o700)
        _check_private(folder.parent, folder)
        with _locked(folder / "lock"):
            if not path.is_file():
                say(
                    "compiling tfdist's operations for TensorFlow "
                    f"{tensorflow.version} (up to a minute, once): {path}"
                )
                compile_operations(tensorflow, source, core, path)
    except OSError as error:
        raise CompileError(
            f"the compiled library is kept in {folder}, which cannot be written "
            f"({error.strerror or error}). {_REMEDY}"
        ) from None
    return path


def cache_folder() -> Path:
    """Returns the folder `tfdist` in the user's cache folder, `XDG_CACHE_HOME`.

    As the XDG specification requires, a relative path in the variable is ignored.

    Raises:
        CompileError: this user has no home folder.
    """
    named = Path(os.environ.get("XDG_CACHE_HOME") or ".")
    try:
        return (named if named.is_absolute() else Path.home() / ".cache") / "tfdist"
    except RuntimeError:
        raise CompileError(f"this user has no home folder. {_REMEDY}") from None


def _check_private(*paths: Path) -> None:
    """Raises CompileError if another user could have put code at one of the paths."""
    for path in paths:
        status = path.stat()
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise CompileError(
                f"{path} belongs to user {status.st_uid} and has mode "
                f"{status.st_mode & 0o777:04o}, so another user could have put a "
                f"library there. {_REMEDY}"
            )


def _words(variable: str) -> list[str]:
    """Returns the words of an environment variable.

    Raises:
        CompileError: the value has an unmatched quotation mark.
    """
    text = os.environ.get(variable, "")
    try:
        return shlex.split(text)
    except ValueError as error:
        raise CompileError(f"{variable}={text!r} cannot be read: {error}") from None


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds a lock on the file `path`; waits while another process compiles."""
    until = time.monotonic() + COMPILE_TIMEOUT_S
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise CompileError(
                        f"another process has held {path} for {COMPILE_TIMEOUT_S:.0f} "
                        "s. End it, or delete the file"
                    ) from None
                time.sleep(0.1)
        yield
