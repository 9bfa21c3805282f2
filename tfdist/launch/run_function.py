"""`tfdist.run`: starts ranks from Python, for example in a notebook.

The ranks are new Python processes, started by `tfdistrun` on this host. They are never
forked: TensorFlow does not survive a fork.
"""

from __future__ import annotations

import codecs
import io
import locale
import os
import secrets
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from tfdist.core import pickling
from tfdist.launch import function_files


def run(
    function: Callable[..., Any],
    np: int,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    options: Sequence[str] = (),
) -> list[Any]:
    """Calls a function on several ranks of this host, and returns their results.

    `tfdist.run` works in a script, in a notebook and at the Python prompt. The output
    of the ranks is printed while they run; if there are several ranks, each line starts
    with the rank. The function, its arguments and its results are pickled. A function
    that is defined in a notebook or in the program itself is pickled by value, with the
    package cloudpickle. Return tensors and weights as NumPy arrays (for example
    `model.get_weights()`).

    Args:
        function: the function to call. It has to import the modules that it uses. If it
            uses tfdist, it has to call `tfdist.init()` first.
        np: number of ranks, at least 1.
        args: positional arguments of the function, the same on all ranks.
        kwargs: keyword arguments of the function.
        options: options for tfdistrun, for example `["--bind-to", "core"]`.

    Returns:
        The results of the function, in rank order. With the option `--min-np`, these
        are the results of the ranks with which the job has ended.

    Raises:
        RuntimeError: on a rank, the function raised an exception or returned a result
            that cannot be pickled (the message contains the traceback of the first
            exception); a rank was killed; or this process is a rank itself.
        TypeError: the function or an argument cannot be pickled.
        ValueError: `np` is not an integer of at least 1.

    Example:
        >>> import tfdist
        >>> tfdist.run(max, 2, args=(3, 5))
        [5, 5]
    """
    if isinstance(np, bool) or not isinstance(np, int) or np < 1:
        raise ValueError(
            "Expected np, the number of ranks, to be an integer of at least 1, got "
            f"{np!r}."
        )
    if "TFDIST_RANK" in os.environ:
        raise RuntimeError(
            "tfdist.run was called on a rank of a job. Call it in a program that was "
            "started without tfdistrun, or call the function itself."
        )
    check_picklable(function, "tfdist.run")
    with FunctionCall(function, args, kwargs or {}) as call:
        command = [*options, "--", sys.executable, "-m", __name__, str(call.folder)]
        code = finish("tfdist.launch", ["-np", str(np), *command], is_echoed=True)
        if code != 0:
            raise RuntimeError(_reason(call.folder, code))
        return call.results()


class FunctionCall:
    """A context with a folder through which ranks get a function and return results.

    Args:
        function: the function.
        args: positional arguments of the function.
        kwargs: keyword arguments of the function.

    Attributes:
        folder: path of the folder, which is removed when the context exits.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        self._call = (function, tuple(args), dict(kwargs))
        self._key = secrets.token_bytes(pickling.MAC_BYTES)
        self._holder = tempfile.TemporaryDirectory(prefix="tfdist-run-")
        self.folder = Path(self._holder.name)

    def __enter__(self) -> FunctionCall:
        try:
            sealed = function_files.seal(self._call, function_files.CALL, self._key)
        except BaseException:
            self._holder.cleanup()
            raise
        function_files.write(self.folder / function_files.KEY, self._key)
        function_files.write(self.folder / function_files.CALL, sealed)
        return self

    def __exit__(self, *_: object) -> None:
        self._holder.cleanup()

    def results(self) -> list[Any]:
        """Returns the results of the ranks with which the job has ended."""
        return function_files.results(self.folder, self._key)


def check_picklable(function: Callable[..., Any], caller: str, more: str = "") -> None:
    """Raises a TypeError if the function cannot be sent to the ranks.

    Args:
        function: the function to send.
        caller: name of the calling function, for the message.
        more: text that the message ends with, such as a further remedy.
    """
    if (
        getattr(function, "__module__", "") == "__main__"
        and not pickling.can_pickle_by_value()
    ):
        raise TypeError(
            f"{caller}: {function!r} is defined in the program itself, which the ranks "
            "do not run. Sending it requires cloudpickle: pip install cloudpickle. Or "
            f"import the function from a module.{more and ' ' + more}"
        )


def finish(module: str, words: Sequence[str], *, is_echoed: bool = False) -> int:
    """Runs a launcher until it exits; returns its exit code.

    Args:
        module: the module of the launcher.
        words: arguments for the launcher.
        is_echoed: whether this process reads the launcher's output and prints it, so
            that a notebook shows it in the cell. Otherwise, the launcher writes to this
            process's standard output and error.
    """
    job = subprocess.Popen(  # noqa: S603 - the user's Python, no shell
        [sys.executable, "-m", module, *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(_own_path())},
        stdout=subprocess.PIPE if is_echoed else None,
        stderr=subprocess.STDOUT if is_echoed else None,
    )
    try:
        if job.stdout is not None:
            _echo(cast(io.BufferedReader, job.stdout))
        return job.wait()
    except BaseException:  # such as Ctrl-C
        _end(job)
        raise
    finally:
        if job.stdout is not None:
            job.stdout.close()


def _echo(stream: io.BufferedReader) -> None:
    """Prints what comes from a stream; keeps carriage returns (progress bars)."""
    decoder = codecs.getincrementaldecoder(locale.getencoding())("replace")
    while data := stream.read1():
        print(decoder.decode(data), end="", flush=True)


def _end(job: subprocess.Popen[bytes]) -> None:
    """Ends a launcher, which first lets its ranks save (`--signal-grace-s`).

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed once more; the ranks have no more time.
    """
    job.terminate()
    try:
        job.communicate()  # it may print much while its ranks end
    except BaseException:
        job.terminate()  # the second signal ends the job at once
        job.communicate()
        raise


def _reason(folder: Path, code: int) -> str:
    failure = function_files.first_failure(folder)
    if failure is None:
        return (
            f"tfdist.run: the ranks ended with exit code {code}, and the function has "
            "raised no exception; see the report of the first failure above."
        )
    return f"tfdist.run: the function failed on rank {failure.rank}:\n{failure.text}"


def _place() -> tuple[int, int]:
    """Returns the rank of this process and the number of ranks, set by tfdistrun."""
    return int(os.environ["TFDIST_RANK"]), int(os.environ["TFDIST_SIZE"])


def _own_path() -> list[str]:
    """Returns the folders of `sys.path`, without those of the Python installation."""
    kinds = ("stdlib", "platstdlib", "purelib", "platlib")
    python = [Path(sysconfig.get_path(kind)) for kind in kinds]
    version = f"{sys.version_info.major}{sys.version_info.minor}"
    python.append(python[0].with_name(f"python{version}.zip"))
    # Imports ignore entries that are not strings.
    found = [one or os.getcwd() for one in sys.path if isinstance(one, str)]
    return [
        one for one in found if not any(Path(one).is_relative_to(own) for own in python)
    ]


if __name__ == "__main__":
    function_files.call(Path(sys.argv[1]), _place)
