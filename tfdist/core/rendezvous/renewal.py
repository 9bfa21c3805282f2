"""Asks tfdistrun for this process's place in the next generation of an elastic job.

A *generation* is a set of processes that are connected as ranks. The *place* of a
process is its rank in a generation, with the size and the local and cross ranks. In an
elastic job (`tfdistrun --min-np`), the surviving ranks of a generation that has ended
ask for their places in the next generation. So does a newcomer, a process that was
started later to join. tfdistrun answers when it knows which processes are left
(`tfdist.launch.membership`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from tfdist.core.rendezvous.address import split_address
from tfdist.core.rendezvous.environment import detect
from tfdist.core.rendezvous.errors import RendezvousError, invalid, rank_failed
from tfdist.core.rendezvous.secret import read_secret_file
from tfdist.core.rendezvous.store import (
    SLOW,
    MissingKeysError,
    StoreClient,
    answer_key,
    ask_step_key,
    begun_key,
    change_key,
    end_key,
    join_key,
    leave_key,
    request_key,
    step_key,
)

_log = logging.getLogger("tfdist")
MEMBER = "TFDIST_MEMBER"
MAX_SIZE = "TFDIST_MAX_SIZE"
_CONNECT_S = 10.0
_CLOSE_S = 2.0
_LONGEST_WAIT_S = 86400.0  # of one request to the store
_RETRY_S = 1.0
_LEAVE_ATTEMPTS = 5

_Result = TypeVar("_Result")


@dataclass(frozen=True, kw_only=True)
class Place:
    """A process's rank, local rank and cross rank in a generation, with the sizes.

    Attributes:
        generation: number of the generation.
        rank: rank of this process in the generation.
        size: number of ranks of the generation.
        local_rank: index among the ranks of this host.
        local_size: number of ranks of this host.
        cross_rank: index among the ranks with equal local_rank.
        cross_size: number of ranks with equal local_rank.
        is_last: whether the ranks of this generation only save their state and exit,
            instead of running steps.
    """

    generation: int
    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    is_last: bool = False

    @classmethod
    def from_answer(cls, answer: Mapping[str, Any]) -> Place:
        """Returns the place that tfdistrun's answer describes."""
        names = [one.name for one in fields(cls) if one.name != "is_last"]
        numbers = {name: int(answer[name]) for name in names}
        return cls(**numbers, is_last=bool(answer["is_last"]))

    def variables(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Returns the launcher's variables for this place.

        Args:
            environ: current variables. Horovod's names are included if they are set.

        Example:
            >>> from tfdist.core.rendezvous.renewal import Place
            >>> local = {"local_rank": 0, "local_size": 2}
            >>> cross = {"cross_rank": 0, "cross_size": 2}
            >>> place = Place(generation=2, rank=0, size=3, **local, **cross)
            >>> found = place.variables({"HOROVOD_RANK": "1"})
            >>> found["TFDIST_SIZE"], found["HOROVOD_RANK"], "HOROVOD_SIZE" in found
            ('3', '0', False)
        """
        values = {
            "RANK": str(self.rank),
            "SIZE": str(self.size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_SIZE": str(self.local_size),
            "CROSS_RANK": str(self.cross_rank),
            "CROSS_SIZE": str(self.cross_size),
        }
        own = {f"TFDIST_{name}": value for name, value in values.items()}
        of_horovod = {f"HOROVOD_{name}": value for name, value in values.items()}
        return own | {k: v for k, v in of_horovod.items() if k in environ}


class DismissedError(Exception):
    """This process has left the job and has to exit."""


def member_of(environ: Mapping[str, str]) -> int | None:
    """Returns this process's member number in its elastic job; None in other jobs."""
    text = environ.get(MEMBER, "")
    return int(text) if text.isdecimal() else None


def is_elastic(environ: Mapping[str, str]) -> bool:
    """Returns whether this process belongs to an elastic job."""
    return member_of(environ) is not None


def is_newcomer(environ: Mapping[str, str]) -> bool:
    """Returns whether this process was started after the job began.

    tfdistrun gives such a process a member number that no rank has. The result is valid
    only until the process has its first place.

    Example:
        >>> from tfdist.core.rendezvous.renewal import is_newcomer
        >>> place = {"TFDIST_RANK": "2", "TFDIST_SIZE": "3"}
        >>> is_newcomer({**place, "TFDIST_MEMBER": "3"})
        True
    """
    member = member_of(environ)
    return member is not None and member >= detect(environ).size


def largest_size(environ: Mapping[str, str]) -> int:
    """Returns the largest number of ranks that this job can have.

    It may be smaller than the size that a newcomer has before it joins.

    Example:
        >>> from tfdist.core.rendezvous.renewal import largest_size
        >>> place = {"TFDIST_RANK": "1", "TFDIST_SIZE": "2"}
        >>> largest_size(place), largest_size({**place, "TFDIST_MAX_SIZE": "4"})
        (2, 4)
    """
    text = environ.get(MAX_SIZE, "")
    return int(text) if text.isdecimal() else detect(environ).size


def ask_for_place(
    environ: Mapping[str, str],
    number: int,
    request: Mapping[str, Any],
) -> Place:
    """Sends a request to tfdistrun, and waits for the answer while tfdistrun runs.

    tfdistrun answers a member when all other members have asked or exited. It answers a
    newcomer when rank 0 has completed the current step. To limit both waits, tfdistrun
    kills members that do not ask, and replacements that do not become ready.

    Args:
        environ: variables of the launcher.
        number: number of this process's requests so far, this one included.
        request: fields of `tfdist.launch.membership.Request`, without the member.

    Raises:
        RendezvousError: tfdistrun has exited, or refused the request for the reason in
            the message.
        DismissedError: this process has left the job and has to exit.
    """
    member = member_of(environ)
    key = answer_key(member or 0, number)

    async def exchange() -> dict[str, Any]:
        store = await _connect(environ)
        try:
            own = request_key(member or 0, number)
            await store.set(own, {**request, "member": member})
            while True:
                try:
                    [answer] = await store.wait([key], _LONGEST_WAIT_S)
                    return dict(answer)
                except MissingKeysError:
                    continue  # a spare process (--spares) may wait for days
        finally:
            store.close()

    answer = _run_in_thread(exchange)
    if reason := answer.get("refused"):
        raise rank_failed(str(reason))
    if answer.get("dismissed"):
        raise DismissedError
    return Place.from_answer(answer)


class _Notice:
    """Waits, on a thread, for a notice from tfdistrun to the ranks of a generation.

    Args:
        environ: variables of the launcher.
        generation: number of the current generation.
        name: name of the thread.
    """

    def __init__(self, environ: Mapping[str, str], generation: int, name: str) -> None:
        self._received = False
        self._environ = dict(environ)
        self._generation = generation
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(self._wait())
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def received(self) -> bool:
        """Whether the notice has been received."""
        return self._received

    def close(self) -> None:
        """Ends the thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(asyncio.gather(self._task))
        except asyncio.CancelledError:
            pass  # close() was called
        finally:
            self._loop.close()

    async def _wait(self) -> None:
        while not self._received:
            try:
                await self._wait_once()
            except MissingKeysError:
                continue  # a generation of more than a day
            except RendezvousError as error:  # for example, a busy host
                _log.debug("no connection to tfdistrun: %s", error)
                await asyncio.sleep(_RETRY_S)

    async def _wait_once(self) -> None:
        store = await _connect(self._environ)
        try:
            await self._exchange(store)
            self._received = True
        finally:
            store.close()

    async def _exchange(self, store: StoreClient) -> None:
        """Waits until the notice is received; may be called again after an error."""
        raise NotImplementedError


class JoinNotice(_Notice):
    """Waits for tfdistrun's notice that newcomers are ready to join.

    First, it notifies tfdistrun that the steps of the current generation begin.

    Args:
        environ: variables of the launcher.
        generation: number of the current generation.
        for_leavers: whether to also wait for the notice that ranks have to leave
            because the job shrinks. If False, `EndNotice` waits for that notice.
    """

    def __init__(
        self, environ: Mapping[str, str], generation: int, *, for_leavers: bool = False
    ) -> None:
        self._key = (change_key if for_leavers else join_key)(generation)
        super().__init__(environ, generation, "tfdist-join-notice")

    async def _exchange(self, store: StoreClient) -> None:
        await store.set(begun_key(self._generation), True)
        await store.wait([self._key], _LONGEST_WAIT_S)


class EndNotice(_Notice):
    """Waits for tfdistrun's notice of the step after which a generation ends.

    When tfdistrun asks, this rank reports its number of commits, and has to call
    `wait_for_end` at its next commit.

    Args:
        environ: variables of the launcher.
        generation: number of the current generation.
        committed: function that returns the number of commits of this rank, or None if
            the rank takes no further step. Called on the thread of the notice.
        on_finished: function that is called on the same thread if `committed` has
            returned None.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        generation: int,
        *,
        committed: Callable[[], int | None],
        on_finished: Callable[[], None],
    ) -> None:
        self._committed = committed
        self._on_finished = on_finished
        self._changed = threading.Condition()
        self._was_asked = False
        self._reported: int | None = None
        self._end: int | None = None
        super().__init__(environ, generation, "tfdist-end-notice")

    @property
    def was_asked(self) -> bool:
        """Whether this rank has to call `wait_for_end` at its next commit."""
        with self._changed:
            return self._was_asked

    def wait_for_end(self, timeout_s: float) -> int | None:
        """Returns the number of commits at which the generation ends; None on timeout.

        Args:
            timeout_s: longest time to wait, in seconds.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._end is not None, timeout_s)
            return self._end

    async def _exchange(self, store: StoreClient) -> None:
        await store.wait([ask_step_key(self._generation)], _LONGEST_WAIT_S)
        with self._changed:
            self._was_asked = True
            if self._reported is None:  # it must not change after an error
                self._reported = self._committed()
        if self._reported is None:
            self._on_finished()
            return
        member = member_of(self._environ) or 0
        await store.set(step_key(self._generation, member), self._reported)
        [end] = await store.wait([end_key(self._generation)], _LONGEST_WAIT_S)
        with self._changed:
            self._end = int(end)
            self._changed.notify_all()


def ask_to_leave(environ: Mapping[str, str], *, is_slow: bool = False) -> None:
    """Notifies tfdistrun, from a thread, that this member wants to leave.

    Args:
        environ: variables of the launcher.
        is_slow: whether this member should be replaced because it is slow. tfdistrun
            may then keep it in the job. If False, the member has received SIGTERM, and
            leaves after a step.
    """
    reason = SLOW if is_slow else True

    async def send() -> None:
        for _ in range(_LEAVE_ATTEMPTS):
            try:
                store = await _connect(environ)
            except RendezvousError as error:
                _log.debug("no connection to tfdistrun: %s", error)
                await asyncio.sleep(_RETRY_S)
                continue
            try:
                await store.set(leave_key(member_of(environ) or 0), reason)
                return
            finally:
                store.close()

    def run() -> None:
        with contextlib.suppress(RendezvousError):  # tfdistrun has ended
            asyncio.run(send())

    threading.Thread(target=run, name="tfdist-leave", daemon=True).start()


async def _connect(environ: Mapping[str, str]) -> StoreClient:
    placement = detect(environ)
    if not placement.launcher_runs_store or placement.rendezvous is None:
        raise invalid(
            "an elastic job needs tfdistrun's TFDIST_RENDEZVOUS; pass it on to the rank"
        )
    return await StoreClient.connect(
        split_address(placement.rendezvous),
        read_secret_file(environ.get("TFDIST_SECRET_FILE", "")),
        deadline=time.monotonic() + _CONNECT_S,
        job=placement.job or "",
    )


def _run_in_thread(work: Callable[[], Coroutine[Any, Any, _Result]]) -> _Result:
    """Runs a coroutine on a thread, because the caller may be inside a running loop."""
    result: list[_Result] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            result.append(asyncio.run(work()))
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, name="tfdist-renewal", daemon=True)
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return result[0]
