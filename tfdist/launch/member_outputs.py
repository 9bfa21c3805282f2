"""The outputs of a job's ranks, or of the members of an elastic job."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable

from tfdist.launch import agent_protocol
from tfdist.launch.output import RankOutput, StreamMerger

_KINDS = (agent_protocol.STDOUT, agent_protocol.STDERR)
_READ_S = 0.5  # to read the rest of the output of a process that has exited


class MemberOutputs:
    """The outputs of a job's processes, by rank or by member of an elastic job."""

    def __init__(self) -> None:
        self._outputs: dict[int, RankOutput] = {}
        self._remote: dict[tuple[int, bytes], StreamMerger] = {}
        self._forgotten: list[int] = []  # members lost before the last generation
        self._ended_s: dict[int, float] = {}  # members of `close_soon` → time

    def __getitem__(self, number: int) -> RankOutput:
        """Returns the output of a process."""
        return self._outputs[number]

    def add(self, number: int, output: RankOutput) -> None:
        """Adds a process."""
        self._outputs[number] = output

    def add_remote(
        self,
        number: int,
        output: RankOutput,
        stdout: StreamMerger,
        stderr: StreamMerger,
    ) -> None:
        """Adds a process of another host, whose output comes through `feed`."""
        self.add(number, output)
        self._remote[number, agent_protocol.STDOUT] = stdout
        self._remote[number, agent_protocol.STDERR] = stderr

    def feed(self, number: int, kind: bytes, data: bytes) -> None:
        """Processes output that an agent has sent."""
        if merger := self._remote.get((number, kind)):
            merger.feed(data)

    def formed(self, members: Collection[int]) -> None:
        """Closes outputs of members that are not in the generation before this one.

        Args:
            members: the members of the new generation, and newcomers that run.
        """
        self._close(self._forgotten)  # their output has been read
        self._forgotten = [one for one in self._outputs if one not in members]

    def close_soon(self, number: int) -> None:
        """Lets `close_ended` close the output of a member that exited without a rank.

        A discovery script may let newcomers start and end during one generation.
        """
        self._ended_s[number] = time.monotonic()

    def close_ended(self, *, paused: bool) -> None:
        """Closes the outputs of `close_soon` once they are read; call this regularly.

        Args:
            paused: whether no output is read at present.
        """
        now_s = time.monotonic()
        if paused:
            self._ended_s = dict.fromkeys(self._ended_s, now_s)
        read = [one for one, end_s in self._ended_s.items() if now_s > end_s + _READ_S]
        for number in read:
            del self._ended_s[number]
        self._close(read)

    def _close(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            for kind in _KINDS:
                if merger := self._remote.pop((number, kind), None):
                    merger.end()
            if output := self._outputs.pop(number, None):
                output.close()

    def end_streams(self) -> None:
        """Handles the end of all streams from other hosts."""
        for merger in self._remote.values():
            merger.end()

    def close(self) -> None:
        """Closes all log files."""
        for output in self._outputs.values():
            output.close()
