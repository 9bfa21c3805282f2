"""Command-line options of `tfdist bench`, and their checks."""

from __future__ import annotations

import argparse
import itertools
import re
from pathlib import Path

from tfdist.tools.bench import output, picture
from tfdist.tools.bench.measure import AUTO
from tfdist.tools.bench.operations import DTYPES, OPERATIONS

ALL = "all"
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_MAX_BYTES = 16 << 30
_FILES = ("json", "picture", "tune")
_DESCRIPTION = """\
Times collectives on the ranks of a job, using only the core, and prints the columns of
nccl-tests. algbw is size / time. busbw is the rate that each link must carry (for
allreduce, algbw 2(n-1)/n). limit is busbw in percent of the rate that the machine can
reach, measured in the same run (memory inside a host, network between hosts). All
results are checked exactly. time is the median over the repetitions of the time of the
slowest rank."""
_EPILOG = """\
examples:
  tfdist bench -np 2
  tfdist bench -np 4 --sizes 1K:16M --algorithms all --picture times.png
  tfdistrun -np 4 -H host1:2,host2:2 tfdist bench --tune tuning.json
  tfdistrun -np 4 -H host1:2,host2:2 -x TFDIST_TUNING_FILE=tuning.json python train.py

See docs/benchmarking.md."""


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMG]?)i?B?", text.strip(), re.IGNORECASE)
    size = int(match[1]) * _UNITS[match[2].upper()] if match else 0
    if not 1 <= size <= _MAX_BYTES:
        raise argparse.ArgumentTypeError(
            f"expected a size from 1 to 16G such as 4096, 64K or 1M, got {text!r}"
        )
    return size


def sizes(text: str) -> list[int]:
    """Parses sizes: "1K:64M" (factor 2), "1K:64M:4" (factor 4) or "1K,24K,1M"."""
    if ":" not in text:
        return sorted({_size(part) for part in text.split(",")})
    parts = text.split(":")
    factor = parts[2] if len(parts) > 2 else "2"
    if len(parts) > 3 or not factor.isdecimal() or not 2 <= int(factor) <= 1024:
        raise argparse.ArgumentTypeError(
            f"expected MIN:MAX or MIN:MAX:FACTOR, FACTOR from 2 to 1024, got {text!r}"
        )
    size, last = _size(parts[0]), _size(parts[1])
    if size > last:
        raise argparse.ArgumentTypeError(f"expected MIN <= MAX, got {text!r}")
    found = []
    while size <= last:
        found.append(size)
        size *= int(factor)
    return found


def _names(text: str, known: list[str], quantity: str) -> list[str]:
    if text == ALL:
        return known
    names = text.split(",")
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(
                f"expected {ALL} or {quantity} of {', '.join(known)}; got {name!r}"
            )
    return list(dict.fromkeys(names))


def _operations(text: str) -> list[str]:
    return _names(text, list(OPERATIONS), "some")


def _dtypes(text: str) -> list[str]:
    return _names(text, list(DTYPES), "some")


def _ranks(text: str) -> int:
    if not text.isdecimal() or not 2 <= int(text) <= 4096:
        raise argparse.ArgumentTypeError(
            f"expected a number of ranks from 2 to 4096, got {text!r}"
        )
    return int(text)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value <= 1e6:
        raise argparse.ArgumentTypeError(
            f"expected a number above 0 and at most 1000000, got {text!r}"
        )
    return value


def unwritable(options: argparse.Namespace) -> str:
    """Returns an error for output files that cannot be written; "" if there is none.

    The check runs before the measurement, on the rank that writes the files or in the
    process that starts it.
    """
    given = {f"--{name}": getattr(options, name) for name in _FILES}
    files = {name: path for name, path in given.items() if path is not None}
    for name, path in files.items():
        try:
            wrong = _wrong_with(path)
        except OSError as error:
            wrong = f"{error.strerror}; use a path that you may write to"
        if wrong:
            return f"{name}: expected a file that can be written, got {path}: {wrong}"
    for one, other in itertools.combinations(files, 2):
        if files[one].resolve() == files[other].resolve():
            return f"{other}: expected a separate file, got the file of {one}"
    return ""


def _wrong_with(path: Path) -> str:
    if not path.parent.is_dir():
        return f"the folder {path.parent} does not exist"
    if path.exists() and not path.is_file():
        what = "a folder" if path.is_dir() else "not a file"
        return f"this is {what}; use the path of a file"
    output.check_writable(path)
    return ""


def parser() -> argparse.ArgumentParser:
    """Returns the parser for the options of `tfdist bench`."""
    arguments = argparse.ArgumentParser(
        prog="tfdist bench",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    arguments.add_argument(
        "-np",
        dest="size",
        type=_ranks,
        metavar="N",
        help="start N ranks on this host; without it, this process is one rank of a "
        "job that was started by tfdistrun or mpirun",
    )
    arguments.add_argument(
        "--sizes",
        type=sizes,
        default=sizes("1K:64M"),
        metavar="MIN:MAX[:FACTOR]",
        help="sizes in bytes, with K, M and G as powers of 1024; or a list such as "
        "1K,64K (default: 1K:64M)",
    )
    arguments.add_argument(
        "--operations",
        type=_operations,
        default=["allreduce"],
        metavar="NAME,...",
        help=f"operations to measure: some of {', '.join(OPERATIONS)}, or all "
        "(default: allreduce)",
    )
    arguments.add_argument(
        "--dtypes",
        type=_dtypes,
        default=["float32"],
        metavar="NAME,...",
        help=f"element types: some of {', '.join(DTYPES)} (default: float32)",
    )
    arguments.add_argument(
        "--algorithms",
        metavar="NAME,...",
        help=f"algorithms by name (docs/algorithms.md), {AUTO} for those that training "
        f"would use, or all (default: {AUTO}; with --tune: all)",
    )
    arguments.add_argument(
        "--cap-s",
        type=_positive,
        default=0.3,
        metavar="S",
        help="approximate seconds to spend on each algorithm at each size "
        "(default: %(default)s)",
    )
    arguments.add_argument(
        "--link-rate",
        type=_positive,
        metavar="GBIT/S",
        help="rate of the network between hosts (default: measured with a ping-pong)",
    )
    arguments.add_argument(
        "--json", type=Path, metavar="FILE", help="write all results"
    )
    arguments.add_argument(
        "--picture",
        type=Path,
        metavar="FILE",
        help="plot time against size, with crossovers (needs matplotlib)",
    )
    arguments.add_argument(
        "--tune",
        type=Path,
        metavar="FILE",
        help="write the fastest algorithm for each size, for TFDIST_TUNING_FILE",
    )
    return arguments


def parse(words: list[str]) -> argparse.Namespace:
    """Returns the options after checking that they are consistent.

    Raises:
        SystemExit: an option is invalid. The exit code is 2, and the reason is printed
            to standard error.
    """
    arguments = parser()
    options = arguments.parse_args(words)
    if options.algorithms is None:
        options.algorithms = ALL if options.tune else AUTO
    names = options.algorithms.split(",")
    if len(names) > 1 and {AUTO, ALL} & set(names):
        arguments.error(
            f"--algorithms: expected {AUTO}, {ALL} or a list of names; got "
            f"{options.algorithms}"
        )
    if options.picture and not picture.is_possible():
        arguments.error(f"--picture: {picture.MISSING}")
    if options.picture and picture.kind(options.picture) not in picture.kinds():
        kinds = ", ".join(f".{kind}" for kind in picture.kinds())
        arguments.error(
            f"--picture: expected a name that ends in one of {kinds}; got "
            f"{str(options.picture)!r}"
        )
    if options.tune:
        halves = [DTYPES[name].half for name in options.dtypes]
        if len(set(halves)) < len(halves):
            arguments.error(
                "--tune: expected at most one half type (float16, bfloat16), which "
                "represents both, and one other type, which represents the rest; got "
                f"--dtypes {','.join(options.dtypes)}"
            )
        if options.algorithms == AUTO:
            arguments.error(
                "--tune: expected --algorithms all or a list of names; got auto"
            )
    return options
