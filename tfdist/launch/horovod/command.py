"""The command `horovodrun`."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence

from tfdist.core import native
from tfdist.core.version import __version__
from tfdist.launch import cli
from tfdist.launch.horovod import config_file, flags, translation
from tfdist.launch.output import complain

_USAGE_ERROR = 2


def build_report(*, tensorflow: bool, core: bool) -> str:
    """Returns the report that `horovodrun --check-build` prints.

    Args:
        tensorflow: whether TensorFlow is installed.
        core: whether tfdist's libraries are built.
    """

    def rows(title: str, named: dict[str, bool]) -> list[str]:
        boxes = [
            f"    [{'X' if there else ' '}] {name}" for name, there in named.items()
        ]
        return ["", f"{title}:", *boxes]

    return "\n".join(
        [
            f"tfdist v{__version__}, instead of Horovod. Gloo stands for tfdist's own "
            "rendezvous, shared memory and TCP, as in hvd.gloo_built().",
            *rows(
                "Available Frameworks",
                {"TensorFlow": tensorflow, "PyTorch": False, "MXNet": False},
            ),
            *rows("Available Controllers", {"MPI": False, "Gloo": core}),
            *rows(
                "Available Tensor Operations",
                {
                    **dict.fromkeys(("NCCL", "DDL", "CCL", "MPI"), False),
                    "Gloo": core,
                },
            ),
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs horovodrun; returns the exit code of tfdistrun."""
    options = flags.parser().parse_args(arguments)
    if options.check_build:
        found = importlib.util.find_spec("tensorflow") is not None
        report = build_report(tensorflow=found, core=native.LIBRARY_PATH.is_file())
        sys.stdout.write(report + "\n")
        return 0
    try:
        if options.config_file is not None:
            config_file.merge(options, config_file.read(options.config_file))
        translated = translation.translate(options)
    except (config_file.ConfigFileError, translation.FlagError) as error:
        complain(str(error))
        return _USAGE_ERROR
    for note in translated.notes:
        complain(f"warning: {note}")
    return cli.main(translated.words)
