"""benchmarks/peers: rounds that go on where they stopped, peers that fail or hang."""

import json
import os
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.peers import catalogue, machine, quick, report, rounds, trial
from benchmarks.peers.catalogue import Peer

TASK = {"task": "sizes", "cap_s": 0.05, "sizes": [1024]}
LEAVE = """
import json, os, sys, pathlib
task = json.loads(pathlib.Path(sys.argv[1]).read_text())
rank = int(os.environ["RANK"])
with open(task["tally"], "a") as file:
    file.write("x")
seconds = {"allreduce/1024": [0.001 * (rank + 1), 0.004 - 0.001 * rank, 0.005]}
found = {"versions": {"lib": "1"}, "seconds": seconds}
pathlib.Path(task["folder"], f"rank{rank}.json").write_text(json.dumps(found))
"""
FAIL = "import sys; print('so it is'); sys.exit(3)"
# A grandchild in a session of its own, as launchers have them.
HANG = """
import os, subprocess, sys, json, pathlib, time
task = json.loads(pathlib.Path(sys.argv[1]).read_text())
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
with open(task["tally"], "a") as file:
    file.write(f"{child.pid}\\n")
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def steady(monkeypatch):
    """A machine that is always the same, and nothing to compile."""
    rates = {"add_gb_s": [4.0, 4.0], "copy_gb_s": [5.0, 5.0]}
    monkeypatch.setattr(machine, "control", lambda processes: rates)
    monkeypatch.setattr(trial, "loops", lambda: Path("none"))


@pytest.fixture
def made(tmp_path):
    """Makes a peer from a program; the file in which it notes what it did."""

    def make(name, program):
        worker = tmp_path / f"{name}.py"
        worker.write_text(program)
        tally = tmp_path / f"{name}.tally"
        settings = {"tally": str(tally)}
        peer = Peer(name, "", "env", {"sizes": str(worker)}, settings=settings)
        return peer, tally

    return make


def test_the_slowest_rank_of_each_repetition_counts(made):
    peer, _ = made("good", LEAVE)
    outcome = trial.run(peer, 2, TASK, 30.0)
    assert outcome.seconds == {"allreduce/1024": [0.002, 0.004, 0.005]}


def test_variables_for_all_peers_reach_the_ranks(made):
    peer, _ = made("asks", "import os; exit(os.environ['TF_OF_ALL'])")
    outcome = trial.run(peer, 1, {**TASK, "environ": {"TF_OF_ALL": "here"}}, 30.0)
    assert "here" in outcome.error


def test_steps_of_a_training_are_those_of_the_mean_rate():
    ranks = [{"seconds": {"mlp/32": [1.0, 1.0, 9.0]}, "facts": {"mlp/32": {"a_s": 1}}}]
    ranks += [{"seconds": {"mlp/32": [3.0, 3.0]}, "facts": {"mlp/32": {"a_s": 2}}}]
    outcome = trial.merged("training", ranks)
    assert outcome.seconds == {"mlp/32": [1.5]}  # 1 + 1/3 steps a second
    assert outcome.facts == {"mlp/32": {"a_s": 1.5}}


def test_a_run_goes_on_where_it_stopped(made, tmp_path, capsys):
    peer, tally = made("good", LEAVE)
    out = tmp_path / "deep" / "out.jsonl"
    plan = rounds.Plan(TASK, [peer], 30.0)
    rounds.run(plan, [1, 2], 1, out)
    assert len(tally.read_text()) == 3
    rounds.run(plan, [1, 2], 2, out)
    assert len(tally.read_text()) == 6
    found = {(row["np"], row["round"]) for row in rounds.read(out)}
    assert found == {(1, 0), (2, 0), (1, 1), (2, 1)}
    other = rounds.Plan({**TASK, "cap_s": 0.1}, [peer], 30.0)
    rounds.run(other, [1], 1, out)
    assert len(tally.read_text()) == 7
    assert "round 0, 2 ranks: already in the file" in capsys.readouterr().out


def test_other_code_is_measured_anew(made, monkeypatch):
    peer, _ = made("good", LEAVE)
    plan = rounds.Plan(TASK, [peer], 30.0)
    keys = {plan.key(2), plan.key(4)}
    monkeypatch.setattr(rounds, "tree", lambda: "of another day")
    keys.add(plan.key(2))
    monkeypatch.setattr(rounds, "library", lambda: "built anew")
    keys.add(plan.key(2))
    monkeypatch.setenv("TFDIST_SEGMENT_BYTES", "65536")
    keys.add(plan.key(2))
    assert len(keys) == 5


def test_a_peer_that_fails_is_reported_and_the_others_go_on(made, tmp_path):
    bad, good = made("bad", FAIL)[0], made("good", LEAVE)[0]
    absent = Peer("absent", "", "no-such-launcher", bad.workers)
    out = tmp_path / "out.jsonl"
    rounds.run(rounds.Plan(TASK, [bad, absent, good], 30.0), [2], 1, out)
    text = report.text([out])
    assert "bad failed in round 0:\n\n    exit code 3\n" in text
    assert "    so it is" in text
    assert "absent failed in round 0:" in text
    assert "No such file or directory" in text
    assert "| good | 4 |" in text


def test_a_peer_that_hangs_is_killed_with_all_it_has_started(made):
    peer, tally = made("hung", HANG)
    begin_s = time.monotonic()
    outcome = trial.run(peer, 2, TASK, 3.0)
    assert time.monotonic() - begin_s < 12
    assert outcome.error.startswith("not within 3 s")
    pids = [int(line) for line in tally.read_text().split()]
    assert len(pids) == 2
    assert not any(psutil.pid_exists(p) and _is_alive(p) for p in pids)


def _is_alive(pid):
    return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_each_round_begins_with_another_peer():
    peers = [Peer(name, "", "env", {}) for name in "abc"]
    order = ["".join(p.name for p in rounds.turns(peers, n)) for n in range(4)]
    assert order == ["abc", "bca", "cab", "abc"]


def test_nobody_begins_when_the_time_is_over(made, tmp_path):
    peer, tally = made("good", LEAVE)
    out = tmp_path / "out.jsonl"
    plan = rounds.Plan(TASK, [peer], 30.0)
    rounds.run(plan, [1], 1, out, until_s=time.monotonic() - 1.0)
    assert not tally.exists()
    assert "No time was left for good." in report.text([out])


def test_how_each_launcher_is_called(tmp_path):
    task = tmp_path / "task.json"

    def arguments(name):
        peer = catalogue.PEERS[name]
        worker = peer.workers["sizes"]
        return trial.commands(peer, worker, 2, task, [7001, 7002])

    ((line, environ),) = arguments("tfdist-core")
    assert line[1:5] == ["-m", "tfdist.launch", "-np", "2"]
    assert environ["PYTHONPATH"].split(os.pathsep)[0] == str(machine.ROOT)
    ((line, _),) = arguments("hvd-gloo")
    assert line[0].endswith("tf215/bin/horovodrun")
    assert line[1:4] == ["--gloo", "-np", "2"]
    ((line, _),) = arguments("hvd-mpi")
    assert line[0].endswith("tf215/bin/mpirun")  # with which Horovod was built
    ((line, _),) = arguments("ompi4")
    assert line[0] == "mpirun"  # of the system
    ((line, _),) = arguments("impi")
    assert line[0].endswith("impi/bin/mpirun")
    both = arguments("tf-ring")
    assert [environ["RANK"] for _, environ in both] == ["0", "1"]
    assert {environ["PEERS_PORTS"] for _, environ in both} == {"7001,7002"}


def test_unknown_peers_are_refused_with_the_list_of_those_that_can():
    with pytest.raises(ValueError, match=r"'training'.*hvd-gloo.*got impi"):
        catalogue.chosen("tfdist,impi", "training")
    names = [peer.name for peer in catalogue.chosen("all", "sizes")]
    assert "tfdist-core" in names
    assert "alone" not in names


def test_what_is_not_built_is_left_out_with_the_way_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setattr(catalogue, "HOME", tmp_path)
    present, absent = catalogue.split(catalogue.chosen("tfdist-core,impi", "sizes"))
    assert [peer.name for peer in present] == ["tfdist-core"]
    assert absent["impi"].endswith("make peers")


def test_an_environment_without_its_launcher_is_to_be_built_anew(monkeypatch, tmp_path):
    monkeypatch.setattr(catalogue, "HOME", tmp_path)
    programs = tmp_path / "tf215" / "bin"
    programs.mkdir(parents=True)
    programs.joinpath("python").touch()
    programs.joinpath("horovodrun").touch(0o755)
    present, absent = catalogue.split(catalogue.chosen("hvd-gloo,hvd-mpi", "sizes"))
    assert [peer.name for peer in present] == ["hvd-gloo"]
    assert "has no mpirun: rm -r" in absent["hvd-mpi"]


def test_the_quick_set_asks_for_what_its_peers_can_do():
    for part in quick.parts([(3,)]):
        assert catalogue.chosen(part.peers, part.task["task"])
    assert quick.parts([(3,)])[-1].until == 1.0


def test_every_worker_that_a_peer_names_is_there():
    for peer in catalogue.PEERS.values():
        for worker in peer.workers.values():
            assert (catalogue.WORKERS / worker).is_file()


@pytest.mark.slow
def test_the_core_is_measured_by_its_own_worker(monkeypatch):
    monkeypatch.setattr(trial, "loops", machine.loops)
    task = {**TASK, "sizes": [1024, 65536]}
    outcome = trial.run(catalogue.PEERS["tfdist-core"], 2, task, 60.0)
    assert not outcome.error
    cases = {f"{s}/{n}" for s in ("allreduce", "in place") for n in (1024, 65536)}
    assert set(outcome.seconds) == cases
    assert all(len(all_s) >= 4 for all_s in outcome.seconds.values())
    assert json.dumps(outcome.ranks[0]["versions"])
    # The group was agreed on once, not in every step.
    repetitions = sum(map(len, outcome.seconds.values()))
    assert outcome.ranks[0]["counters"]["predicted"] >= repetitions
