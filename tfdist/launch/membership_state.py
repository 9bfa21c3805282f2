"""State of an elastic job's members, and quantities that are derived from it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from tfdist.launch import membership_reasons as reasons
from tfdist.launch.membership_actions import START_FAILURES, Request
from tfdist.launch.membership_handover import Handovers

ROUND_LIMIT_S = 300.0  # for the members of a generation to send their requests
START_LIMIT_S = 600.0  # for a newcomer to become ready
# With a small share of busy CPUs, a spare might not be ready within START_LIMIT_S.
BACKGROUND_LIMIT_S = 60.0
# For a member that another member reports as failed, to send its request or exit.
NAMED_LIMIT_S = 5.0
LEAVE_LIMIT_S = 25.0  # for a member that got SIGTERM to leave, save and exit
REPLACE_EVERY_S = 600.0  # between two replacements of slow members
MOST_ROUNDS = 3  # consecutive rounds after a failure without a newly committed step


def assign_ranks(old: Mapping[int, int], newcomers: Sequence[int]) -> dict[int, int]:
    """Assigns the ranks of a generation; as many members as possible keep their rank.

    A member keeps a rank that is below the new number of ranks. The free ranks go first
    to the members whose rank is too high, in the order of their old ranks, and then to
    the newcomers. A newcomer does not become rank 0, which writes files and prints, if
    a member continues. If rank 0 is free and no member's rank is too high, the member
    with the lowest rank becomes rank 0.

    Args:
        old: old rank of each member that continues.
        newcomers: numbers of the newcomers, in the order in which they became ready.

    Returns:
        New rank of each member, in the order of the new ranks.

    Example:
        >>> from tfdist.launch.membership_state import assign_ranks
        >>> assign_ranks({0: 0, 2: 2, 3: 3}, newcomers=[])  # member 1 was lost
        {0: 0, 3: 1, 2: 2}
        >>> assign_ranks({0: 0, 2: 2, 3: 3}, newcomers=[4])
        {0: 0, 4: 1, 2: 2, 3: 3}
        >>> assign_ranks({1: 1, 2: 2}, newcomers=[3])
        {1: 0, 3: 1, 2: 2}
    """
    size = len(old) + len(newcomers)
    ranks = {member: rank for member, rank in old.items() if rank < size}
    moved = sorted(old.keys() - ranks.keys(), key=lambda member: old[member])
    if ranks and not moved and 0 not in ranks.values():
        ranks[min(ranks, key=lambda member: ranks[member])] = 0
    free = sorted(set(range(size)) - set(ranks.values()))
    ranks.update(zip([*moved, *newcomers], free, strict=True))
    return dict(sorted(ranks.items(), key=lambda item: item[1]))


class MembershipState:
    """State of a `Membership`; see there for the arguments and attributes."""

    def __init__(
        self,
        size: int,
        *,
        min_size: int,
        max_restarts: int,
        max_size: int | None = None,
        spares: int = 0,
        round_limit_s: float = ROUND_LIMIT_S,
        start_limit_s: float = START_LIMIT_S,
        leave_limit_s: float = LEAVE_LIMIT_S,
        replace_every_s: float = REPLACE_EVERY_S,
    ) -> None:
        if not 1 <= min_size <= size:
            raise ValueError(
                f"expected 1 <= min_size <= size, got min_size {min_size}, size {size}"
            )
        max_size = size if max_size is None else max_size
        if max_size < size:
            raise ValueError(
                f"expected max_size >= size, got max_size {max_size}, size {size}"
            )
        if max_restarts < 0 or spares < 0:
            raise ValueError(
                "expected max_restarts >= 0 and spares >= 0, got max_restarts "
                f"{max_restarts}, spares {spares}"
            )
        self._size = size
        self._min_size = min_size
        self._max_size = max_size
        self._room = max_size  # number of processes, spares excluded, that can run
        self._unwanted: set[int] = set()  # processes on slots that were removed
        self._is_ending = False  # a member has ended with exit code 0
        self._max_restarts = max_restarts
        self._spares = spares
        self._round_limit_s = round_limit_s
        self._start_limit_s = start_limit_s
        self._replace_every_s = replace_every_s
        # A live process is a member of the newest generation, or a newcomer.
        self._generation = 1
        self._ranks = {member: member for member in range(size)}
        self._live = set(range(size))
        self._failed: set[int] = set()  # members whose exit code was not 0
        self._killed: set[int] = set()
        self._surplus: set[int] = (
            set()
        )  # newcomers that were killed as no longer needed
        self._losses = 0  # processes that were lost, and have not been replaced
        self._refused: dict[int, str] = {}  # process → reason
        # Requests that are not answered yet, in the order of arrival.
        self._requests: dict[int, Request] = {}
        self._opened_s: float | None = None  # None: no round is open
        self._unready: set[int] = set()  # live newcomers that have not become ready
        # Newcomer → time at which it leaves the background even if it is not needed.
        self._background: dict[int, float] = {}
        # Time by which a newcomer must be ready, a member that was reported as failed
        # must have sent its request, or a refused process must have exited.
        self._deadlines_s: dict[int, float] = {}
        self._announced = 0  # the last generation that was told of newcomers
        self._handovers = Handovers(leave_limit_s)
        self._slow: int | None = None  # member that leaves when a newcomer is ready
        self._slow_since_s: float | None = None  # when the last `replace` was accepted
        self._is_preempting = False  # the whole job got SIGTERM
        self.preempted = False
        self._is_saved = False  # all members of a preempted job have ended
        self.restarts = 0
        # A newcomer's number is larger than any rank that its program may see. Until it
        # joins, its program never runs as rank 0: in a job of one rank, it runs as
        # rank 1 of 2.
        self._next_member = max(max_size, 2)
        self.start_failures = 0
        self.program = ""
        self.committed = -1
        self._committed_at_failure = -1
        self._rounds_without_step = 0
        self.finished = False
        self.stop_reason = ""

    @property
    def generation(self) -> int:
        """Number of the newest generation."""
        return self._generation

    @property
    def ranks(self) -> dict[int, int]:
        """Member → rank in the newest generation; includes members that have ended."""
        return dict(self._ranks)

    @property
    def size(self) -> int:
        """Number of ranks that the job should have, excluding finished members."""
        return self._size

    @property
    def unwanted(self) -> frozenset[int]:
        """Processes on slots that were removed."""
        return frozenset(self._unwanted)

    @property
    def surplus(self) -> frozenset[int]:
        """Newcomers that were killed because they were no longer needed."""
        return frozenset(self._surplus)

    @property
    def live(self) -> frozenset[int]:
        """Processes that have not ended, newcomers included."""
        return frozenset(self._live)

    @property
    def left(self) -> set[int]:
        """Members that were dismissed."""
        return self._handovers.dismissed

    def _members(self) -> list[int]:
        """Returns the live members of the newest generation that were not dismissed."""
        return [m for m in self._ranks if m in self._live and m not in self.left]

    def _asked_to_leave(self) -> list[int]:
        """Returns the members that leave after SIGTERM, or because they are slow."""
        return [m for m in self._members() if m in self._handovers.deadlines_s]

    def _leaving(self) -> list[int]:
        """Returns the members that leave: on request, and because the slots changed.

        Members on removed slots leave first, whatever the size of the job, while at
        least `min_size` members or ready newcomers are left. If the job shrinks, a slow
        member that waits for its replacement leaves next, and then the members with the
        highest ranks.
        """
        asked = self._asked_to_leave()
        staying = [
            m for m in self._members() if m not in asked and m not in self._killed
        ]
        staying.sort(
            key=lambda member: (
                member in self._unwanted,
                member == self._slow,
                self._ranks[member],
            )
        )
        wanted = sum(member not in self._unwanted for member in staying)
        most = min(self._size, max(wanted, self._fewest_staying()))
        return [*asked, *staying[most:]]

    def _fewest_staying(self) -> int:
        """Returns the smallest number of members that may stay.

        Ready newcomers count as members if `_target` is at least `min_size`. At least
        one member stays, to send its state to the newcomers.
        """
        is_joined = self._min_size <= self._target()
        return max(1, self._min_size - (len(self._ready()) if is_joined else 0))

    def _is_going(self, member: int | None) -> bool:
        """Returns whether a member leaves, or will leave once newcomers have joined."""
        return member in self._unwanted or member in self._leaving()

    def _ready(self) -> list[int]:
        """Returns the newcomers that can join, in the order in which they got ready."""
        return [
            member
            for member in self._requests
            if member not in self._ranks
            and member not in self._killed
            and member not in self._unwanted
        ]

    def _preparing(self) -> list[int]:
        """Returns the newcomers that are not ready yet, but may become ready."""
        gone = self._killed | self._unwanted | self._refused.keys()
        return sorted(self._unready - gone)

    def _needed_newcomers(self) -> list[int]:
        """Returns the newcomers that are next in line for the vacant places."""
        return [*self._ready(), *self._preparing()][: self._vacancies()]

    def _is_open(self) -> bool:
        """Returns whether a live member of the newest generation has sent a request."""
        return any(member in self._requests for member in self._members())

    def _is_complete(self) -> bool:
        """Returns whether every live member has sent a request and was not killed."""
        return all(
            member in self._requests and member not in self._killed
            for member in self._members()
        )

    def _is_over(self) -> bool:
        return self.finished or self._is_saved or bool(self.stop_reason)

    def _target(self) -> int:
        """Returns the wanted number of members, limited by the room on the hosts."""
        return min(self._size, self._room)

    def _vacancies(self) -> int:
        """Returns the number of places for newcomers.

        Members that leave, or whose slots were removed, count as gone.
        """
        going = self._unwanted.union(self._leaving())
        return max(
            0, self._target() - len([m for m in self._members() if m not in going])
        )

    def _openings(self, members: Collection[int]) -> int:
        """Returns the number of newcomers that can join the given members.

        If the only member is on a removed slot, at least one newcomer can join, to take
        over the member's state.
        """
        is_last = len(members) == 1 and self._unwanted.issuperset(members)
        return max(self._target() - len(members), int(is_last))

    def _wanted_spares(self) -> int:
        """Returns the number of newcomers to keep beyond those for vacant places."""
        waits = self._slow in self._members() and not self._is_going(self._slow)
        return max(self._spares, waits and self._max_restarts > 0)

    def _surplus_newcomers(self) -> list[int]:
        """Returns the newcomers that are no longer needed, or are on removed slots."""
        if self._is_preempting or self.preempted:
            return []
        useful = self._vacancies() + self._wanted_spares()
        newcomers = self._live - self._ranks.keys() - self._killed - self.left
        misplaced = newcomers & self._unwanted
        return [*sorted(misplaced), *[*self._ready(), *self._preparing()][useful:]]

    def _wanted_processes(self) -> int:
        """Returns the number of processes that the job should have."""
        # If so many members have finished that fewer than min_size are left,
        # replacements cannot change that.
        is_over = self._is_preempting or self.preempted or self._size < self._min_size
        return 0 if is_over else self._target() + self._wanted_spares()

    def _needs_process(self) -> bool:
        """Returns whether too few processes are running on slots that remain."""
        return len(self._live - self._unwanted) < self._wanted_processes()

    def _missing(self) -> int:
        """Returns the number of processes that are missing once members have left."""
        gone = self.left | self._surplus | self._unwanted | set(self._leaving())
        return max(0, self._wanted_processes() - len(self._live - gone))

    def _may_start(self) -> bool:
        """Returns whether one more process may be started."""
        return self._starts_left() > 0 and self.start_failures < START_FAILURES

    def reason_to_keep(self, member: int, now_s: float) -> str:
        """Returns why a slow member is not replaced; "" if it can be replaced.

        Args:
            member: number of the member.
            now_s: current time.
        """
        if self._is_over() or self._is_preempting or self.preempted:
            return "the job is ending"
        if member not in self._members() or self._is_going(member):
            return "it is already leaving"
        if member == self._slow:
            return "its replacement is being started"
        before_s = self._slow_since_s
        if before_s is not None and now_s < before_s + self._replace_every_s:
            return (
                "the last replacement of a slow rank was begun less than "
                f"{self._replace_every_s / 60:g} minutes ago"
            )
        if not self._may_replace():
            return reasons.no_start(self._max_restarts, self.start_failures)
        return ""

    def _may_replace(self) -> bool:
        """Returns whether there is, or may be, a newcomer to replace a slow member."""
        if self._max_restarts > 0 and self.start_failures < START_FAILURES:
            return True
        return len([*self._ready(), *self._preparing()]) > self._vacancies()

    def _free_starts(self) -> int:
        """Returns the number of missing processes that do not count as restarts.

        They are started because the job grows, or to replace a member that leaves. With
        max_restarts=0, members that leave on request are not replaced.
        """
        not_replaced = 0 if self._max_restarts else len(self._asked_to_leave())
        return max(0, self._missing() - self._losses - not_replaced)

    def _starts_left(self) -> int:
        """Returns the number of processes that may still be started now."""
        return self._max_restarts - self.restarts + self._free_starts()

    def _largest_size(self) -> int:
        """Returns the largest size that the next generation can reach by waiting.

        Members that leave do not count, but their replacements may.
        """
        preparing, leaving = len(self._preparing()), len(self._leaving())
        starts = self._starts_left()
        # A newcomer that becomes ready ends the series of failed starts.
        if self.start_failures >= START_FAILURES and not preparing:
            starts = 0
        there = len(self._members()) - leaving + len(self._ready()) + preparing
        return min(self._target(), there + starts)

    def _must_end(self) -> bool:
        """Returns whether the next generation is the last, in which members save."""
        if self._is_preempting or self.preempted:
            return True
        leaving = len(self._leaving())
        if leaving == 0:
            return False
        return leaving == len(self._members()) or self._largest_size() < self._min_size

    def _find_refusal(self, request: Request, place: int) -> str:
        """Returns the reason to refuse a request; "" if it is not refused."""
        if reason := self.stop_reason or self._refused.get(request.member):
            return reason
        if request.generation > place:
            return reasons.no_place(request.member, request.generation)
        return self._other_program(request) if place == 0 else ""

    def _other_program(self, request: Request) -> str:
        """Returns why a newcomer's program is refused; "" if equal, or not known."""
        expected, got = self.program, request.program
        if not expected or not got or expected == got:
            return ""
        return reasons.other_program()

    def _lateness(self, member: int) -> str:
        """Returns the reason to kill a process that has exceeded its time limit."""
        if member in self._refused:
            return f"it has not ended {self._start_limit_s:g} s after a refusal"
        if member in self._ranks:
            return (
                f"another rank reported {NAMED_LIMIT_S:g} s ago that rank "
                f"{self._ranks[member]} had failed"
            )
        return f"it is not ready {self._start_limit_s:g} s after its start"

    def _reason_for_too_few(self, left: int) -> str:
        """Returns the reason to stop with too few members."""
        return reasons.too_few(
            left,
            self._min_size,
            have_others_finished=self._size < self._min_size,
            room=self._room,
            max_restarts=self._max_restarts,
            start_failures=self.start_failures,
        )
