"""The outputs of a job's processes: when their logs are closed."""

import pytest

from tfdist.launch import agent_protocol, member_outputs
from tfdist.launch.member_outputs import MemberOutputs
from tfdist.launch.output import RankOutput, Screen, Sink, StreamMerger


@pytest.fixture
def outputs(tmp_path):
    made = Outputs(tmp_path)
    yield made
    made.own.close()


class Outputs:
    """Outputs of processes of another host."""

    def __init__(self, folder):
        self.own, self.folder, self.logs = MemberOutputs(), folder, {}
        self.screen = Screen(Sink(None, is_terminal=False))

    def add(self, *numbers):
        for number in numbers:
            log = open(self.folder / f"{number}.log", "wb", buffering=0)
            output = RankOutput(number, 4, log)
            streams = [StreamMerger(output, self.screen, color=False) for _ in "oe"]
            self.own.add_remote(number, output, *streams)
            self.logs[number] = log

    @property
    def closed(self):
        return {number for number, log in self.logs.items() if log.closed}


def test_logs_of_newcomers_without_a_rank_are_closed_once_they_are_read(
    outputs, monkeypatch
):
    """A discovery script that flaps would use up the descriptors."""
    now_s = [0.0]
    monkeypatch.setattr(member_outputs.time, "monotonic", lambda: now_s[0])
    outputs.add(0, 2)
    outputs.own.close_soon(2)
    outputs.own.close_ended(paused=False)
    assert not outputs.closed
    now_s[0] = 10.0
    outputs.own.close_ended(paused=True)  # its output is still unread
    assert not outputs.closed
    outputs.own.feed(2, agent_protocol.STDOUT, b"x")
    now_s[0] = 11.0
    outputs.own.close_ended(paused=False)
    assert outputs.closed == {2}
    assert (outputs.folder / "2.log").read_bytes() == b"x"
    outputs.own.feed(2, agent_protocol.STDOUT, b"late")
    outputs.own.formed({0})
    outputs.own.formed({0})


def test_logs_of_lost_members_are_closed_one_generation_later(outputs):
    outputs.add(0, 1)
    outputs.own.formed({0})
    assert not outputs.closed
    outputs.own.formed({0})
    assert outputs.closed == {1}
    assert outputs.own[0].rank == 0
