"""Requests of the processes of an elastic job to tfdistrun, over a real store."""

import os
import threading

import pytest
from helpers.deadline import deadline
from helpers.launcher import until

from tfdist.core.rendezvous import auth, renewal
from tfdist.core.rendezvous.errors import RendezvousError
from tfdist.core.rendezvous.secret import keep_in_memory
from tfdist.core.rendezvous.store import (
    StoreThread,
    answer_key,
    ask_step_key,
    begun_key,
    change_key,
    end_key,
    join_key,
    step_key,
)

JOB = "tfdistrun:1:ab"
REQUEST = {"generation": 1, "committed": 5, "failed": [], "program": ""}


class Launcher:
    """The store of tfdistrun; the test sends the answers."""

    def __init__(self):
        secret = auth.new_secret()
        self.keys, self.values = [], {}
        self.fd, path = keep_in_memory(secret)
        self.store = StoreThread(secret, job=JOB, size=4, on_set=self._note)
        self.store.start()
        self.environ = {
            "TFDIST_MEMBER": "2",
            "TFDIST_RANK": "2",
            "TFDIST_SIZE": "4",
            "TFDIST_RENDEZVOUS": self.store.address,
            "TFDIST_SECRET_FILE": path,
            "TFDIST_JOB_ID": JOB,
        }

    def _note(self, key, value):
        self.keys.append(key)
        self.values[key] = value

    def close(self):
        self.store.close()
        os.close(self.fd)


@pytest.fixture
def launcher():
    made = Launcher()
    yield made
    made.close()


@deadline(30)
def test_a_request_is_not_limited_by_the_timeout_of_operations(launcher, monkeypatch):
    """The others may be in a long step, or a replacement may start for long."""
    monkeypatch.setenv("TFDIST_TIMEOUT_S", "0.1")
    place = {"generation": 2, "rank": 1, "size": 3, "is_last": False}
    place |= {"local_rank": 0, "local_size": 1, "cross_rank": 1, "cross_size": 2}
    threading.Timer(0.5, launcher.store.set, (answer_key(2, 7), place)).start()
    found = renewal.ask_for_place(launcher.environ, 7, REQUEST)
    assert found == renewal.Place(**place)


@deadline(30)
def test_a_spare_waits_for_longer_than_the_store_waits_at_once(launcher, monkeypatch):
    monkeypatch.setattr(renewal, "_LONGEST_WAIT_S", 0.1)
    place = {"generation": 2, "rank": 1, "size": 3, "is_last": False}
    place |= {"local_rank": 0, "local_size": 1, "cross_rank": 1, "cross_size": 2}
    threading.Timer(1.0, launcher.store.set, (answer_key(2, 7), place)).start()
    found = renewal.ask_for_place(launcher.environ, 7, REQUEST)
    assert found == renewal.Place(**place)


@deadline(30)
def test_a_request_ends_with_an_error_when_tfdistrun_ends(launcher):
    end = threading.Timer(0.5, launcher.store.close)
    end.start()
    with pytest.raises(RendezvousError):
        renewal.ask_for_place(launcher.environ, 7, REQUEST)
    end.join()


@deadline(30)
@pytest.mark.parametrize("for_leavers", [True, False])
def test_a_program_that_does_not_hand_over_is_told_of_every_change(
    launcher, for_leavers
):
    notice = renewal.JoinNotice(launcher.environ, 3, for_leavers=for_leavers)
    launcher.store.set(change_key(3), True)
    if for_leavers:
        until(lambda: notice.received)
    else:
        until(lambda: begun_key(3) in launcher.keys)
        assert not notice.received
    notice.close()


@deadline(30)
def test_the_notice_comes_after_a_failure_to_connect(launcher, monkeypatch):
    """On a busy host, a connection can take too long."""
    monkeypatch.setattr(renewal, "_RETRY_S", 0.01)
    connect, failures = renewal._connect, [RendezvousError(4, "too late")]

    async def connect_late(environ):
        if failures:
            raise failures.pop()
        return await connect(environ)

    monkeypatch.setattr(renewal, "_connect", connect_late)
    notice = renewal.JoinNotice(launcher.environ, 3)
    until(lambda: begun_key(3) in launcher.keys)
    assert not notice.received
    launcher.store.set(join_key(3), True)
    until(lambda: notice.received)
    notice.close()


# ---- handover ----


def end_notice(launcher, committed, finished=None):
    return renewal.EndNotice(
        launcher.environ,
        3,
        committed=lambda: committed,
        on_finished=(finished.set if finished else None),
    )


@deadline(30)
def test_a_rank_that_is_asked_for_its_step_waits_for_the_last_one(launcher):
    notice = end_notice(launcher, 7)
    assert not notice.was_asked
    launcher.store.set(ask_step_key(3), True)
    until(lambda: step_key(3, 2) in launcher.keys)
    assert notice.was_asked and notice.wait_for_end(0.01) is None
    launcher.store.set(end_key(3), 9)
    assert notice.wait_for_end(10.0) == 9
    notice.close()


@deadline(30)
def test_a_rank_that_takes_no_more_steps_ends_the_generation_at_once(launcher):
    finished = threading.Event()
    notice = end_notice(launcher, None, finished)
    launcher.store.set(ask_step_key(3), True)
    assert finished.wait(10.0)
    notice.close()


@deadline(30)
def test_a_member_asks_to_leave(launcher):
    renewal.ask_to_leave(launcher.environ)
    until(lambda: "elastic/leave/2" in launcher.keys)


@deadline(30)
def test_a_slow_member_asks_to_be_replaced(launcher):
    renewal.ask_to_leave(launcher.environ, is_slow=True)
    until(lambda: launcher.values.get("elastic/leave/2") == "slow")


@deadline(30)
def test_a_dismissed_member_gets_no_place(launcher):
    launcher.store.set(answer_key(2, 7), {"dismissed": True})
    with pytest.raises(renewal.DismissedError):
        renewal.ask_for_place(launcher.environ, 7, REQUEST)
