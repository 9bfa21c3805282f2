"""Simulates the processes, messages, faults and time of an elastic job.

The seed of a world determines all of it. Every message has a random delay; messages of
the same process keep their order. A generation connects when all its members have their
answers and run. A step is committed when all members take part in it. `World.run`
raises `Violation` if an action breaks a rule (see `membership_referee`), if members of
two generations run at the same time, or if the job neither goes on nor stops for a long
time after the last fault.
"""

import heapq
from dataclasses import dataclass, field
from random import Random

from helpers.membership_referee import Referee, Violation, require

from tfdist.launch.membership import Membership
from tfdist.launch.membership_actions import (
    Announce,
    Answer,
    AskStep,
    Dismiss,
    EndAt,
    Fail,
    Kill,
    Prioritize,
    Refuse,
    Request,
    Start,
    Stop,
)

TICK_S = 2.0  # between two polls of the launcher
STEP_S = 0.5
CONNECT_LIMIT_S = 30.0  # for a member that waits for another one to connect
CALM_S = 1500.0  # after the last fault, for the job to run again, or to stop
OPEN_END = 10**9  # steps of a training that does not end before the last fault


@dataclass
class Process:
    """A simulated member or newcomer."""

    number: int
    state: str = "preparing"  # or asking, connecting, running, leaving, exiting, dead
    generation: int = 0
    rank: int = -1
    committed: int = -1
    program: str = "p"
    frozen: bool = False  # it is stopped, or hangs
    looks_stopped: bool = False  # to the launcher, which cannot see that it hangs
    backlog: list = field(default_factory=list)  # what it will do when it continues
    sent_s: float = 0.0  # arrival of its last message to the launcher
    heard_s: float = 0.0  # arrival of the last message to it
    announced: int = 0  # the last generation in which newcomers wait
    has_term: bool = False  # it got SIGTERM, and wants to leave
    is_slow: bool = False  # it has asked to be replaced
    asked: int = 0  # the last generation in which it was asked for its step
    end_at: int | None = None  # of this generation; None: not known yet
    saves: bool = False  # it is in the last generation


@dataclass
class Generation:
    """State that the members of a generation share."""

    number: int
    members: list
    ranks: dict
    connected: bool = False
    base: int = 0  # committed steps of the member with most of them
    stepping: bool = False


class World:
    """A simulated job.

    Args:
        seed: determines the job, its faults and all delays.
        membership: class of the membership that decides about the job.
    """

    _has_faults = True

    def __init__(self, seed, membership=Membership):
        self.rng = rng = Random(seed)
        self.now_s = 0.0
        self._events, self._count = [], 0
        size = rng.randint(2, 8)
        self._growth = growth = Random(f"growth {seed}")
        self._hosts = Random(f"hosts {seed}")
        self._has_resizes = self._draw_resizes()
        # Otherwise a program ends its generation at once, as for newcomers.
        self._hands_over = not self._has_resizes or growth.random() < 0.7
        if self._has_resizes:
            size = max(1, size - growth.randint(0, 3))
        self.settings = {
            "size": size,
            "max_size": size + (growth.randint(0, 4) if self._has_resizes else 0),
            "min_size": min(rng.randint(1, size), rng.randint(1, size)),
            "max_restarts": rng.choice([0, 1, 3, 8, 30, 30]),
            "round_limit_s": 60.0,
            "start_limit_s": 100.0,
            "leave_limit_s": 40.0,
            "replace_every_s": 45.0,
            "spares": Random(seed).choice([0, 0, 1, 2]),
        }
        self.referee = Referee(membership(**self.settings), self, self.settings)
        self.processes = {}
        self.generations = {}
        self._floor = 0
        self.terminated = set()  # members that got SIGTERM
        self._pace_s = rng.choice([0.02, 0.3, 2.0])  # of messages
        self._knows_program = rng.random() < 0.8
        self._target = rng.randint(5, 120) if rng.random() < 0.4 else OPEN_END
        self.calm = False
        self._plan_faults()
        members = [self._new_process(number) for number in range(size)]
        for process in members:
            process.generation, process.rank, process.committed = 1, process.number, 0
            process.state = "connecting"
        self._begin_generation(1, members, {n: n for n in range(size)})
        for process in members:
            self._in_process(self._delay_s(), process, self._arrive)
        self._carry_out(self.referee.begin(self.now_s))

    def _draw_resizes(self):
        """Returns whether the number of members that are wanted changes."""
        return self._growth.random() < 0.5

    # ---- time ----

    def later(self, delay_s, do, *arguments):
        """Calls a function later, even if processes die meanwhile."""
        self._at(self.now_s + delay_s, do, *arguments)

    def _at(self, time_s, do, *arguments):
        """Calls a function at a time; those of one time in the order of the calls.

        A time must not become a delay and a time again: rounded, it would be another.
        """
        self._count += 1
        heapq.heappush(self._events, (time_s, self._count, do, arguments))

    def _in_process(self, delay_s, process, do, *arguments):
        """Calls a function of a process: never if it is dead, later if it is frozen."""
        self.later(delay_s, self._act, process, do, arguments)

    def _act(self, process, do, arguments):
        if process.state == "dead":
            return
        if process.frozen:
            process.backlog.append((do, arguments))
        else:
            do(process, *arguments)

    def _delay_s(self):
        slow = 20 if self._has_faults and self.rng.random() < 0.03 else 1
        return self._pace_s * slow * self.rng.random()

    # ---- facts for the referee ----

    def is_gone(self, member):
        return self.processes[member].state == "dead"

    def is_asking(self, member, generation):
        process = self.processes[member]
        return process.state == "asking" and process.generation == generation

    def wants_to_leave(self, member):
        return self.processes[member].has_term or self.processes[member].is_slow

    def committed_of(self, member):
        return self.processes[member].committed

    def program_of(self, member):
        return self.processes[member].program

    def floor(self):
        """The last step that all members of a generation have committed."""
        return self._floor

    # ---- the launcher ----

    def _tell(self, process, **request):
        """Sends a request of a process, sometimes twice."""
        request = Request(process.number, program=process.program, **request)
        copies = 2 if self.rng.random() < 0.1 else 1
        for _ in range(copies):
            arrival_s = max(self.now_s + self._delay_s(), process.sent_s)
            process.sent_s = arrival_s
            self._at(arrival_s, self._on_request, request)

    def _on_request(self, request):
        self._carry_out(self.referee.request(request, self.now_s))

    def _on_end(self, process, failed):
        self._carry_out(self.referee.ended(process.number, failed, self.now_s))

    def _carry_out(self, actions):
        answers = [action for action in actions if isinstance(action, Answer)]
        if answers:
            members = [self.processes[answer.member] for answer in answers]
            ranks = {answer.member: answer.rank for answer in answers}
            self._begin_generation(answers[0].generation, members, ranks)
        for action in actions:
            match action:
                case Start(member):
                    process = self._new_process(member)
                    self._prepare(process)
                case Prioritize():
                    pass  # the time that a newcomer needs is random
                case Kill(member):
                    process = self.processes[member]
                    self.later(self._delay_s(), self._die, process, True)
                case Answer(member) | Refuse(member) | Dismiss(member):
                    self._notify(self.processes[member], self._on_answer, action)
                case Announce(generation):
                    for process in self.generations[generation].members:
                        self._notify(process, self._on_announce, action)
                case AskStep(generation):
                    for process in self.generations[generation].members:
                        self._notify(process, self._on_ask_step, action)
                case EndAt(generation):
                    for process in self.generations[generation].members:
                        self._notify(process, self._on_end_at, action)
                case Fail(generation):
                    for process in self.generations[generation].members:
                        self._notify(process, self._on_fail, action)
                case Stop():
                    self.later(10.0, self._end_all)

    def _notify(self, process, do, action):
        arrival_s = max(self.now_s + self._delay_s(), process.heard_s)
        process.heard_s = arrival_s
        self._at(arrival_s, self._act, process, do, (action,))

    def _tick(self):
        for process in list(self.processes.values()):
            is_seen = process.frozen and process.looks_stopped
            if is_seen and process.state != "dead" and self.rng.random() < 0.5:
                self._carry_out(self.referee.stopped(process.number, self.now_s))
        self._carry_out(self.referee.poll(self.now_s))
        if self.calm:
            self._continue_job()
        self.later(TICK_S, self._tick)

    def _continue_job(self):
        """Lets members continue if all of the newest generation are frozen.

        The membership does not kill them, since the state of the training would be
        lost: whoever has stopped them has to continue them.
        """
        members = self.generations[self.referee.generation].members
        there = [process for process in members if process.state != "dead"]
        if all(process.frozen for process in there):
            for process in there:
                self._thaw(process)

    def _end_all(self):
        for process in self.processes.values():
            self._die(process, failed=True)

    # ---- newcomers ----

    def _new_process(self, number):
        process = self.processes[number] = Process(number)
        process.program = "p" if self._knows_program else ""
        return process

    def _prepare(self, process):
        fates = ["ready", "dies", "hangs", "other program", "unknown program"]
        fate = "ready"
        if not self.calm:
            fate = self.rng.choices(fates, self._fates)[0]
        if fate == "dies":
            failed = self.rng.random() < 0.9
            self.later(self.rng.uniform(1, 20), self._die, process, failed)
        elif fate == "hangs":
            return
        elif fate == "other program":
            process.program = "other"
        elif fate == "unknown program":
            process.program = ""
        self._in_process(self.rng.uniform(3, 30), process, self._become_ready)

    def _become_ready(self, process):
        process.state = "asking"
        self._tell(process, generation=0, committed=-1)

    # ---- a generation ----

    def _begin_generation(self, number, members, ranks):
        self.generations[number] = Generation(number, members, ranks)
        for after_s, kill in self._kills_at_start(number):
            self.later(after_s, self._fault, kill)

    def _on_answer(self, process, action):
        if isinstance(action, Refuse):
            process.state = "exiting"
            self._in_process(self._delay_s(), process, self._die, True)
            return
        if isinstance(action, Dismiss):
            process.state = "exiting"
            failed = self.rng.random() < 0.8  # its exit code means nothing
            self._in_process(self.rng.uniform(0, 5), process, self._die, failed)
            return
        require(process.state == "asking", "an Answer to a request", action)
        right = action.generation > process.generation
        require(right, "generations of a member only grow", action)
        process.state = "connecting"
        process.generation, process.rank = action.generation, action.rank
        process.end_at, process.saves = None, action.is_last
        self._arrive(process)

    def _arrive(self, process):
        generation = self.generations[process.generation]
        limit_s = CONNECT_LIMIT_S * self.rng.uniform(1, 2)
        self._in_process(limit_s, process, self._on_connect_limit, generation)
        self._connect(generation)

    def _connect(self, generation):
        if generation.connected or not all(
            self._takes_part(p, generation) for p in generation.members
        ):
            return
        generation.connected = True
        generation.base = max(p.committed for p in generation.members)
        for process in generation.members:
            self._in_process(self._delay_s(), process, self._run, generation)

    def _takes_part(self, process, generation):
        there = process.generation == generation.number and not process.frozen
        return there and process.state in ("connecting", "running")

    def _run(self, process, generation):
        """The process has received the state of the training, and begins to run."""
        if process.state != "connecting" or process.generation != generation.number:
            return
        if any(p.state == "dead" for p in generation.members):
            self._lose(process, generation, ())
            return
        process.state, process.committed = "running", generation.base
        running = [p for p in self.processes.values() if p.state == "running"]
        numbers = {p.generation for p in running}
        require(len(numbers) == 1, "a single generation runs", numbers)
        ranks = [p.rank for p in running]
        require(len(set(ranks)) == len(ranks), "no two members have one rank", ranks)
        if process.saves:
            process.state = "exiting"
            self._in_process(self.rng.uniform(0, 10), process, self._die, True)
            return
        if process.has_term:
            self._wish_to_leave(process)
        if process.asked == generation.number:
            self._report_step(process)
        if process.announced == generation.number:
            self._on_announce(process, Announce(generation.number))
        self._begin_step(generation)

    def _can_step(self, generation):
        return all(
            p.state == "running" and self._takes_part(p, generation)
            for p in generation.members
        )

    def _begin_step(self, generation):
        if generation.stepping or not self._can_step(generation):
            return
        steps = {p.committed for p in generation.members}
        require(len(steps) == 1, "all members are at the same step", steps)
        if min(steps) >= self._target:
            for process in generation.members:
                self._finish(process)
            return
        if any(p.asked == generation.number for p in generation.members):
            if not self._may_pass(generation):
                return
        generation.stepping = True
        if min(steps) == self._poisoned_step:
            self.later(STEP_S / 2, self._die, generation.members[-1], True)
        self.later(STEP_S, self._end_step, generation)

    def _end_step(self, generation):
        if not generation.stepping:
            return
        generation.stepping = False
        if not self._can_step(generation):
            return
        for process in generation.members:
            process.committed += 1
            self._floor = max(self._floor, process.committed)
        self._begin_step(generation)

    # ---- handover ----

    def _may_pass(self, generation):
        """Ends the generation for members at its last step; others wait, or go on."""
        waits = False
        for process in generation.members:
            if process.asked != generation.number or process.state != "running":
                continue
            if process.end_at is None:
                waits = True
            elif process.committed >= process.end_at:
                waits = True
                is_last = process.committed == process.end_at
                require(is_last, "no member is beyond the last step", process)
                process.state = "leaving"
                self._in_process(self._delay_s(), process, self._ask_in_order)
        return not waits

    def _ask_in_order(self, process):
        """The process asks for its place, and is still connected with the others."""
        process.state = "asking"
        self._tell(process, generation=process.generation, committed=process.committed)
        self._maybe_fault_when_asking()

    def _on_ask_step(self, process, action):
        if not self._hands_over:
            if not self.referee.preempting:  # else it is only killed
                self._on_announce(process, Announce(action.generation))
            return
        process.asked = max(process.asked, action.generation)
        if process.state == "running" and process.generation == action.generation:
            self._report_step(process)

    def _report_step(self, process):
        generation = self.generations[process.generation]
        if process.committed >= self._target:  # it waits for the end of the others
            self._lose(process, generation, ())
            return
        arrival_s = max(self.now_s + self._delay_s(), process.sent_s)
        process.sent_s = arrival_s
        arguments = (process.number, process.generation, process.committed)
        self._at(arrival_s, self._on_step, *arguments)

    def _on_step(self, member, generation, committed):
        actions = self.referee.at_step(member, generation, committed, self.now_s)
        self._carry_out(actions)

    def _on_end_at(self, process, action):
        if process.generation == action.generation:
            process.end_at = action.committed
            if process.state == "running":
                generation = self.generations[process.generation]
                self._may_pass(generation)  # others may have gone before
                self._begin_step(generation)

    def _wish_to_leave(self, process):
        self.later(self._delay_s(), self._on_wish, process.number)

    def _on_wish(self, member):
        self._carry_out(self.referee.leave(member, self.now_s))

    def _term(self, process):
        """The process gets SIGTERM; a newcomer ends, others want to leave."""
        if process.has_term or process.state in ("exiting", "dead"):
            return
        has_state = process.committed >= 0 and process.state != "preparing"
        if not (has_state and self._hands_over):
            self._die(process, failed=True)
            return
        process.has_term = True
        self.terminated.add(process.number)
        self._wish_to_leave(process)

    def _slow(self, process):
        """The process finds out that it is slow, and asks to be replaced."""
        if process.state == "running":
            process.is_slow = True
            self.later(self._delay_s(), self._on_slow, process.number)

    def _on_slow(self, member):
        self._carry_out(self.referee.replace(member, self.now_s))

    def _finish(self, process):
        process.state = "exiting"
        self._in_process(self._delay_s(), process, self._die, False)

    # ---- the end of a generation, for one of its members ----

    def _break_off(self, generation):
        """Ends a step when a member is lost; each other one finishes or undoes it."""
        share = self.rng.choice([0.0, 0.0, 0.5, 1.0]) if generation.stepping else 0.0
        for process in generation.members:
            if process.state == "running" and self._takes_part(process, generation):
                process.committed += self.rng.random() < share
        generation.stepping = False

    def _peer_is_lost(self, lost):
        """Lets the members that are connected with a process notice its loss."""
        generation = self.generations.get(lost.generation)
        if generation is None or not generation.connected:
            return
        self._break_off(generation)
        named = (lost.rank,) if self.rng.random() < 0.7 else ()
        for process in generation.members:
            if process is not lost and process.generation == generation.number:
                after_s = self.rng.random()
                self._in_process(after_s, process, self._lose, generation, named)

    def _lose(self, process, generation, named):
        """The process notices that its generation is over, and asks for the next."""
        is_in = process.generation == generation.number
        if not is_in or process.state not in ("connecting", "running"):
            return
        if process.committed >= self._target and self.rng.random() < 0.5:
            self._finish(process)
            return
        process.state = "leaving"
        slow = self._has_faults and not self.calm and self.rng.random() < 0.03
        delay_s = self.rng.uniform(1, 150) if slow else self._delay_s()
        self._in_process(delay_s, process, self._ask, named)

    def _ask(self, process, named):
        process.state = "asking"
        self._tell(
            process,
            generation=process.generation,
            committed=process.committed,
            failed=named,
        )
        generation = self.generations[process.generation]
        if generation.connected:  # its connections end
            self._break_off(generation)
            named = (process.rank,) if self.rng.random() < 0.2 else named
            for other in generation.members:
                after_s = self.rng.random()
                self._in_process(after_s, other, self._lose, generation, named)
        self._maybe_fault_when_asking()

    def _on_announce(self, process, action):
        process.announced = max(process.announced, action.generation)
        if process.state == "running" and process.generation == action.generation:
            self._lose(process, self.generations[action.generation], ())

    def _on_fail(self, process, action):
        if process.state == "connecting" and process.generation == action.generation:
            named = (action.rank,) if self.rng.random() < 0.7 else ()
            self._lose(process, self.generations[action.generation], named)

    def _on_connect_limit(self, process, generation):
        """Ends the wait for silent members; the end of members is reported by Fail."""
        if process.state != "connecting" or process.generation != generation.number:
            return
        silent = [
            generation.ranks[p.number]
            for p in generation.members
            if not self._takes_part(p, generation)
        ]
        dead = any(p.state == "dead" for p in generation.members)
        if silent and not dead:
            named = tuple(silent) if self.rng.random() < 0.7 else ()
            self._lose(process, generation, named)
        else:
            self._in_process(5.0, process, self._on_connect_limit, generation)

    # ---- ends and faults ----

    def _die(self, process, failed):
        if process.state == "dead":
            return
        process.state, process.backlog = "dead", []
        for _ in range(2 if self.rng.random() < 0.1 else 1):
            self.later(self._delay_s(), self._on_end, process, failed)
        self._peer_is_lost(process)

    def _freeze(self, process, kind):
        process.frozen = True
        process.looks_stopped = kind == "stop"
        suspect_s = self.rng.uniform(3, 6)
        self.later(suspect_s, self._suspect, process, process.generation)
        if self.rng.random() < 0.5:
            self.later(self.rng.uniform(0.5, 30), self._thaw, process)

    def _suspect(self, process, generation):
        if process.frozen and process.generation == generation:
            self._peer_is_lost(process)

    def _thaw(self, process):
        process.frozen = False
        backlog, process.backlog = process.backlog, []
        for do, arguments in backlog:
            self._act(process, do, arguments)
        generation = self.generations.get(process.generation)
        if generation is not None:
            self._connect(generation)
            self._begin_step(generation)

    def _plan_faults(self):
        times = self._draw_faults() + self._plan_resizes()
        times += self._plan_losses_of_hosts()
        self.last_fault_s = max(times, default=0.0) + 60.0
        self.later(self.last_fault_s, self._begin_calm)
        self.later(0.0, self._tick)

    def _draw_faults(self):
        """Plans faults of processes; returns the times."""
        rng = self.rng
        self._poisoned_step = rng.randint(0, 60) if rng.random() < 0.1 else -1
        self._death_at_start = rng.choice([0.0, 0.1, 0.3, 0.6])
        self._death_when_asking = rng.choice([0.0, 0.0, 0.05, 0.2])
        self._fates = rng.choice(
            [(80, 10, 3, 5, 2), (80, 10, 3, 5, 2), (1, 2, 1, 1, 1)]
        )
        self._has_signals = rng.random() < 0.5
        times = []
        for _ in range(rng.randint(0, 6)):
            first_s = rng.uniform(0, 150)
            burst = rng.choice([1, 1, 2, 3])
            times += [first_s + rng.uniform(0, 3) for _ in range(burst)]
        for time_s in times:
            kinds = (
                ["kill"] * 60
                + ["stop"] * 30
                + ["hang"] * 15
                + ["several"] * 8
                + ["exit"] * 4
            )
            if self._has_signals:
                kinds += ["term"] * 80 + ["terms"] * 20 + ["preempt"] * 20
                kinds += ["slow"] * 100
            kind = rng.choice([*kinds, "all"])
            self.later(time_s, self._fault, kind)
        return times

    def _plan_resizes(self):
        """Changes the wanted number of members; returns the times."""
        growth, times = self._growth, []
        for _ in range(growth.randint(1, 8) if self._has_resizes else 0):
            first_s = growth.uniform(0, 150)
            burst = growth.choice([1, 1, 2, 3])
            times += [first_s + growth.uniform(0, 3) for _ in range(burst)]
        most = self.settings["max_size"] + 2
        for time_s in times:
            self.later(time_s, self._resize, growth.randint(0, most))
        return times

    def _plan_losses_of_hosts(self):
        """Lets hosts be lost or get SIGTERM, and some return; returns the times."""
        times, hosts = [], self._hosts
        for _ in range(hosts.randint(1, 3) if hosts.random() < 0.4 else 0):
            slots, time_s = hosts.randint(1, 3), hosts.uniform(0, 150)
            self.later(time_s, self._lose_host, slots, hosts.random() < 0.3)
            times.append(time_s)
            if hosts.random() < 0.5:
                times.append(time_s + hosts.uniform(1, 60))
                self.later(times[-1], self._change_room, slots)
        return times

    def _lose_host(self, slots, is_signalled):
        there = [p for p in self.processes.values() if p.state != "dead"]
        if self.referee.stop:
            return
        chosen = self._hosts.sample(there, min(slots, len(there)))
        lost = [] if is_signalled else [process.number for process in chosen]
        self._change_room(-slots, lost)
        for process in chosen:
            if is_signalled:
                self._in_process(0.0, process, self._term)
            else:
                self._die(process, failed=True)

    def _change_room(self, slots, lost=()):
        room = self.referee.room + slots
        self._carry_out(self.referee.set_room(room, lost, self.now_s))

    def _resize(self, wanted):
        self._carry_out(self.referee.resize(wanted, self.now_s))

    def _begin_calm(self):
        self.calm = True

    def _kills_at_start(self, number):
        """Kills while the members of a generation connect: (after seconds, kind)."""
        if number == 1 or self.calm or self.rng.random() >= self._death_at_start:
            return []
        kind = self.rng.choice(["kill", "kill", "several", "several", "stop", "hang"])
        return [(self.rng.uniform(0, 2) * self._pace_s, kind)]

    def _maybe_fault_when_asking(self):
        if not self.calm and self.rng.random() < self._death_when_asking:
            self.later(self._delay_s(), self._fault, "kill")

    def _fault(self, kind):
        there = [p for p in self.processes.values() if p.state != "dead"]
        if self.calm or not there or self.referee.stop:
            return
        some = self.rng.choice(there)
        if kind == "kill":
            self._die(some, failed=True)
        elif kind == "term":
            self._in_process(0.0, some, self._term)
        elif kind == "slow":
            self._in_process(0.0, some, self._slow)
        elif kind in ("terms", "preempt"):
            if kind == "preempt":
                self._carry_out(self.referee.preempt(self.now_s))
                chosen = there
            else:
                chosen = self.rng.sample(there, self.rng.randint(1, len(there)))
            for process in chosen:
                self._in_process(self._delay_s(), process, self._term)
        elif kind == "exit":
            if some.state in ("running", "preparing"):
                self._die(some, failed=False)
        elif kind in ("stop", "hang"):
            self._freeze(some, kind)
        else:
            least = len(there) if kind == "all" else 1
            for process in self.rng.sample(there, self.rng.randint(least, len(there))):
                self._die(process, failed=True)

    # ---- the whole run ----

    def run(self):
        """Runs until the job has ended; returns "finished" or "stopped"."""
        deadline_s = self.last_fault_s + CALM_S
        while True:
            self.now_s, _, do, arguments = heapq.heappop(self._events)
            do(*arguments)
            if do != self._tick:
                continue
            if all(p.state == "dead" for p in self.processes.values()):
                if self.referee.stop is not None:
                    return "stopped"
                if self.referee.preempted:
                    return "preempted"
                if self.referee.has_finished():
                    return "finished"
            if self._target == OPEN_END and self.calm and self._is_well():
                self._target = self._floor + 5
                deadline_s = self.now_s + CALM_S
            if self.now_s > deadline_s:
                states = [
                    (p.number, p.generation, p.state, p.frozen)
                    for p in self.processes.values()
                    if p.state != "dead"
                ]
                raise Violation(f"the job hangs at {self.now_s:.0f} s: {states}")

    def _is_well(self):
        """Whether every process runs in the newest generation, or is a ready spare."""
        ready = self.referee.ready if not self.referee.has_room() else ()
        there = [
            p
            for p in self.processes.values()
            if p.state != "dead" and p.number not in ready
        ]
        numbers = {p.generation for p in there if p.state == "running"}
        if self.referee.leaving():
            return False
        return len(numbers) == 1 and all(p.state == "running" for p in there)
