"""The command `tfdist`: tools for users of the library, as subcommands."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from tfdist.core.version import __version__
from tfdist.tools import timeline
from tfdist.tools.bench import command as bench
from tfdist.tools.doctor import command as doctor

_DESCRIPTION = "Tools of tfdist. For details, run `tfdist COMMAND --help`."
# Name → description, and `main`, which parses its own options.
_COMMANDS: dict[str, tuple[str, Callable[[Sequence[str]], int]]] = {
    "bench": (bench.HELP, bench.main),
    "doctor": (doctor.HELP, doctor.main),
    "timeline": (timeline.HELP, timeline.main),
}


def parser() -> argparse.ArgumentParser:
    """Returns the parser for the options of tfdist."""
    arguments = argparse.ArgumentParser(
        prog="tfdist", description=_DESCRIPTION, allow_abbrev=False
    )
    arguments.add_argument(
        "--version", action="version", version=f"tfdist {__version__}"
    )
    commands = arguments.add_subparsers(
        dest="command", required=True, metavar="COMMAND", title="commands"
    )
    for name, (description, _) in _COMMANDS.items():
        commands.add_parser(name, help=description, add_help=False)
    return arguments


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs tfdist; returns its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    name = parser().parse_args(words[:1]).command
    return _COMMANDS[name][1](words[1:])
