"""The virtual clock's hosts."""

from __future__ import annotations

from random import Random

from narrows.bench.virtual import Clock, Host


class Metronome:
    """A machine that wants to be woken every ten seconds."""

    def __init__(self) -> None:
        self.due = 1000.0
        self.asked = 0

    def next_deadline(self) -> float:
        self.asked += 1
        return self.due

    def check(self) -> None:
        pass


class Listener(Host):
    machine: Metronome

    def reach_deadline(self) -> None:
        self.machine.due = self.clock.now + 10


def test_a_host_keeps_one_timer() -> None:
    # Timers that an earlier one had overtaken used to arm themselves anew for ever.
    clock, machine = Clock(), Metronome()
    host = Listener(clock, Random(0), machine)
    for i in range(100):
        machine.due = 1000.0 - i
        host.arm()
    clock.run(2000.0, lambda: False)
    wakes = (2000 - 901) // 10 + 1
    assert machine.due == 901 + 10 * wakes
    assert machine.asked == 100 + 3 * wakes
