"""Batch loaders that read ahead in a thread. Does not need TensorFlow."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

_log = logging.getLogger("tfdist")
_LOOK_S = 0.1  # interval at which a waiting thread checks whether to stop
_JOIN_S = 10.0


class BaseDataLoader:
    """Loads batches; a subclass defines `__len__` and `_iterate`."""

    def __len__(self) -> int:
        """Returns the number of batches."""
        raise NotImplementedError("A data loader must define __len__().")

    def _iterate(self) -> Iterator[Any]:
        """Yields the batches of one pass."""
        raise NotImplementedError("A data loader must define _iterate().")

    def __iter__(self) -> Iterator[Any]:
        """Yields the batches of one pass, processed by `_process_batch`."""
        for batch in self._iterate():
            yield self._process_batch(batch)

    def _process_batch(self, batch: Any) -> Any:
        """Processes a batch in the consuming thread; the default returns it as is."""
        return batch


class AsyncDataLoaderMixin:
    """Mixin for a `BaseDataLoader` that reads batches ahead in a thread.

    Args:
        async_loader_queue_size: maximum number of batches read ahead; 0: no thread is
            used.
        debug_data_loader: whether to log each batch that is read.
        *args: positional arguments for the constructor of the data loader class.
        **kwargs: keyword arguments for the constructor of the data loader class.

    Raises:
        ValueError: `async_loader_queue_size` is negative.

    Example:
        >>> class Numbers(BaseDataLoader):
        ...     def __len__(self):
        ...         return 3
        ...     def _iterate(self):
        ...         yield from range(3)
        >>> class ReadAhead(AsyncDataLoaderMixin, Numbers):
        ...     pass
        >>> list(ReadAhead(async_loader_queue_size=2))
        [0, 1, 2]
    """

    _iterate: Callable[[], Iterator[Any]]
    _process_batch: Callable[[Any], Any]

    def __init__(
        self,
        async_loader_queue_size: int = 64,
        debug_data_loader: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if async_loader_queue_size < 0:
            raise ValueError(
                "Expected async_loader_queue_size to be >= 0, got "
                f"{async_loader_queue_size!r}."
            )
        self.async_loader_queue_size = async_loader_queue_size
        self.debug_data_loader = debug_data_loader
        self._reader: _Reader | None = None
        super().__init__(*args, **kwargs)

    def close_async_loader(self) -> None:
        """Ends the current pass over the data, and the thread that reads it."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()

    def __iter__(self) -> Iterator[Any]:
        """Yields the batches of one pass; raises the errors of the reading thread."""
        if self.async_loader_queue_size == 0:
            for batch in self._iterate():
                yield self._process_batch(batch)
            return
        self.close_async_loader()
        reader = _Reader(
            self._iterate, self.async_loader_queue_size, self.debug_data_loader
        )
        self._reader = reader
        try:
            for batch in reader.batches():
                yield self._process_batch(batch)
        finally:
            reader.close()


class _Reader:
    """A thread that reads the batches of one pass ahead.

    Args:
        iterate: function that returns an iterator over the batches.
        size: maximum number of batches in the queue.
        logs: whether to log each batch that is read.
    """

    def __init__(
        self, iterate: Callable[[], Iterator[Any]], size: int, logs: bool
    ) -> None:
        self._iterate, self._logs = iterate, logs
        self._kept: queue.Queue[tuple[str, Any]] = queue.Queue(size)
        self._ends = threading.Event()
        self._thread = threading.Thread(
            target=self._read, name="tfdist-reads-ahead", daemon=True
        )
        self._thread.start()

    def batches(self) -> Iterator[Any]:
        """Yields the batches in order, until the pass ends or the reader is closed."""
        while not self._ends.is_set():
            try:
                kind, value = self._kept.get(timeout=_LOOK_S)
            except queue.Empty:
                continue
            if kind == "batch":
                yield value
            elif kind == "error":
                raise value
            else:
                return

    def close(self) -> None:
        """Stops the thread; waits up to 10 s for it to finish the current batch."""
        self._ends.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)

    def _read(self) -> None:
        try:
            for number, batch in enumerate(self._iterate()):
                if self._logs:
                    _log.info("batch %d was read", number)
                if not self._keep("batch", batch):
                    return
            self._keep("end", None)
        except BaseException as error:  # noqa: BLE001 - raised again by `batches`
            self._keep("error", error)

    def _keep(self, kind: str, value: Any) -> bool:
        """Queues an item; returns False if the reader is closed before it fits."""
        while not self._ends.is_set():
            try:
                self._kept.put((kind, value), timeout=_LOOK_S)
                return True
            except queue.Full:
                continue
        return False
