"""The faults of `narrows bench chaos` and their times: a tape that a seed repeats."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Kind(StrEnum):
    """A fault: how the victim is hurt, and how the fault ends."""

    KILL = "kill"
    """SIGKILL; then a new process under the old name."""
    STOP = "stop"
    """SIGSTOP; then SIGCONT."""
    CUT = "cut"
    """Its connections stay open and carry nothing; then they go on where they were."""
    RESET = "reset"
    """Its connections are reset, new ones as well; then they are accepted again."""
    BROKER = "broker"
    """SIGKILL to the broker; then a new process on its state."""


DOWN_S: Final[Mapping[Kind, tuple[float, float]]] = {
    Kind.KILL: (5.0, 20.0),
    Kind.STOP: (5.0, 60.0),
    Kind.CUT: (5.0, 60.0),
    Kind.RESET: (5.0, 60.0),
    Kind.BROKER: (1.0, 5.0),
}
"""Shortest and longest time until the end of a fault, drawn evenly."""

SHARES: Final[Mapping[Kind, int]] = {Kind.KILL: 27, Kind.STOP: 17, Kind.CUT: 9, Kind.RESET: 9}
"""Numbers of faults out of 62, by kind; the 27 kills are those of the published run
(docs/benchmarks.md, "Chaos")."""

BROKER: Final = "broker"


@dataclass(frozen=True)
class Fault:
    """A fault; times in seconds since the beginning of the tape."""

    at_s: float
    kind: Kind
    victim: str
    down_s: float

    @property
    def ends_s(self) -> float:
        """Time at which the victim goes on, or is started again."""
        return self.at_s + self.down_s


def draw(
    seed: int,
    learners: Sequence[str],
    *,
    seconds: float,
    every_s: float,
    down_max_s: float,
    broker_kills: int = 0,
) -> tuple[Fault, ...]:
    """The faults of a run in the order of their beginnings.

    One learner fails in each slot of `every_s`, at a random instant. A learner that is already down
    is passed over; if all are down, the slot has no fault. The broker's kills have slots of their
    own under the same rule.
    """
    rng = random.Random(seed)
    faults: list[Fault] = []
    kinds = quotas(int(seconds / every_s))
    rng.shuffle(kinds)
    for slot, kind in enumerate(kinds):
        at_s = (slot + rng.random()) * every_s
        down = {fault.victim for fault in faults if fault.ends_s > at_s}
        up = [name for name in learners if name not in down]
        if up:
            faults.append(Fault(at_s, kind, rng.choice(up), _down_s(rng, kind, down_max_s)))
    broker_up_s = 0.0
    for slot in range(broker_kills):
        at_s = (slot + rng.random()) * seconds / broker_kills
        if at_s >= broker_up_s:
            fault = Fault(at_s, Kind.BROKER, BROKER, _down_s(rng, Kind.BROKER, down_max_s))
            broker_up_s = fault.ends_s
            faults.append(fault)
    return tuple(sorted(faults, key=lambda fault: fault.at_s))


def quotas(count: int) -> list[Kind]:
    """`count` kinds in the proportion of SHARES, by largest remainder."""
    total = sum(SHARES.values())
    kinds = [kind for kind, share in SHARES.items() for _ in range(count * share // total)]
    by_remainder = sorted(SHARES, key=lambda kind: -(count * SHARES[kind] % total))
    return kinds + by_remainder[: count - len(kinds)]


def _down_s(rng: random.Random, kind: Kind, down_max_s: float) -> float:
    low, high = (min(bound, down_max_s) for bound in DOWN_S[kind])
    return rng.uniform(low, high)
