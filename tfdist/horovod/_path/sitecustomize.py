"""Python runs this file before a program that `tfdistrun --horovod` starts.

Its folder is on PYTHONPATH. The user's own `sitecustomize` is run first. This file must
also work in old versions of Python, and without tfdist, because the program may start
any Python interpreter.
"""

import os
import sys

_FOLDER = os.path.dirname(os.path.abspath(__file__))


class _Missing:
    """Raises ImportError for `import horovod` if tfdist cannot be imported."""

    def __init__(self, cause: Exception) -> None:
        self._cause = cause

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] != "horovod":
            return None
        raise ImportError(
            "tfdistrun --horovod: tfdist cannot be imported by "
            + sys.executable
            + " ("
            + repr(self._cause)
            + "). Start the program with the Python in which tfdist is installed."
        ) from self._cause


def _run_the_users() -> None:
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    sys.path[:] = [p for p in sys.path if os.path.abspath(p) != _FOLDER]
    spec = PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def _start() -> None:
    try:
        from tfdist.horovod._start import start
    except (ImportError, SyntaxError) as error:
        sys.meta_path.insert(0, _Missing(error))
        return
    try:
        start()
    except Exception as error:
        # Python would print an exception raised here, and continue without Horovod.
        sys.stderr.write("tfdistrun --horovod: " + str(error) + "\n")
        sys.stderr.flush()
        os._exit(1)


if __name__ == "sitecustomize":
    try:
        _run_the_users()
    finally:  # Python prints the exception and continues
        _start()
