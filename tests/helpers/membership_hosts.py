"""Simulates elastic jobs whose hosts and slots change at random.

The slots are those of `tfdist.launch.slots`. Each process runs on its slot. A host is
lost with all its processes.
"""

from random import Random

from helpers.membership_world import World

from tfdist.launch.hosts import Slot
from tfdist.launch.slots import Slots


class HostsWorld(World):
    """A job on several hosts, which a discovery script adds, changes and removes."""

    def _draw_resizes(self):
        return True

    def _plan_resizes(self):
        """Draws the hosts at the start, and the times when they change."""
        self._draw = draw = Random(f"slots {self.rng.random()}")
        self._listed, self._next_host = {}, 0
        size = self.settings["size"]
        while sum(self._listed.values()) < size:
            self._list_new_host(draw.randint(1, 4))
        self.slots = Slots(self._all_listed(), least=self.settings["min_size"])
        times = []
        for _ in range(draw.randint(1, 8)):
            first_s = draw.uniform(0, 150)
            burst = draw.choice([1, 1, 2, 3])
            times += [first_s + draw.uniform(0, 3) for _ in range(burst)]
        for time_s in times:
            self.later(time_s, self._change_slots)
        return times

    def _plan_losses_of_hosts(self):
        draw, times = self._draw, []
        for _ in range(draw.randint(1, 2) if draw.random() < 0.3 else 0):
            times.append(draw.uniform(0, 150))
            self.later(times[-1], self._lose_one_host, draw.random() < 0.3)
        return times

    def _list_new_host(self, slots):
        self._listed[self._next_host] = slots
        self._next_host += 1

    def _all_listed(self):
        listed = self._listed.items()
        return [Slot(host, index) for host, count in listed for index in range(count)]

    def _new_process(self, number):
        process = super()._new_process(number)
        if self.slots.take(number, self.referee.live) is None:
            self.later(0.0, self._die, process, True)
        return process

    def _change_slots(self):
        """Changes what the script lists: at least one host."""
        draw, listed = self._draw, self._listed
        kind = draw.choice(["slots", "slots", "new", "new", "gone", "move", "back"])
        if kind == "slots" and listed:
            listed[draw.choice([*listed])] = draw.randint(1, 4)
        elif kind == "gone" and len(listed) > 1:
            del listed[draw.choice([*listed])]
        elif kind == "move":
            listed.clear()
            for _ in range(draw.randint(1, 2)):
                self._list_new_host(draw.randint(1, 4))
        elif kind == "back" and self._next_host:
            # A removed host, which may still have processes, is listed again.
            known = [h for h in range(self._next_host) if h not in self._lost_hosts]
            if known:
                listed[draw.choice(known)] = draw.randint(1, 4)
        else:
            self._list_new_host(draw.randint(1, 4))
        if not self.referee.stop and listed:
            live = self.referee.live
            self.slots.change(self._all_listed(), live)
            unwanted = self.slots.unwanted(live)
            room = self.slots.room
            self._carry_out(self.referee.resize(room, self.now_s, unwanted))

    _lost_hosts = frozenset()

    def _lose_one_host(self, is_signalled):
        if self.referee.stop or not self._listed:
            return
        host = self._draw.choice([*self._listed])
        del self._listed[host]
        self._lost_hosts = self._lost_hosts | {host}
        self.slots.lose(host)
        there = [p for p in self.processes.values() if self._is_on(p, host)]
        lost = [] if is_signalled else [process.number for process in there]
        self._carry_out(self.referee.set_room(self.slots.room, lost, self.now_s))
        for process in there:
            if is_signalled:
                self._in_process(0.0, process, self._term)
            else:
                self._die(process, failed=True)

    def _is_on(self, process, host):
        if process.state == "dead" or process.number not in self.slots._taken:
            return False
        return self.slots.host_of(process.number) == host

    def _is_well(self):
        """Whether nobody is on a removed slot for whom there is another place, too."""
        there = {p.number for p in self.processes.values() if p.state == "running"}
        unwanted = self.slots.unwanted(there)
        is_enough = len(there - unwanted) >= self.settings["min_size"]
        has_to_move = unwanted and is_enough and not self.referee.is_ending
        return super()._is_well() and not has_to_move


class ScriptWorld(HostsWorld):
    """A job without faults, in which only the slots change.

    It must end as if nothing had happened.
    """

    _has_faults = False

    def _draw_faults(self):
        self._poisoned_step = -1
        self._death_at_start = self._death_when_asking = 0.0
        self._fates, self._has_signals = (1, 0, 0, 0, 0), False
        self._pace_s = min(self._pace_s, 0.3)
        return []

    def _plan_losses_of_hosts(self):
        return []

    def _is_well(self):
        """Whether the job has as many members as there are slots for, too."""
        there = {p.number for p in self.processes.values() if p.state == "running"}
        is_full = len(there) == self.referee.target()
        is_placed = not self.slots.unwanted(there)
        return super()._is_well() and is_full and is_placed
