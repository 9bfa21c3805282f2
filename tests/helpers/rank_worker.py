"""The worker process of `helpers.ranks`: runs functions of test files as one rank."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib.util
import os
import signal
import socket
import sys
import threading
import time
import traceback
from types import ModuleType
from typing import Any

from helpers import wire

_modules: dict[str, ModuleType] = {}


def main() -> None:
    """Serves requests until the other end of the channel is closed."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    _die_with_parent()
    channel = _channel(sys.argv[1])
    channel.set_inheritable(False)
    import tfdist  # noqa: F401  a failure here is one of the start

    if sys.argv[2] == "tensorflow":
        import keras  # noqa: F401
        import tensorflow as tf

        tf.zeros([])  # starts TensorFlow's threads now
    # The 300,000 objects of the libraries live on. Every clear_session() collects and
    # would look at all of them: 0.1 s, a quarter of what a small fit takes.
    gc.collect()
    gc.freeze()
    wire.send(channel, {"ready": os.getpid()})
    while True:
        try:
            request = wire.receive(channel)
        except (EOFError, ConnectionError):
            return
        wire.send(channel, _serve(request))


def _channel(where: str) -> socket.socket:
    """The inherited socket, by its number; or a new one (`helpers.mpi_ranks`)."""
    if where.isdecimal():
        return socket.socket(fileno=int(where))
    output = os.open(f"{where}.{os.getpid()}.log", os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    channel = socket.socket(socket.AF_UNIX)
    channel.connect(where)
    library = ctypes.CDLL(os.environ["TFDIST_MPI_LIBRARY"], mode=ctypes.RTLD_GLOBAL)
    rank, size = ctypes.c_int(), ctypes.c_int()
    if library.tfdist_mpi_start(ctypes.byref(rank), ctypes.byref(size)) != 0:
        raise RuntimeError("MPI did not start")
    # The worlds of the tests may be smaller than MPI_COMM_WORLD.
    for name in list(os.environ):
        if name.startswith(("OMPI_", "PMI", "PRTE_", "HYDRA_", "MPI_")):
            del os.environ[name]
    wire.send(channel, {"rank": rank.value, "pid": os.getpid()})
    return channel


def _serve(request: dict[str, Any]) -> dict[str, Any]:
    if "clear" in request:
        return _clear()
    os.environ.update(request["environ"])
    try:
        return _answer(request)
    finally:
        for name in request["environ"]:
            os.environ.pop(name, None)


def _clear() -> dict[str, Any]:
    """Ends what an earlier call left behind.

    Mostly at once; but an iterator of tf.data that lives no more may wait for its
    thread that tunes it, which sleeps for up to a minute.
    """
    if "keras" not in sys.modules:
        return {"cleared": True}
    import keras

    # Ranks number their layers alike only if they have made equally many.
    keras.utils.clear_session()
    gc.freeze()  # what TensorFlow has kept of earlier calls, it keeps
    return {"cleared": True}


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    import tfdist
    from tfdist.core import runtime

    # Workers have been in different numbers of worlds; the ranks of one must agree.
    runtime.state.generation = request["generation"]
    try:
        if request["init"]:
            tfdist.init(timeout_s=30)
        result = _function(request["file"], request["name"])(*request["args"])
        return {"result": result}
    except Exception as error:
        failed_at = time.monotonic()
        # As in a program of its own: the hook tells the other ranks.
        sys.excepthook(type(error), error, error.__traceback__)
        return {"failed": traceback.format_exc(), "time": failed_at}
    finally:
        tfdist.shutdown()
        sys.stdout.flush()


def _function(file: str, name: str) -> Any:
    if file not in _modules:
        spec = importlib.util.spec_from_file_location(f"ranks_of_{len(_modules)}", file)
        if spec is None or spec.loader is None:
            raise ImportError(f"cannot import {file}")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        _modules[file] = module
    return getattr(_modules[file], name)


def _die_with_parent() -> None:
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    main()
