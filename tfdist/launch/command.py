"""Checks whether a command can run without standard input, which ranks do not have."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

_STDIN = ("-", "/dev/stdin", "/proc/self/fd/0", "/dev/fd/0")
_WRAPPERS = (
    *("env", "nice", "ionice", "nohup", "time", "stdbuf", "setsid", "chrt"),
    *("numactl", "taskset", "timeout", "exec"),
)
_PYTHON = re.compile(r"(python|pypy)[0-9.]*t?")
_SHELL = re.compile(r"(ba|da|z|k|mk|a)?sh")
# Letters of options that run something other than a script file, or nothing; and of
# options that take a value.
_PYTHON_OTHERS, _PYTHON_VALUES = "cmhV?", "WX"
_SHELL_OTHERS, _SHELL_VALUES = "c", "oO"
_LONG_OTHERS = ("--help", "--help-all", "--help-env", "--help-xoptions", "--version")
_LONG_VALUES = ("--check-hash-based-pycs", "--rcfile", "--init-file")


def program_from_stdin(command: Sequence[str]) -> str | None:
    """Returns the interpreter that would read its program from standard input.

    Args:
        command: program and arguments; programs such as `env` and `numactl` may come
            before the interpreter.

    Returns:
        The word of `command` that names the interpreter; None if there is none.

    Example:
        >>> from tfdist.launch.command import program_from_stdin
        >>> program_from_stdin(["python", "-u", "-"])
        'python'
        >>> program_from_stdin(["python", "-u", "train.py"]) is None
        True
    """
    for index, word in enumerate(command):
        name = "" if "=" in word else os.path.basename(word)
        rest = command[index + 1 :]
        if _PYTHON.fullmatch(name):
            found = _is_without_program(rest, _PYTHON_OTHERS, _PYTHON_VALUES)
            return word if found else None
        if _SHELL.fullmatch(name):
            found = _is_without_program(rest, _SHELL_OTHERS, _SHELL_VALUES, "s")
            return word if found else None
        if index == 0 and name not in _WRAPPERS:
            return None
    return None


def _is_without_program(
    words: Sequence[str], others: str, values: str, stdin: str = ""
) -> bool:
    """Returns whether an interpreter with these arguments reads its program from stdin.

    Args:
        words: the arguments.
        others: letters of options that run something other than a script file.
        values: letters of options whose value is the rest of the word or the next word.
        stdin: letters of options that make the interpreter read standard input,
            whatever words follow.
    """
    left = list(words)
    while left:
        word = left.pop(0)
        if word in _STDIN:
            return True
        if word == "--":
            return not left or left[0] in _STDIN
        if word in _LONG_OTHERS or word[:1] not in ("-", "+"):
            return False
        if word.startswith("--"):
            del left[: word in _LONG_VALUES]
            continue
        for place, letter in enumerate(word[1:], 1):
            if letter in others:
                return False
            if letter in stdin:
                return True
            if letter in values:
                del left[: place + 1 == len(word)]
                break
    return True
