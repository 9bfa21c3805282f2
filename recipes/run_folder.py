"""The folder of a run, and its configuration: flags, a YAML file and key=value words.

What is said later and closer wins: the defaults of the flags, then the run that is
resumed, then the YAML file of `--config`, then `--name=value` and `name=value` on the
command line. The result is saved as config.yaml in the run's folder, and can be given
to `--config` again.
"""

import contextlib
import difflib
import os
import secrets
import time
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from absl import flags

CONFIG = "config.yaml"
CHECKPOINTS = "checkpoints"
LATEST = "latest"
LOG = "log.csv"
PICTURES = "pictures.yaml"
ABANDONED_S = 3600.0  # a part of a file that nobody has written to for so long


def configuration(
    values: flags.FlagValues,
    names: Iterable[str],
    words: Iterable[str],
    *files: str | os.PathLike[str],
) -> dict[str, Any]:
    """Sets flags from files and words, and returns them all.

    Args:
        values: the flags, as parsed from the command line.
        names: those that belong to the configuration.
        words: what was on the command line beside the flags: "name=value".
        *files: YAML files, the later win.

    Returns:
        The value of each name.

    Raises:
        ValueError: an unknown name, a value of a wrong type, a name that is given as a
            flag and as a word; says where.
        FileNotFoundError: there is no such file.
    """
    known = sorted(names)
    given = {name for name in known if values[name].present}
    for path in files:
        for name, value in read(path).items():
            _check_known(name, known, str(path))
            if name not in given:
                _set(values, name, value, str(path))
    for word in words:
        name, sign, value = word.partition("=")
        if not sign:
            raise ValueError(
                f"Expected name=value or --name=value, got {word!r}. See --help."
            )
        _check_known(name, known, "the command line")
        if name in given:
            raise ValueError(f"{name} is given twice: as --{name} and as {word!r}.")
        if not value:
            raise ValueError(f"Expected a value after {name}=, got none.")
        _set(values, name, _of_word(values[name], value), "the command line")
    return {name: values[name].value for name in known}


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The content of a YAML file that holds names and values.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it holds something else.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(
            f"Expected the configuration {path}, found none. --resume takes the folder "
            "of a run, --config a YAML file."
        )
    text = Path(path).read_text(encoding="utf-8")
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is no YAML: {error}") from None
    if not isinstance(content, Mapping):
        raise ValueError(
            f"Expected lines `name: value` in {path}, got {type(content).__name__}."
        )
    return {str(name): value for name, value in content.items()}


def check_same(
    config: Mapping[str, Any], before: Mapping[str, Any], fixed: Iterable[str]
) -> None:
    """Raises if a run is resumed as another one.

    Args:
        config: how it shall go on.
        before: how it began.
        fixed: what has to stay.

    Raises:
        ValueError: something of it has changed.
    """
    for name in fixed:
        if name in before and config[name] != before[name]:
            raise ValueError(
                f"The run began with {name}={before[name]!r}, and cannot go on with "
                f"{name}={config[name]!r}. Leave it out, or begin a new run."
            )


def check_pictures(path: Path, count: int) -> None:
    """Raises if a run goes on with more or fewer pictures: its steps would be others.

    Args:
        path: the run's folder. One that does not say how many it began with is fine.
        count: how many pictures there are to learn from.

    Raises:
        ValueError: it began with another number.
    """
    if not (path / PICTURES).is_file():
        return
    before = read(path / PICTURES)["train"]
    if count != before:
        raise ValueError(
            f"The run began with {before} pictures to learn from, and cannot go on "
            f"with {count}. Give it the same data again, or begin a new run."
        )


def new(folder: str | os.PathLike[str], name: str) -> Path:
    """Makes the folder of a new run, `folder`/`name`-<time>, and the link `latest`.

    Raises:
        OSError: it cannot be made; says where.
        ValueError: it is the address of a remote file system.
    """
    if "://" in os.fspath(folder):
        raise ValueError(
            f"Expected --output_dir as a folder of this machine, got {folder}. Mount "
            "it, or copy the run when it has ended."
        )
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for attempt in range(100):
        path = Path(folder, stem + (f"-{attempt}" if attempt else ""))
        try:
            path.mkdir(parents=True)
        except FileExistsError:  # another run of the same second
            continue
        except OSError as error:
            raise OSError(
                f"Could not make {path}: {error.strerror}. Name a folder that can be "
                "written with --output_dir."
            ) from None
        break
    else:
        raise FileExistsError(f"Could not make a new folder like {path}.")
    link = path.parent / f".{LATEST}-{os.getpid()}"
    link.symlink_to(path.name, target_is_directory=True)
    link.replace(path.parent / LATEST)
    return path


def save(path: Path, content: Mapping[str, Any], name: str = CONFIG) -> None:
    """Writes names and values to a YAML file in a run's folder, in one piece."""
    _write(path / name, yaml.safe_dump(dict(content)))


def _write(file: Path, text: str) -> None:
    """Replaces a file in one piece; the part has a name that no other job takes."""
    partial = file.with_name(f".partial-{secrets.token_hex(4)}-{file.name}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(file)


def checkpoints(path: Path, *, whole: bool) -> list[Path]:
    """The checkpoints in a run's folder that are whole, or those that are not, by step.

    A file that lost its end, say in a copy, is not whole.
    """
    found = sorted((path / CHECKPOINTS).glob("step-*.keras"), key=steps_of)
    return [file for file in found if zipfile.is_zipfile(file) == whole]


def last_checkpoint(path: Path) -> Path:
    """The whole checkpoint of the largest step in a run's folder.

    Raises:
        FileNotFoundError: there is none.
    """
    found = checkpoints(path, whole=True)
    if not found:
        raise FileNotFoundError(
            f"Expected checkpoints step-*.keras in {path / CHECKPOINTS}, found none "
            "that is whole. Name the folder of a run, or its `latest`, that has saved "
            "one."
        )
    return found[-1]


def as_template(path: Path) -> str:
    """A path for something that fills in `{names}`, of which it has none."""
    return str(path).replace("{", "{{").replace("}", "}}")


def steps_of(checkpoint: Path) -> int:
    """How many steps were done when it was saved, by its name."""
    return int(checkpoint.stem.removeprefix("step-"))


def remove_old_checkpoints(path: Path, keep: int, steps_per_epoch: int) -> None:
    """Removes all but the newest checkpoints, also those of an earlier run.

    Args:
        path: the run's folder.
        keep: how many to keep of those at the end of an epoch; and of the others, where
            they are newer than these.
        steps_per_epoch: number of steps of an epoch.
    """
    ends, others = [], []
    for file in checkpoints(path, whole=True):
        (others if steps_of(file) % steps_per_epoch else ends).append(file)
    oldest = steps_of(ends[-keep:][0]) if ends else 0
    newer = [file for file in others if steps_of(file) > oldest]
    for file in {*ends, *others} - {*ends[-keep:], *newer[-keep:]}:
        file.unlink(missing_ok=True)


def tidy(path: Path, epochs: int) -> None:
    """Removes what a run does not need when it goes on.

    Parts of files that were being saved
    when it was killed, once they are an hour old: younger ones may be of another job
    that goes on with the same run; and lines of the log that are torn, or of epochs
    that come again because it goes on from an older checkpoint.

    Args:
        path: the run's folder.
        epochs: how many are done.
    """
    for file in (*path.glob(".partial-*"), *(path / CHECKPOINTS).glob(".partial-*")):
        with contextlib.suppress(FileNotFoundError):  # it is whole meanwhile
            if time.time() - file.stat().st_mtime > ABANDONED_S:
                file.unlink()
    log = path / LOG
    if not log.exists():
        return
    lines = log.read_text(encoding="utf-8").splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("\n")]
    kept = whole[:1] + [row for row in whole[1:] if _is_of(row, whole[0], epochs)]
    if kept != lines:
        _write(log, "".join(kept))


def _is_of(row: str, head: str, epochs: int) -> bool:
    """Whether a line of the log lacks nothing, and is of one of the first epochs."""
    number = row.partition(",")[0]
    return (
        row.count(",") >= head.count(",")
        and number.isdecimal()
        and int(number) < epochs
    )


def _check_known(name: str, known: list[str], place: str) -> None:
    if name in known:
        return
    close = difflib.get_close_matches(name, known, 1)
    hint = f" Did you mean {close[0]}?" if close else ""
    raise ValueError(f"Unknown name {name!r} in {place}.{hint} See --help.")


def _of_word(flag: flags.Flag, text: str) -> Any:
    """Returns a word parsed as YAML; for a text flag, the word as it is written."""
    if _is_text(flag):
        return text
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text  # the flag's parser says what it expects


def _is_text(flag: flags.Flag) -> bool:
    return flag.flag_type() == "string"


def _set(values: flags.FlagValues, name: str, value: Any, place: str) -> None:
    """Gives a flag a value of YAML, through the flag's own parser and checks."""
    flag = values[name]
    if value is None and flag.default is None:
        flag.value = None
        return
    if value is None:
        raise ValueError(f"{name}: expected a value, got none in {place}.")
    if _is_text(flag) and not isinstance(value, str):
        raise ValueError(
            f"{name}: expected text, got {value!r} in {place}. Write it in quotes."
        )
    try:
        # A number written as text is a mistake in YAML, and fine on a command line.
        setattr(values, name, flag.parser.parse(value if flag.boolean else str(value)))
    except (ValueError, TypeError, flags.Error) as error:
        raise ValueError(f"{name}: {value!r} in {place}: {error}") from None
