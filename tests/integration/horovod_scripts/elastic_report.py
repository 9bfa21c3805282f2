"""Report of an elastic script for its test; kills the process if asked to."""

import hashlib
import json
import os
import signal
import time
from pathlib import Path

import numpy as np
from horovod.common.exceptions import HorovodInternalError

SLOW_S = 0.2


class Report:
    """Records the work of one process of an elastic job.

    A file kill-<member>-<batch> makes this member kill itself after the batch, and
    raise-<member>-<batch> makes it raise a HorovodInternalError. While
    there are fewer ranks than at the start, batches are slow, so that a replacement
    joins before the training ends. So they are while the number of ranks is not that
    in the file `slots`; a file slots-<batch> takes its place after the batch.
    """

    def __init__(self):
        self.member = int(os.environ["TFDIST_MEMBER"])
        self.size = int(os.environ["HOROVOD_SIZE"])
        self.facts = {"traces": 0, "places": [], "resets": [], "batches": []}

    def traced(self):
        """Is called in a traced function."""
        self.facts["traces"] += 1

    def batch(self, hvd, number):
        """Is called after each batch, counted from 1."""
        place = [hvd.rank(), hvd.size()]
        if place not in self.facts["places"][-1:]:
            self.facts["places"].append(place)
        self.facts["batches"].append(number)
        if self._is_asked("kill", number):
            os.kill(os.getpid(), signal.SIGKILL)
        if self._is_asked("raise", number):
            raise HorovodInternalError("the test asks for it")
        slots = Path("slots")
        if hvd.rank() == 0 and Path(f"slots-{number}").exists():
            Path(f"slots-{number}").rename(slots)
        is_changing = slots.exists() and hvd.size() != int(slots.read_text())
        if hvd.size() < self.size or is_changing:
            time.sleep(2 * SLOW_S if is_changing else SLOW_S)

    def _is_asked(self, action, number):
        wish = Path(f"{action}-{self.member}-{number}")
        found = wish.exists()
        wish.unlink(missing_ok=True)
        return found

    def reset(self, hvd):
        """Is called by a reset callback."""
        own = [os.environ[f"HOROVOD_{name}"] for name in ("RANK", "SIZE")]
        assert own == [str(hvd.rank()), str(hvd.size())], own
        self.facts["resets"].append(hvd.size())

    def write(self, hvd, weights, **facts):
        """Writes `member-<member>.json`."""
        data = b"".join(np.asarray(w).tobytes() for w in weights)
        facts["hash"] = hashlib.sha256(data).hexdigest()
        facts |= {"rank": hvd.rank(), "size": hvd.size(), **self.facts}
        Path(f"member-{self.member}.json").write_text(json.dumps(facts, default=float))
        if hvd.rank() == 0:
            print(f"finished with {hvd.size()} ranks")
