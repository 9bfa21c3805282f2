"""A run's folder and its configuration: flags, a YAML file, name=value arguments.

Later sources take precedence over earlier ones: the defaults of the flags, the run that
is resumed, the YAML file of `--config`, then `--name=value` and `name=value` on the
command line. The result is saved as config.yaml in the run's folder, and can be passed
to `--config` again.
"""

import contextlib
import difflib
import glob
import os
import secrets
import time
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from absl import flags

import tfdist

CONFIG = "config.yaml"
CHECKPOINTS = "checkpoints"
STEPS = "step-*.keras"
LATEST = "latest"
LOG = "log.csv"
PICTURES = "pictures.yaml"
ABANDONED_S = 3600.0  # age of a partial file that is considered abandoned


def configuration(
    values: flags.FlagValues,
    names: Iterable[str],
    words: Iterable[str],
    *files: str | os.PathLike[str],
) -> dict[str, Any]:
    """Sets flags from files and command-line arguments, and returns them all.

    Args:
        values: the flags, as parsed from the command line.
        names: names of the flags that belong to the configuration.
        words: the other arguments of the command line: "name=value".
        *files: YAML files; later files take precedence.

    Returns:
        The value of each name.

    Raises:
        ValueError: a name is unknown, a value has a wrong type, or a name is given as a
            flag and as name=value; the message states where.
        FileNotFoundError: a file does not exist.
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
    """Returns the content of a YAML file with names and values.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is not YAML, or does not contain names and values.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(
            f"Expected the configuration {path}, found none. --resume expects the "
            "folder of a run, --config a YAML file."
        )
    text = Path(path).read_text(encoding="utf-8")
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {error}") from None
    if not isinstance(content, Mapping):
        raise ValueError(
            f"Expected lines `name: value` in {path}, got {type(content).__name__}."
        )
    return {str(name): value for name, value in content.items()}


def check_same(
    config: Mapping[str, Any], before: Mapping[str, Any], fixed: Iterable[str]
) -> None:
    """Raises if a run is resumed with incompatible settings.

    Args:
        config: the new configuration.
        before: the configuration at the start of the run.
        fixed: names of settings that must not change.

    Raises:
        ValueError: one of these settings has changed.
    """
    for name in fixed:
        if name in before and config[name] != before[name]:
            raise ValueError(
                f"The run began with {name}={before[name]!r}, and cannot continue with "
                f"{name}={config[name]!r}. Omit it, or begin a new run."
            )


def check_pictures(path: Path, count: int) -> None:
    """Raises if a run is resumed with a different number of training pictures.

    The number of steps in an epoch would change too.

    Args:
        path: the run's folder. If it has no record of the number, no error is raised.
        count: number of training pictures.

    Raises:
        ValueError: the run began with a different number.
    """
    if not (path / PICTURES).is_file():
        return
    before = read(path / PICTURES)["train"]
    if count != before:
        raise ValueError(
            f"The run began with {before} training pictures, and cannot continue "
            f"with {count}. Give it the same data again, or begin a new run."
        )


def new(folder: str | os.PathLike[str], name: str) -> Path:
    """Creates the folder of a new run, `folder`/`name`-<time>, and the link `latest`.

    Raises:
        OSError: the folder cannot be created; the message names it.
        ValueError: `folder` is the address of a remote file system.
    """
    if "://" in os.fspath(folder):
        raise ValueError(
            f"Expected --output_dir to be a local folder, got {folder}. Mount it, or "
            "copy the run when it has ended."
        )
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for attempt in range(100):
        path = Path(folder, stem + (f"-{attempt}" if attempt else ""))
        try:
            path.mkdir(parents=True)
        except FileExistsError:  # from a run in the same second
            continue
        except OSError as error:
            raise OSError(
                f"Could not create {path}: {error.strerror}. Set --output_dir to a "
                "writable folder."
            ) from None
        break
    else:
        raise FileExistsError(f"Could not create a new folder like {path}.")
    link = path.parent / f".{LATEST}-{os.getpid()}"
    link.symlink_to(path.name, target_is_directory=True)
    link.replace(path.parent / LATEST)
    return path


def save(path: Path, content: Mapping[str, Any], name: str = CONFIG) -> None:
    """Writes names and values atomically to a YAML file in a run's folder."""
    _write(path / name, yaml.safe_dump(dict(content)))


def _write(file: Path, text: str) -> None:
    """Replaces a file atomically, through a partial file with a unique name."""
    partial = file.with_name(f".partial-{secrets.token_hex(4)}-{file.name}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(file)


def checkpoints(path: Path) -> list[Path]:
    """Returns the checkpoints in a run's folder by step; omits truncated files."""
    found = sorted((path / CHECKPOINTS).glob(STEPS), key=steps_of)
    return [file for file in found if zipfile.is_zipfile(file)]


def last_checkpoint(path: Path) -> Path:
    """Returns the newest undamaged checkpoint, by step, in a run's folder.

    Damaged checkpoints are skipped, and the reason is logged.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: all checkpoints are damaged.
    """
    folder = glob.escape(os.fspath(path / CHECKPOINTS))
    try:
        return tfdist.newest_checkpoint(os.path.join(folder, STEPS))
    except FileNotFoundError:
        raise FileNotFoundError(
            f"Expected checkpoints {STEPS} in {path / CHECKPOINTS}, found none. Pass "
            "the folder of a run that has saved a checkpoint, or the link `latest`."
        ) from None


def as_template(path: Path) -> str:
    """Escapes the braces of a path, for code that replaces `{names}` in it."""
    return str(path).replace("{", "{{").replace("}", "}}")


def steps_of(checkpoint: Path) -> int:
    """Returns the number of completed steps of a checkpoint, from its name."""
    return int(checkpoint.stem.removeprefix("step-"))


def remove_old_checkpoints(
    path: Path, keep: int, ends_epoch: Callable[[int], bool]
) -> None:
    """Removes all but the newest checkpoints, also those from before a resume.

    Args:
        path: the run's folder.
        keep: number of checkpoints from the ends of epochs to keep. At most as many
            other checkpoints are kept, and only if they are newer than the oldest of
            these.
        ends_epoch: function that returns whether an epoch ends after a number of steps.
    """
    ends, others = [], []
    for file in checkpoints(path):
        (ends if ends_epoch(steps_of(file)) else others).append(file)
    oldest = steps_of(ends[-keep:][0]) if ends else 0
    newer = [file for file in others if steps_of(file) > oldest]
    for file in {*ends, *others} - {*ends[-keep:], *newer[-keep:]}:
        file.unlink(missing_ok=True)
        Path(f"{file}.sha256").unlink(missing_ok=True)


def set_aside_damaged(path: Path, steps: int) -> None:
    """Renames damaged checkpoints that are newer than the one a run is resumed from.

    Otherwise, they would count as the newest checkpoints, and the new ones, which have
    fewer steps, would be removed. Undamaged files may belong to a different job that
    resumes the same run.

    Args:
        path: the run's folder.
        steps: number of completed steps of the checkpoint that is resumed.
    """
    for file in (path / CHECKPOINTS).glob(STEPS):
        if steps_of(file) <= steps:
            continue
        try:
            tfdist.newest_checkpoint(glob.escape(os.fspath(file)))
        except FileNotFoundError:  # a different job has removed it
            continue
        except ValueError:  # damaged
            aside = file.with_name(f"{file.name}.damaged")
            for suffix in ("", ".sha256"):
                with contextlib.suppress(FileNotFoundError):
                    Path(f"{file}{suffix}").replace(f"{aside}{suffix}")


def tidy(path: Path, epochs: int) -> None:
    """Removes files and lines that a resumed run does not need.

    It removes partial files, left when the run was killed while saving, once they are
    an hour old: younger files may belong to a different job that resumes the same run.
    It also removes incomplete lines of the log, and lines of epochs that are repeated
    because the run is resumed from an older checkpoint.

    Args:
        path: the run's folder.
        epochs: number of completed epochs.
    """
    for file in (*path.glob(".partial-*"), *(path / CHECKPOINTS).glob(".partial-*")):
        with contextlib.suppress(FileNotFoundError):  # it was completed meanwhile
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
    """Returns whether a line of the log is complete and from the first epochs."""
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
    """Returns an argument parsed as YAML; for a text flag, the unchanged text."""
    if _is_text(flag):
        return text
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text  # the flag's parser reports what it expects


def _is_text(flag: flags.Flag) -> bool:
    return flag.flag_type() == "string"


def _set(values: flags.FlagValues, name: str, value: Any, place: str) -> None:
    """Sets a flag to a YAML value, through the flag's own parser and checks."""
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
        # A number written as text is an error in YAML, but not on a command line.
        setattr(values, name, flag.parser.parse(value if flag.boolean else str(value)))
    except (ValueError, TypeError, flags.Error) as error:
        raise ValueError(f"{name}: {value!r} in {place}: {error}") from None
