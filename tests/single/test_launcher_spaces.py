"""The key-value spaces of launchers, with a launcher in a thread."""

import contextlib
import os
import socket
import threading
import time

import pytest

from tfdist.core.rendezvous import spaces
from tfdist.core.rendezvous.errors import RendezvousError
from tfdist.core.rendezvous.placement import Placement
from tfdist.core.rendezvous.spaces import pmi, pmix

MPICH = Placement(rank=0, size=4, local_rank=0, local_size=2, source="mpich")


def soon(seconds=10.0):
    return time.monotonic() + seconds


class Launcher:
    """The PMI server of `size` ranks; `answers` replaces some of its answers."""

    def __init__(self, size, **answers):
        pairs = [socket.socketpair() for _ in range(size)]
        self.ranks = [rank for rank, _ in pairs]
        self._answers = answers
        self._values = {}
        self._barrier = threading.Barrier(size)
        self.commands = []
        self._threads = [
            threading.Thread(target=self._serve, args=(own,), daemon=True)
            for _, own in pairs
        ]
        for thread in self._threads:
            thread.start()

    def _serve(self, own):
        broken = threading.BrokenBarrierError
        with own, own.makefile("r") as lines, contextlib.suppress(broken):
            for line in lines:
                asked = pmi.parse(line)
                name = asked["cmd"]
                self.commands.append(name)
                answer = self._answers.get(name) or getattr(self, f"_{name}")(asked)
                if answer == "close":
                    return
                # In two parts, as a stream may deliver it.
                half = len(answer) // 2
                own.sendall(answer[:half].encode())
                own.sendall(f"{answer[half:]}\n".encode())

    def _init(self, asked):
        return "cmd=response_to_init rc=0 pmi_version=1 pmi_subversion=1"

    def _get_my_kvsname(self, asked):
        return "cmd=my_kvsname kvsname=kvs_1"

    def _put(self, asked):
        self._values[asked["key"]] = asked["value"]
        return "cmd=put_result rc=0 msg=success"

    def _get(self, asked):
        if asked["key"] not in self._values:
            return "cmd=get_result rc=-1 msg=key_not_found"
        return f"cmd=get_result rc=0 msg=success value={self._values[asked['key']]}"

    def _barrier_in(self, asked):
        self._barrier.wait(20.0)
        return "cmd=barrier_out"

    def _finalize(self, asked):
        return "cmd=finalize_ack"


def test_all_ranks_get_the_values_of_rank_0_in_order():
    launcher = Launcher(3)
    found = [[], [], []]

    def rank(number):
        space = pmi.PmiSpace(launcher.ranks[number].fileno(), soon())
        for key in ("first", "second"):
            value = f"{key}@10.0.0.1:4711" if number == 0 else None
            found[number].append(space.exchange(key, value, soon()))
        space._finalize()

    threads = [threading.Thread(target=rank, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    assert found == [["first@10.0.0.1:4711", "second@10.0.0.1:4711"]] * 3
    assert launcher.commands.count("init") == launcher.commands.count("finalize") == 3


def test_a_rank_that_does_not_come_ends_the_others_at_the_deadline():
    launcher = Launcher(2)
    space = pmi.PmiSpace(launcher.ranks[0].fileno(), soon())
    with pytest.raises(RendezvousError, match="not all ranks called tfdist.init"):
        space.exchange("key", "value", soon(0.2))
    # Its answers would be those of the first attempt.
    with pytest.raises(RendezvousError, match="cannot be used after an error"):
        space.exchange("again", "value", soon())


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ({"init": "close"}, "PMI socket failed: the launcher closed it"),
        ({"init": "cmd=response_to_init rc=-1"}, "refused PMI's init"),
        ({"put": "cmd=put_result rc=-1 msg=no_space"}, "refused PMI's put.*no_space"),
        ({"get": "cmd=get_result rc=-1"}, "refused PMI's get"),
    ],
)
def test_a_launcher_that_fails_is_named(answers, words):
    launcher = Launcher(1, **answers)
    with pytest.raises(RendezvousError, match=words):
        space = pmi.PmiSpace(launcher.ranks[0].fileno(), soon())
        space.exchange("key", "value", soon())


def test_a_space_is_used_where_it_is_needed():
    own, _other = socket.socketpair()
    environ = {"PMI_FD": str(own.fileno())}
    assert pmi.opening(environ, MPICH) is not None
    with open("/dev/null") as file:
        assert pmi.opening({"PMI_FD": str(file.fileno())}, MPICH) is None
    assert pmi.opening({"PMI_FD": "999"}, MPICH) is None  # closed
    assert pmi.opening({}, MPICH) is None
    assert pmi.opening({"PMI_FD": "x"}, MPICH) is None
    alone = Placement(rank=0, size=4, local_rank=0, local_size=4, source="mpich")
    assert spaces.find(environ, alone, soon()) is None
    other = Placement(rank=0, size=4, local_rank=0, local_size=2, source="tfdist")
    assert pmi.opening(environ, other) is None
    assert pmix.opening({"PMIX_RANK": "0", "PMIX_NAMESPACE": "a"}, other) is None


def test_a_program_that_uses_mpi_keeps_its_socket(monkeypatch):
    own, _other = socket.socketpair()
    for name, is_mpi in (("libmpi.so.12", True), ("libmpi_cray.so", True), ("", False)):
        maps = f"7f00-7f01 r-xp 0 08:01 1 /opt/lib/{name}"
        monkeypatch.setattr(pmi.Path, "read_text", lambda path, maps=maps: maps)
        found = pmi.opening({"PMI_FD": str(own.fileno())}, MPICH)
        assert (found is None) == is_mpi


def test_without_its_library_there_is_no_pmix(monkeypatch, tmp_path):
    environ = {"PMIX_RANK": "0", "PMIX_NAMESPACE": "a", "PMIX_PREFIX": str(tmp_path)}
    place = Placement(rank=0, size=4, local_rank=0, local_size=2, source="openmpi")
    monkeypatch.setattr(pmix, "_OTHERS", ())
    monkeypatch.setattr(pmix, "_LIBRARY", "libpmix-of-nobody.so")
    assert pmix.opening(environ, place) is None
    assert os.listdir(tmp_path) == []
