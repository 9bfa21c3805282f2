"""One rank of benchmarks/networks.py: answers requests on stdin with times.

    network_rank.py tfdist|gloo|send|receive

A request is a line {"bytes", "repeats"}; the answer {"seconds", "cpu_seconds",
"bytes_sent"} covers all repeats: allreduces of that many bytes of float32, one after
the other. Before the clock starts, one more is verified. `send` and `receive` are the
two ends of one plain socket, which shows what the line itself can carry.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

Work = Callable[[], Any]


class Tfdist:
    """The core alone, through its C interface: no TensorFlow."""

    def __init__(self) -> None:
        from helpers import core_client

        from tfdist.core import native, runtime, world

        self._core, self._client = native, core_client
        self._groups: dict[str, str] = {}
        world.start()
        self.rank, self.size = runtime.rank(), runtime.size()

    def barrier(self) -> None:
        self._client.barrier()

    def bytes_sent(self) -> int:
        links = self._core.counters()["links"]
        return sum(x["data_bytes_sent"] for x in links if x["transport"] == "tcp")

    def allreduce(self, x: np.ndarray) -> np.ndarray:
        # Like gradients: in a registered group, which is negotiated once. In place, so
        # that no memory page is touched for the first time.
        name = f"sum{x.size}"
        if name not in self._groups:
            text = f"{name} float32 {list(x.shape)}\nop=sum"
            self._groups[name], _ = self._core.register_gradient_list(text, [True])
        self._client.submit(
            [x], name=name, group=self._groups[name], in_place=True
        ).wait(120.0)
        return x


class Gloo:
    """PyTorch's gloo."""

    def __init__(self) -> None:
        import torch
        import torch.distributed

        torch.set_num_threads(1)
        self._torch = torch
        torch.distributed.init_process_group("gloo")
        self.rank = torch.distributed.get_rank()
        self.size = torch.distributed.get_world_size()

    def barrier(self) -> None:
        self._torch.distributed.barrier()

    def bytes_sent(self) -> int:
        return 0  # gloo does not count them

    def allreduce(self, x: np.ndarray) -> np.ndarray:
        self._torch.distributed.all_reduce(self._torch.from_numpy(x))
        return x


def _serve(prepare: Callable[[int], Work], sent: Callable[[], int]) -> None:
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        work = prepare(request["bytes"])
        before = resource.getrusage(resource.RUSAGE_SELF)
        sent_before = sent()
        begin_s = time.perf_counter()
        for _ in range(request["repeats"]):
            work()
        seconds = time.perf_counter() - begin_s
        after = resource.getrusage(resource.RUSAGE_SELF)
        used_s = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
        told = {
            "seconds": seconds,
            "cpu_seconds": used_s,
            "bytes_sent": sent() - sent_before,
        }
        print(json.dumps(told), flush=True)


def _ranks(peer: Tfdist | Gloo) -> None:
    def prepare(size: int) -> Work:
        x = np.arange(size // 4, dtype=np.float32) % 17 + peer.rank
        expected = peer.size * (np.arange(size // 4, dtype=np.float32) % 17)
        expected += peer.size * (peer.size - 1) // 2
        if not np.array_equal(peer.allreduce(x), expected):
            raise ValueError(f"rank {peer.rank}: wrong sum of {size} bytes")
        x[:] = 0
        peer.barrier()
        return lambda: peer.allreduce(x)

    _serve(prepare, peer.bytes_sent)


def _stream(role: str) -> None:
    where = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    if role == "receive":
        listener = socket.create_server(where)
        print("listening", flush=True)
        sock, _ = listener.accept()
    else:
        sock = socket.create_connection(where)
    room = bytearray(1 << 20)

    def prepare(size: int) -> Work:
        def send() -> None:
            for begin in range(0, size, len(room)):
                sock.sendall(memoryview(room)[: min(len(room), size - begin)])

        def receive() -> None:
            missing = size
            while missing > 0:
                got = sock.recv_into(room, min(missing, len(room)))
                if got == 0:
                    raise ConnectionError("the sender is gone")
                missing -= got

        return send if role == "send" else receive

    _serve(prepare, lambda: 0)


def main(role: str) -> None:
    """One rank."""
    if role in ("send", "receive"):
        _stream(role)
    else:
        _ranks(Tfdist() if role == "tfdist" else Gloo())


if __name__ == "__main__":
    main(*sys.argv[1:])
