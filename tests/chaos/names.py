"""A hundred thousand learners with a name of their own each: `python names.py COUNT`.

The broker's state machine in virtual time, beside one learner that stays: each of the others joins,
contributes, and leaves or vanishes. Its state, a status, a checkpoint's manifest and the time per
name must not grow with their number.
"""

from __future__ import annotations

import sys
import time
from dataclasses import astuple, dataclass

import msgspec
from machines import Desk, hello, incarnation_of

from narrows.broker.storage.manifest import MergedPush
from narrows.broker.syncer import events as ev
from narrows.broker.syncer.status import status_of
from narrows.proto import messages as msg

PAUSE_S = 1.5
"""Pause between two names: a thousand are gone in half an hour."""


@dataclass
class Sample:
    """Memory that so many names have left behind."""

    names: int
    members: int
    merged_pushes: int
    status_bytes: int
    manifest_bytes: int
    """Bytes of the part of it that grows with names."""
    ms_per_name: float
    """Milliseconds per name since the sample before."""


class Soak(Desk):
    """A desk that does not check itself after each event, which would take most of the time."""

    now: float

    def check(self) -> None:
        """Once at the end of all, by `run`."""

    def visit(self, number: int) -> None:
        """A learner joins, contributes to what is open, and is gone."""
        name = f"train-job-7f9c-{number:06d}"
        self.say(name, hello(name))
        for fragment, head in enumerate(self.state.heads):
            self.say(name, msg.Adopted(fragment, head.version))
        self.report(name, step=1, tokens=100, step_s=0.1)
        self.now += PAUSE_S
        self.say("stays", msg.Alive(0))
        self.report(name, step=2, tokens=200, step_s=0.1)
        for told in self.state.open_rounds():
            self.say("stays", msg.Decline(told.fragment, told.base_version, 1, "evaluating"))
            self.contribute(name, told.fragment)
        for fragment, round_ in list(self.state.rounds.items()):
            if round_.merging:
                self.do(ev.Merged(fragment, round_.base_version + 1, 7, 0))
        if number % 3:
            self.say(name, msg.Bye("preempted"))
        else:
            self.do(ev.PeerLost(name.encode()))

    def sample(self, names: int, seconds: float, since: int) -> Sample:
        state = self.state
        pushes = [
            MergedPush(*key, push_id, tokens)
            for key, (push_id, tokens) in state.merged_pushes.items()
        ]
        told = msgspec.msgpack.encode(status_of(self.syncer, {}, self.now))
        manifest = msgspec.json.encode(pushes)
        return Sample(
            names, len(state.roster), len(pushes), len(told), len(manifest),
            1000 * seconds / (names - since),
        )  # fmt: skip


def run(count: int, *, samples: int = 10) -> list[Sample]:
    """Lets `count` names come and go."""
    soak = Soak(fragments__sync_period_steps=3, broker__beat="3.9s")
    soak.found("stays")
    found: list[Sample] = []
    began, since = time.monotonic(), 0
    for number in range(1, count + 1):
        soak.visit(number)
        if number % (count // samples) == 0:
            now = time.monotonic()
            found.append(soak.sample(number, now - began, since))
            began, since = now, number
    soak.syncer.check()
    assert soak.state.roster.get(f"train-job-7f9c-{count:06d}"), "the newest names are remembered"
    assert incarnation_of("stays") == soak.state.roster.connected()[0].incarnation
    return found


if __name__ == "__main__":
    print("  names  members  merged pushes  status bytes  manifest bytes  ms per name")
    for each in run(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000):
        print("{:7}  {:7}  {:13}  {:12}  {:14}  {:11.2f}".format(*astuple(each)))
