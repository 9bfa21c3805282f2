"""The command line of tfdistrun, and what it checks before anything starts."""

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.deadline import deadline
from helpers.hosts import plain_hosts
from helpers.launcher import clean_environment, finish, python, run, shell, start

from tfdist.launch import cli

pytestmark = pytest.mark.faults


@deadline(60)
@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ([], 2, "-np"),
        (["-np", "0", "true"], 2, "from 1 to 4096"),
        (["-np", "2"], 2, "COMMAND is missing"),
        (["-np", "2", "--env", "NOT_SET", "true"], 2, "NOT_SET=VALUE"),
        (["-np", "2", "-x", "=x", "true"], 2, "expected NAME=VALUE"),
        (["-np", "2", "python3", "-"], 2, "reads its program from standard input"),
        (["-np", "2", "sh"], 2, "Write the program to a file: `sh FILE`"),
        (["-np", "2", "nosuchprogram"], 127, "command not found"),
        (["-np", "3", "-H", "a:1,b:1", "true"], 2, "-np 3, but the hosts have 2 slots"),
        (["-np", "2", "-H", "a:x", "true"], 2, "number of slots from 1 to"),
        (["-np", "2", "-H-oProxyCommand=x", "true"], 2, "not the name"),
        (["-np", "2", "--hostfile", "none", "true"], 2, "none: No such file"),
        (
            ["-np", "2", "-H", "a", "--hostfile", "h", "true"],
            2,
            "-H or --hostfile, not both",
        ),
        (["-np", "2", "--ssh-command", "'", "true"], 2, "No closing quotation"),
        (["-np", "2", "--signal-grace-s", "-1", "true"], 2, "seconds from 0 to 3600"),
        (["-np", "2", "--ssh-port", "22", "true"], 2, "--ssh-command 'ssh -p PORT"),
        (["-np", "2", "--node-rank", "1", "true"], 2, "only with --nnodes N"),
        (["-np", "3", "--nnodes", "2", "true"], 2, "a multiple of --nnodes 2"),
        (["-np", "2", "--nnodes", "2", "-H", "a", "true"], 2, "exclude each other"),
        (["-np", "2", "--nnodes", "2", "true"], 2, "--node-rank is missing"),
        (
            ["-np", "2", "--nnodes", "2", "--node-rank", "2", "true"],
            2,
            "it must be from 0 to 1",
        ),
        (
            ["-np", "2", "--nnodes", "2", "--node-rank", "0", "true"],
            2,
            "--rdzv HOST:PORT is missing",
        ),
        (["-np", "2", "--rdzv-endpoint", "a:1", "true"], 2, "--rdzv HOST:PORT"),
        (["--nproc_per_node", "2", "true"], 2, "-np N"),
        (["-np", "2", "-genv", "A", "1", "true"], 2, "use -x NAME=VALUE"),
        (["-np", "2", "--map-by", "slot", "true"], 2, "which tfdistrun does not need"),
        (["-np", "2", "--max-num-proc", "4", "true"], 2, "write --max-np N"),
        (["-np", "2", "--reset-limit", "3", "true"], 2, "--max-restarts N"),
        (
            ["-np", "2", "--slots-per-host", "2", "true"],
            2,
            "prints the slots of",
        ),
        (
            ["-np", "2", "--min-np", "1", "--host-discovery-script", "f", "true"],
            2,
            "f: no such file; expected an executable file",
        ),
        (["-np", "2", "--elastic-timeout", "9", "true"], 2, "omit it"),
        (["-np", "2", "--bind-to", "l3cache", "true"], 2, "choose from"),
        (["-np", "4096", "--bind-to", "core", "true"], 2, "one rank for each core"),
        (["-np", "2", "--bogus", "true"], 2, "--bogus"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_wrong_use_is_refused_before_anything_starts(
    tmp_path, monkeypatch, capsys, arguments, code, says
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == code
    assert says in capsys.readouterr().err
    assert not (tmp_path / "tfdist-logs").exists()


@deadline(40)
def test_a_folder_that_takes_no_output_is_named_before_anything_starts(tmp_path):
    (tmp_path / "file").touch()
    for folder in ("file", "/proc/logs"):
        done = run(tmp_path, "-np", "1", "--log-dir", folder, *shell("echo ran"))
        assert done.code == 2
        assert "the folder for the output of the ranks cannot be used" in done.stderr
        assert f"{folder!r}; choose another with --log-dir" in done.stderr
        assert done.stdout == ""


@deadline(40)
def test_a_folder_that_another_job_writes_to_is_not_shared(tmp_path):
    words = ["-np", "1", "--log-dir", "logs"]
    script = "echo first; while [ ! -e end ]; do sleep 0.05; done"
    first = start(tmp_path, *words, *shell(script))
    assert first.stdout.readline() == "first\n"
    second = run(tmp_path, *words, *shell("echo second"))
    (tmp_path / "end").touch()
    assert finish(first).code == 0
    assert second.code == 2
    says = "another running tfdistrun writes its output to logs; choose another"
    assert says in second.stderr
    assert (tmp_path / "logs/rank-0.log").read_text() == "first\n"
    assert run(tmp_path, *words, *shell("echo third")).code == 0  # it is free again


@deadline(40)
def test_a_working_folder_that_was_deleted_is_named(tmp_path):
    gone = tmp_path / "gone"
    (tmp_path / "init.py").write_text("from tfdist.core import world; world.start()")
    for words in ("-m tfdist.launch -np 1 true", "-c 'import init'"):
        gone.mkdir(exist_ok=True)
        # Python itself does not start with a relative folder in PYTHONPATH.
        paths = f"{Path(cli.__file__).parents[2]}:{tmp_path}"
        script = f"rmdir {gone}; PYTHONPATH={paths} exec {sys.executable} -P {words}"
        done = in_shell(gone, script)
        assert done.returncode != 0
        assert f"the working folder {gone} was deleted while" in done.stderr


@deadline(40)
def test_a_script_without_its_interpreter_gets_the_right_advice(tmp_path):
    (tmp_path / "train.py").write_text("")
    done = run(tmp_path, "-np", "2", "./train.py")
    assert done.code == 127
    assert "did you mean `python ./train.py`?" in done.stderr


@deadline(40)
def test_inside_a_rank_of_another_job_it_refuses(tmp_path):
    done = run(tmp_path, "-np", "2", "true", PMI_RANK="1", PMI_SIZE="2")
    assert done.code == 2
    assert "already rank 1 of 2 (PMI_RANK=1 and PMI_SIZE=2)" in done.stderr


@deadline(60)
def test_it_starts_one_job_on_the_hosts_that_a_platform_describes(tmp_path):
    """Not one on each, where the platform starts the same command."""
    names = ["algo-1", "algo-2"]
    first = {"SM_HOSTS": json.dumps(names), "SM_CURRENT_HOST": "algo-1"}
    show = "from tfdist.core import runtime, world; world.start(); "
    show += "print(runtime.size())"
    with plain_hosts(tmp_path, *names) as hosts:
        over = ["-np", "2", *hosts.slots(1, 1), *hosts.ssh, *python(show)]
        done = run(tmp_path, *over, **first)
        assert done.code == 0, done.stderr
        assert len(re.findall(r"\] 2\n", done.stdout)) == 2
        second = run(tmp_path, *over, **{**first, "SM_CURRENT_HOST": "algo-2"})
        alone = run(tmp_path, "-np", "2", *python(show), **first)
    for number, done in ((1, second), (0, alone)):
        assert done.code == 2
        assert f"started this on host {number} of 2 (SM_CURRENT_HOST=" in done.stderr
        assert "with all hosts in -H" in done.stderr


USES_MEMORY = "memory = b'1' * (300 << 20)"
ALONE = "2 processes ended without calling tfdist.init(): each ran independently"


@deadline(40)
def test_processes_that_train_alone_are_told_of(tmp_path):
    """A command that uses as much memory as TensorFlow counts as a training."""
    done = run(tmp_path, "-np", "2", *python(USES_MEMORY))
    assert done.code == 0 and ALONE in done.stderr


CALLS = f"{USES_MEMORY}; from tfdist.core import world; world.start()"
FAILS = f"{USES_MEMORY}; raise SystemExit(1)"


@deadline(60)
@pytest.mark.parametrize(
    "words",
    [
        ["-np", "2", *python(CALLS)],
        pytest.param(["-np", "1", *python(USES_MEMORY)], marks=pytest.mark.slow),
        ["-np", "2", "hostname"],
        pytest.param(["-np", "2", *python(FAILS)], marks=pytest.mark.slow),
    ],
    ids=["called", "one rank", "another program", "failed"],
)
def test_no_word_about_init_where_it_was_called_or_nothing_was_trained(tmp_path, words):
    assert "without calling" not in run(tmp_path, *words).stderr


@deadline(40)
def test_options_for_other_hosts_are_told_of_where_there_are_none(tmp_path):
    done = run(tmp_path, "-np", "1", "--ssh-command", "ssh", "true")
    assert done.code == 0
    assert "warning: no effect, as all ranks run here: --ssh-command" in done.stderr


@deadline(40)
def test_help_and_version(tmp_path):
    import tfdist

    assert run(tmp_path, "--version").stdout == f"tfdist {tfdist.__version__}\n"
    text = run(tmp_path, "--help").stdout
    assert "tfdistrun -np N" in text and "--log-dir" in text and "-H " in text


@deadline(40)
def test_variables_are_passed(tmp_path):
    given = ["--env", "A=b=c", "-x", "B=", "-x", "C"]
    done = run(tmp_path, "-np", "1", *given, *shell("echo $A-$B-$C"), C="here")
    assert done.stdout == "b=c--here\n"


@deadline(40)
@pytest.mark.parametrize("options", [[], ["--horovod"]])
def test_the_command_is_looked_for_where_the_ranks_will(tmp_path, options):
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "only-there.py").write_text("#!/bin/sh\necho found\n")
    (tools / "only-there.py").chmod(0o755)
    path = f"PATH={tools}:{os.environ['PATH']}"
    done = run(tmp_path, "-np", "1", *options, "-x", path, "only-there.py")
    assert (done.code, done.stdout) == (0, "found\n"), done.stderr


@deadline(40)
def test_too_low_a_limit_of_open_files_is_an_error_or_raised(tmp_path):
    limited = "ulimit -S -n 100; exec "
    command = " ".join([sys.executable, "-m", "tfdist.launch", "-np", "2"])
    done = in_shell(tmp_path, f"{limited}{command} sh -c 'ulimit -n'")
    assert [int(line.split()[-1]) for line in done.stdout.splitlines()] == [520, 520]
    done = in_shell(tmp_path, f"ulimit -n 100; exec {command} true")
    assert done.returncode == 2
    assert (
        "2 ranks need up to 260 open files per process, but the limit is 100"
        in done.stderr
    )


@deadline(40)
def test_a_stack_that_is_too_small_is_an_error(tmp_path):
    command = f"{sys.executable} -m tfdist.launch -np 2 true"
    done = in_shell(tmp_path, f"ulimit -s 512; exec {command}")
    assert done.returncode == 2
    assert "the stack is limited to 512 KiB" in done.stderr


def in_shell(cwd, script):
    return subprocess.run(
        ["sh", "-c", script],
        cwd=cwd,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=20,
    )


def test_a_host_of_a_large_world_needs_files_for_its_own_ranks_only(monkeypatch):
    from tfdist.launch import preflight

    def limit(kind, need, wish):
        return 4096 if kind == resource.RLIMIT_NOFILE else need

    monkeypatch.setattr(preflight, "raised_limit", limit)
    assert preflight.check(8, shm_bytes=0, world=1024, served=8).errors == []
    (error,) = preflight.check(8, shm_bytes=0, world=1024).errors
    assert (
        "1024 ranks need up to 6208 open files per process, but the limit is 4096"
        in error
    )


def test_shared_memory_that_is_not_there_is_an_error(monkeypatch):
    from tfdist.launch import preflight

    monkeypatch.setattr(preflight, "available_memory", lambda: 100 << 20)
    assert preflight.check(4, shm_bytes=16 << 20).errors == []
    (error,) = preflight.check(4, shm_bytes=17 << 20).errors
    assert "4 ranks need 102 MiB of shared memory, but only 100 MiB" in error
    assert preflight.check(4, shm_bytes=0).errors == []


def test_files_that_were_read_take_no_memory_from_a_control_group(tmp_path):
    from tfdist.launch import preflight

    (tmp_path / "memory.current").write_text("9000\n")
    stat = "anon 500\nfile 8000\ninactive_file 6000\nactive_file 2000\n"
    (tmp_path / "memory.stat").write_text(stat)
    assert preflight._used(tmp_path) == 1000
