"""The virtual clock's hosts and lines."""

from __future__ import annotations

from random import Random

import pytest

from narrows.bench.sim.learner import LearnerSpec
from narrows.bench.sim.simulation import Simulation
from narrows.bench.sim.virtual import Clock, Faults, Host
from narrows.broker.config import load_config
from narrows.proto.timing import HELLO_S

CONNECT_S = 0.5
"""A simulated process connects again within it."""


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


def test_what_a_frozen_host_has_missed_comes_in_order_even_if_it_freezes_again() -> None:
    clock = Clock()
    host, done = Listener(clock, Random(0), Metronome()), list[int]()
    host.frozen_until = 5.0
    host.do(lambda: done.append(1))
    host.frozen_until = 9.0
    host.do(lambda: done.append(2))
    clock.at(9.0, lambda: host.do(lambda: done.append(3)))
    clock.run(8.0, lambda: False)
    assert done == []
    clock.run(9.0, lambda: False)
    assert done == [1, 2, 3]


@pytest.mark.parametrize("seed", range(5))
def test_a_learner_greets_a_simulated_broker_that_was_away_for_long(seed: int) -> None:
    config = load_config(None, {"run.learners_at_start": 2})
    run = Simulation(config, seed, Faults(until_s=0.0), [LearnerSpec("a"), LearnerSpec("b")])
    run.run(10.0)
    run.kill_broker(60.0)
    run.run(70.0 + CONNECT_S + 2 * HELLO_S)
    # By its back-off alone it would say Hello every five seconds.
    assert all(learner.session.online for learner in run.learners.values())
