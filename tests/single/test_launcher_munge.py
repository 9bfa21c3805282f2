"""The space of a plain srun, with stand-ins for the programs of MUNGE."""

import contextlib
import json
import os
import socket
import sys
import threading
import time
from dataclasses import replace

import pytest

from tfdist.core.rendezvous import spaces
from tfdist.core.rendezvous.errors import RendezvousError
from tfdist.core.rendezvous.placement import Placement
from tfdist.core.rendezvous.spaces import munge

# A "credential" is the user and the text; it can be decoded once, as those of MUNGE.
MUNGE = """#!{python} -ISs
import binascii, os, sys
assert sys.argv[1] == "-u"
text = f"{{os.geteuid()}} {{os.urandom(8).hex()}} {{sys.stdin.read()}}"
print(binascii.hexlify(text.encode()).decode())
"""
UNMUNGE = """#!{python} -ISs
import binascii, os, sys
try:
    text = binascii.unhexlify(sys.stdin.read().strip()).decode()
except ValueError:
    sys.exit("unmunge: Error: Invalid credential format")
uid, number, rest = text.split(" ", 2)
used = os.path.join({folder!r}, number)
if number != "0" and os.path.exists(used):
    sys.exit("unmunge: Error: Replayed credential")
open(used, "w").close()
print(f"STATUS:          0\\nUID:             {{uid}}\\n\\n{{rest}}", end="")
"""
PLACE = Placement(
    rank=0, size=4, local_rank=0, local_size=2, source="slurm", job="slurm 7.0"
)


@pytest.fixture(autouse=True)
def programs(monkeypatch, tmp_path):
    for name, text in (("munge", MUNGE), ("unmunge", UNMUNGE)):
        file = tmp_path / name
        file.write_text(text.format(python=sys.executable, folder=str(tmp_path)))
        file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def space(rank, **more):
    place = replace(PLACE, rank=rank, **more)
    return munge.MungeSpace(place, "127.0.0.1")


def soon(seconds=20.0):
    return time.monotonic() + seconds


def in_threads(*calls):
    """The result of each call, or the text of its error."""
    found = [""] * len(calls)

    def run(index):
        try:
            found[index] = calls[index]()
        except RendezvousError as error:
            found[index] = error.message

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40.0)
    return found


def giving(key, value, deadline, **more):
    return lambda: space(0, **more).exchange(key, value, deadline)


def taking(rank, key, deadline, **more):
    return lambda: space(rank, **more).exchange(key, None, deadline)


def test_all_ranks_get_the_value_of_rank_0_again_and_again():
    for key in ("first", "second"):
        calls = [taking(rank, key, soon()) for rank in (1, 2, 3)]
        found = in_threads(giving(key, f"{key}@10.0.0.1:4711", soon()), *calls)
        assert found == [f"{key}@10.0.0.1:4711"] * 4


def test_a_rank_that_does_not_come_is_named_at_the_deadline():
    calls = [taking(rank, "key", soon()) for rank in (1, 3)]
    found = in_threads(giving("key", "value", soon(1.5)), *calls)
    assert found[1:] == ["value", "value"]
    assert found[0].startswith("rank 2 did not call tfdist.init() within the deadline")


def test_without_rank_0_the_others_say_where_they_looked():
    (found,) = in_threads(taking(1, "key", soon(0.5)))
    assert "rank 1 did not find rank 0 at 127.0.0.1" in found
    assert "set TFDIST_RENDEZVOUS and TFDIST_SECRET_FILE" in found


def test_two_jobs_whose_ports_meet_do_not_mix(monkeypatch):
    monkeypatch.setattr(munge, "ports", lambda name: [free, free + 1])
    with socket.create_server(("127.0.0.1", 0)) as server:
        free = server.getsockname()[1]
    deadline = soon()
    jobs = {"slurm 7.0": "of the first", "slurm 7.1": "of the second"}
    calls = []
    for job, value in jobs.items():
        calls += [giving("key", value, deadline, job=job, size=2)]
        calls += [taking(1, "key", deadline, job=job, size=2)]
    found = in_threads(*calls)
    assert found == ["of the first"] * 2 + ["of the second"] * 2


def answering(text, job):
    """A stranger that listens at the first port of the job, and sends `text`."""
    port = munge.ports(f"{job} key")[0]
    server = socket.create_server(("127.0.0.1", port))

    def serve():
        while True:
            try:
                with server.accept()[0] as channel:
                    channel.sendall(text)
            except OSError:
                return

    threading.Thread(target=serve, daemon=True).start()
    return server


def other_user():
    name = {"name": "slurm 8.3 key", "value": "of a stranger"}
    return f"{os.geteuid() + 1} 0 {json.dumps(name)}".encode().hex().encode() + b"\n"


@pytest.mark.parametrize(
    ("job", "text", "reason"),
    [
        ("slurm 8.1", b"\x00\xff no credential \n", "Invalid credential"),
        ("slurm 8.2", b"", "it sent nothing"),
        ("slurm 8.3", other_user(), "a process of another user"),
    ],
)
def test_a_stranger_at_the_port_is_not_believed(job, text, reason):
    more = {"job": job, "size": 2}
    with answering(text, job):
        (alone,) = in_threads(taking(1, "key", soon(1.0), **more))
        calls = giving("key", "v", soon(), **more), taking(1, "key", soon(), **more)
        found = in_threads(*calls)  # rank 0 takes the next port
    assert reason in alone
    assert found == ["v", "v"]


def test_a_stranger_that_passes_the_credential_on_stops_nobody():
    more = {"job": "slurm 9.0", "size": 2}
    first, second = munge.ports("slurm 9.0 key")[:2]
    server = socket.create_server(("127.0.0.1", first))

    kept = []

    def pass_on(rank):
        with (
            rank,
            contextlib.suppress(OSError),  # rank 0 does not listen yet
            socket.create_connection(("127.0.0.1", second)) as rank_0,
        ):
            rank.sendall(rank_0.recv(65536))
            kept.append(rank.recv(65536))

    def serve():
        with contextlib.suppress(OSError):
            while True:
                pass_on(server.accept()[0])

    with server:
        threading.Thread(target=serve, daemon=True).start()
        calls = giving("key", "v", soon(), **more), taking(1, "key", soon(), **more)
        assert in_threads(*calls) == ["v", "v"]
    assert kept[0].startswith(b"1 ")  # the proof


def test_a_stranger_that_sends_nothing_is_left_after_a_while(monkeypatch):
    monkeypatch.setattr(munge, "_CONNECTION_S", 0.5)
    more = {"job": "slurm 9.1", "size": 2}
    with contextlib.ExitStack() as stack:

        def open_many():
            where = ("127.0.0.1", munge.ports("slurm 9.1 key")[0])
            while True:  # until rank 0 listens
                try:
                    for _ in range(40):
                        stack.enter_context(socket.create_connection(where))
                    return
                except OSError:
                    time.sleep(0.01)

        strangers = threading.Thread(target=open_many, daemon=True)
        strangers.start()

        def late():
            strangers.join(10.0)
            return taking(1, "key", soon(), **more)()

        found = in_threads(giving("key", "v", soon(), **more), late)
    assert found == ["v", "v"]


def test_a_munge_that_fails_is_an_error_at_once(programs):
    (programs / "munge").write_text(
        "#!/bin/sh\necho 'Did you start munged?' >&2; exit 1"
    )
    begin = time.monotonic()
    calls = giving("key", "value", soon()), taking(1, "key", soon(2.0))
    found = in_threads(*calls)
    assert "munge failed: Did you start munged?" in found[0]
    assert "srun --mpi=pmi2" in found[0]
    assert time.monotonic() - begin < 10.0


def test_all_ports_in_use_is_an_error(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        used = server.getsockname()[1]
        monkeypatch.setattr(munge, "ports", lambda name: [used])
        (found,) = in_threads(giving("key", "value", soon()))
    assert "rank 0 cannot listen at 127.0.0.1" in found


def test_where_it_is_used(monkeypatch, programs):
    environ = {"SLURM_STEP_NODELIST": "n[1-2]"}
    assert munge.opening(environ, PLACE) is not None
    assert munge.opening({}, PLACE) is None
    assert munge.opening(environ, replace(PLACE, source="tfdist")) is None
    assert spaces.find(environ, replace(PLACE, local_size=4), soon()) is None
    monkeypatch.setenv("PATH", "/nonexistent")
    assert munge.opening(environ, PLACE) is None


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("node[07-09,12],login1", "node07"),
        ("rack[3,5]b,x", "rack3b"),
    ],
)
def test_the_first_host_of_a_list(hosts, first):
    assert munge.first_host(hosts) == first


@pytest.mark.parametrize("hosts", ["", "[1-2]", "n[1-2"])
def test_what_is_no_list_of_hosts_is_an_error(hosts):
    with pytest.raises(RendezvousError, match="is not a list of hosts"):
        munge.first_host(hosts)


def test_a_host_that_only_slurm_knows(programs):
    scontrol = programs / "scontrol"
    scontrol.write_text(
        "#!/bin/sh\necho 'NodeName=n1 Arch=x NodeAddr=127.0.0.3 Port=1'"
    )
    scontrol.chmod(0o755)
    assert munge.resolve("no-such-host.invalid") == "127.0.0.3"
    scontrol.write_text("#!/bin/sh\nexit 1")
    with pytest.raises(RendezvousError, match="no address of no-such-host.invalid"):
        munge.resolve("no-such-host.invalid")


@pytest.mark.parametrize("program", ["munge", "unmunge"])
def test_a_program_that_fails_once_is_run_again(programs, monkeypatch, program):
    """As a program that takes too long on a busy host."""
    run, calls = munge._run, []

    def fail_once(words, text):
        calls.append(words[0])
        # The first call of munge is the check of rank 0 before it listens.
        if words[0] == program and calls.count(program) == 1 + (program == "munge"):
            raise munge.invalid(f"{program} failed: it took too long")
        return run(words, text)

    monkeypatch.setattr(munge, "_run", fail_once)
    deadline = soon()
    calls_of_ranks = (
        giving("key", "value", deadline, size=2),
        taking(1, "key", deadline, size=2),
    )
    assert in_threads(*calls_of_ranks) == ["value", "value"]


def test_a_failure_of_munge_is_named_at_the_deadline(monkeypatch):
    run, calls = munge._run, []

    def fail(words, text):
        calls.append(words[0])
        if calls.count("munge") > 1:
            raise munge.invalid("munge failed: it took too long")
        return run(words, text)

    monkeypatch.setattr(munge, "_run", fail)
    deadline = soon(1.5)
    found = in_threads(
        giving("key", "value", deadline, size=2), taking(1, "key", deadline, size=2)
    )
    assert "munge failed: it took too long" in found[0]
