"""What tfdistrun shows and keeps of what its ranks print."""

import os
import pty
import re
import subprocess

import pytest
from helpers.deadline import deadline
from helpers.launcher import (
    TFDISTRUN,
    clean_environment,
    marked,
    python,
    run,
    shell,
    start,
)

pytestmark = pytest.mark.faults


@deadline(40)
def test_ranks_know_their_place_and_output_is_merged_by_line(tmp_path):
    script = "echo out $TFDIST_RANK/$TFDIST_SIZE $TFDIST_LOCAL_RANK/$TFDIST_LOCAL_SIZE"
    script += " $TFDIST_CROSS_RANK/$TFDIST_CROSS_SIZE; echo err >&2; printf unfinished"
    done = run(tmp_path, "-np", "3", *shell(script))
    assert done.code == 0
    lines = sorted(done.stdout.splitlines())
    expected = [f"[rank {r}] out {r}/3 {r}/3 0/1" for r in range(3)]
    expected += [f"[rank {r}] unfinished" for r in range(3)]
    assert lines == sorted(expected)
    assert done.report == []
    errors = [line for line in done.stderr.splitlines() if "[rank" in line]
    assert sorted(errors) == [f"[rank {r}] err" for r in range(3)]


@deadline(40)
def test_each_rank_has_a_log_file_with_its_exact_bytes(tmp_path):
    run(tmp_path, "-np", "2", *shell("printf 'a\\rb\\n'; printf e >&2"))
    (folder,) = (tmp_path / "tfdist-logs").iterdir()
    assert re.fullmatch(r"\d{8}-\d{6}-\d+", folder.name)
    assert sorted(path.name for path in folder.iterdir()) == [
        "rank-0.log",
        "rank-1.log",
    ]
    assert sorted((folder / "rank-1.log").read_bytes()) == sorted(b"a\rb\ne")


@deadline(40)
@pytest.mark.parametrize("how", ["option", "variable"])
def test_the_log_folder_can_be_chosen(tmp_path, how):
    chosen = str(tmp_path / "here" / "deep")
    if how == "option":
        run(tmp_path, "-np", "1", "--log-dir", chosen, "true")
    else:
        run(tmp_path, "-np", "1", "true", TFDIST_LOG_DIR=chosen)
    assert os.listdir(chosen) == ["rank-0.log"]


@deadline(40)
def test_a_lone_rank_writes_as_if_started_by_hand(tmp_path):
    done = run(tmp_path, "-np", "1", *shell("printf '1%%\\r2%%\\r3%%\\nend'"))
    assert done.stdout == "1%\n2%\n3%\nend"  # reading as text turns \r into \n


@deadline(40)
def test_a_rewritten_line_appears_once_in_a_file(tmp_path):
    done = run(tmp_path, "-np", "2", *shell("printf '1%%\\r2%%\\r100%%\\n'"))
    assert sorted(done.stdout.splitlines()) == ["[rank 0] 100%", "[rank 1] 100%"]


@deadline(40)
def test_a_line_that_is_rewritten_for_long_appears_once_in_a_file(tmp_path):
    code = (
        "import sys\n"
        "for i in range(3000): sys.stdout.write(f'{i:05d} ' + 'é' * 50 + '\\r')\n"
        "sys.stdout.write('\\n')\n"
    )
    done = run(tmp_path, "-np", "2", *python(code), PYTHONUTF8="1")
    last = "02999 " + "é" * 50
    assert sorted(done.stdout.splitlines()) == [f"[rank {r}] {last}" for r in range(2)]


@deadline(40)
def test_a_very_long_line_is_not_cut_inside_a_character(tmp_path):
    code = "print('x' + 'é' * 50000 + '€' * 50000)"
    done = run(tmp_path, "-np", "2", *python(code), PYTHONUTF8="1")
    lines = [x.partition("[rank 0] ")[2] for x in done.stdout.splitlines()]
    assert "".join(lines) == "x" + "é" * 50000 + "€" * 50000


@deadline(40)
def test_timestamps(tmp_path):
    done = run(tmp_path, "-np", "2", "--timestamps", *shell("echo x"))
    lines = sorted(done.stdout.splitlines())
    assert len(lines) == 2
    for rank, line in enumerate(lines):
        assert re.fullmatch(rf"\[rank {rank} \d\d:\d\d:\d\d\.\d{{3}}\] x", line)


@deadline(40)
def test_a_lone_rank_gets_its_timestamps_too(tmp_path):
    done = run(tmp_path, "-np", "1", "--timestamps", *shell("echo x; echo y"))
    stamp = r"\[rank 0 \d\d:\d\d:\d\d\.\d{3}\]"
    assert re.fullmatch(rf"{stamp} x\n{stamp} y\n", done.stdout)


@deadline(40)
def test_on_a_terminal_rank_0_has_one_and_its_bar_stays_at_the_bottom(tmp_path):
    code = (
        "import os, sys, time\n"
        "sys.stdout.write(f'tty {sys.stdout.isatty()}\\n')\n"  # whole
        "if os.environ['TFDIST_RANK'] == '1':\n"
        "    time.sleep(0.5); print('one'); sys.exit()\n"
        "print('\\rbar 1', end='', flush=True); time.sleep(2)\n"
        "print('\\rbar 2', end='', flush=True); print()\n"
    )
    ours, theirs = pty.openpty()
    process = start_on(theirs, tmp_path, "-np", "2", *python(code))
    os.close(theirs)
    text = read_terminal(ours)
    assert process.wait(10) == 0
    plain = re.sub(r"\x1b\[\d+m", "", text)
    assert "[rank 0] tty True" in plain
    assert "[rank 1] tty False" in plain
    # Rank 1's line goes above the bar, which is drawn again.
    assert "\r\x1b[K[rank 1] one\r\n[rank 0] bar 1" in plain
    assert plain.endswith("\r\x1b[K[rank 0] bar 2\r\n")


def start_on(terminal, cwd, *arguments, stderr=subprocess.DEVNULL, **environ):
    return subprocess.Popen(
        [*TFDISTRUN, *arguments],
        cwd=cwd,
        env=clean_environment(TERM="xterm", **environ),
        stdin=subprocess.DEVNULL,
        stdout=terminal,
        stderr=stderr,
    )


def read_terminal(fd):
    data = b""
    while True:
        try:
            part = os.read(fd, 4096)
        except OSError:  # EIO: nobody holds the other end
            os.close(fd)
            return data.decode()
        data += part


@deadline(40)
def test_colours_go_to_terminals_alone(tmp_path):
    ours, theirs = pty.openpty()
    with (tmp_path / "errors").open("wb") as errors:
        process = start_on(
            theirs,
            tmp_path,
            "-np",
            "2",
            *shell("echo out; echo err >&2"),
            stderr=errors,
        )
    os.close(theirs)
    assert "\x1b[36m[rank 0]\x1b[0m out" in read_terminal(ours)
    assert process.wait(10) == 0
    said = sorted((tmp_path / "errors").read_text().splitlines())
    assert said == ["[rank 0] err", "[rank 1] err"]


@deadline(40)
def test_a_terminal_has_no_more_than_it_can(tmp_path):
    ours, theirs = pty.openpty()
    code = "import os, sys; print('has', *os.get_terminal_size(1))"
    process = start_on(
        theirs, tmp_path, "-np", "1", *python(code), COLUMNS="100000", LINES="70000"
    )
    os.close(theirs)
    assert "has 65535 65535" in read_terminal(ours)
    assert process.wait(10) == 0


# In `make test` with a slow reader: test_launch_blocked_output.py.
@pytest.mark.slow
@deadline(40)
def test_much_output_of_all_ranks_arrives_whole(tmp_path):
    code = "import os\nfor i in range(20000): print(os.environ['TFDIST_RANK'], i)"
    done = run(tmp_path, "-np", "3", *python(code))
    lines = done.stdout.splitlines()
    for rank in range(3):
        mine = [x for x in lines if x.startswith(f"[rank {rank}]")]
        assert mine == [f"[rank {rank}] {rank} {i}" for i in range(20000)]
    assert len(lines) == 60000


@deadline(40)
def test_a_reader_that_leaves_ends_the_job(tmp_path, marker):
    process = start(
        tmp_path, "-np", "2", *shell("while :; do echo x; sleep 0.05; done"), M=marker
    )
    process.stdout.readline()
    process.stdout.close()
    process.stdout = None
    assert process.wait(10) != 0
    process.stderr.close()
    assert marked(marker) == []
