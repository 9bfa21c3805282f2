"""`helpers.elastic_client` with ranks that hand over, as those of a training do.

    tfdistrun -np 4 --min-np 1 python -m helpers.elastic_handover FOLDER STEPS

A rank that gets SIGTERM, or has no slot any more, leaves after a step that all ranks
have committed. Each step that is undone adds a line to FOLDER/undone.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from helpers import elastic_client

from tfdist.core import world
from tfdist.core.generations import Generations


class Phases(elastic_client.Phases):
    """Generations of a program that hands over."""

    def __init__(self, loop: Loop, progress: Callable[[], tuple[int, int]]) -> None:
        Generations.__init__(self, progress=progress)
        self._loop = loop


class Loop(elastic_client.Loop):
    """The loop of one process."""

    def __init__(self, folder: Path, steps: int) -> None:
        super().__init__(folder, steps)
        self._generations = Phases(self, self._progress)

    def _progress(self) -> tuple[int, int]:
        committed = max(self.committed, 0)
        return committed, committed + self._goes_on()

    def _run_step(self) -> None:
        is_rehearsal = self._generations.is_newcomer
        step = max(self.committed, 0)
        self._apply(step)
        time.sleep(0.002)
        if not self._generations.is_step_valid():
            if not is_rehearsal:
                with (self._folder / "undone").open("a") as file:
                    print(json.dumps({"member": self._member, "step": step}), file=file)
            self._enter_next()
            return
        self._snapshot = self._state.copy()
        self._commit(step + 1)
        if self._generations.ends_after_commit():
            self._enter_next()

    def _enter_next(self) -> None:
        super()._enter_next()
        if self._generations.is_last:
            self._generations.exit_preempted()


def main(folder: Path, steps: int) -> None:
    """Runs one process of the job."""
    loop = Loop(folder, steps)
    loop.run()
    loop.write_result()
    world.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
