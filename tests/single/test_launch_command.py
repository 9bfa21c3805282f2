"""Commands that would read their program from standard input, which ranks lack."""

import shlex

import pytest

from tfdist.launch.command import program_from_stdin


@pytest.mark.parametrize(
    "command",
    [
        *("python", "python -", "python3.11 -u", "/usr/bin/python3 -u -", "python -i"),
        *("python -X dev -", "python -Xdev", "python -W error", "python -uW error -"),
        *("python /dev/stdin", "python --check-hash-based-pycs never", "python -- -"),
        *("sh", "bash -x", "bash -s train.py", "bash -e -o pipefail", "zsh -", "sh --"),
        *("bash --norc", "bash --rcfile profile", "bash +x"),
        *("env A=b python -", "env -i A=/bin/sh python", "numactl -N 0 python"),
        *("nice -n 5 env A=b sh", "timeout 60 python -"),
    ],
)
def test_without_a_program(command):
    assert program_from_stdin(shlex.split(command)) is not None


@pytest.mark.parametrize(
    "command",
    [
        *("python train.py", "python train.py -", "python -u train.py", "python -m x"),
        *("python -c 1", "python -uc 1", "python -Im x -", "python -V", "python -h"),
        *("python -X dev train.py", "python -Xdev -m x", "python -W error train.py"),
        *("python --version", "python --check-hash-based-pycs never train.py"),
        *("sh train.sh", "bash -c true", "bash -lc true", "bash -eo pipefail train.sh"),
        *("bash --norc train.sh", "bash --rcfile profile train.sh", "bash -- train.sh"),
        *("bash --version", "env A=b python train.py", "env A=/bin/sh hostname"),
        *("numactl -N 0 python -m x", "hostname", "cat -", "./python.sh -"),
        *("ls python", "python-config -", "sha1sum -", "dash_board", "pytest"),
    ],
)
def test_with_a_program(command):
    assert program_from_stdin(shlex.split(command)) is None


@pytest.mark.parametrize("wrapper", ["", "env A=b "])
def test_the_interpreter_is_named(wrapper):
    words = shlex.split(f"{wrapper}/opt/bin/python3 -")
    assert program_from_stdin(words) == "/opt/bin/python3"
