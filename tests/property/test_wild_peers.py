"""Peers may say anything that decodes: no check of the broker's own conditions is met by it."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from machines import Desk, hello, incarnation_of, only
from msgspec import structs

from narrows.broker.syncer import events as ev
from narrows.proto import messages as msg
from narrows.proto.frames import decode_control, encode_control

NAMES = "abcd"
EXTREMES = (0, 1, 2, 7, 1000, 1 << 40, (1 << 53) - 1, 1 << 62)
RATES = (0.0, 1.0, 1e3, 1e6, 1e9, 1e18)


def report(random: Random) -> msg.Report:
    return msg.Report(
        step=random.choice(EXTREMES),
        tokens=random.choice(EXTREMES),
        step_s=random.choice((0.0, 5e-324, 1e-9, 0.5, 3.0, 1e9)),
        loss=None,
        received=tuple(random.choice(EXTREMES) for _ in range(random.randint(0, 5))),
        ledger=msg.TokenLedger(),
        up_bits_per_s=random.choice(RATES),
    )


def push_or_chunk(desk: Desk, random: Random, name: str) -> list[ev.Effect]:
    fragment, push_id = random.randint(0, 3), random.randint(1, 4)
    incarnation = incarnation_of(name, random.randint(1, 2))
    if fragment < 2 and random.random() < 0.5:
        tokens, steps = random.choice(EXTREMES), random.choice(EXTREMES)
        return desk.push(name, fragment, push_id=push_id, tokens=tokens, steps=steps)
    place = {"offset": random.choice((0, 500, 999)), "count": random.choice((1, 500, 1000))}
    return desk.chunk(
        name, fragment, push_id=push_id, incarnation=incarnation, version=random.randint(0, 3),
        stream=random.randint(0, 9), position=random.choice(EXTREMES), **place,
    )  # fmt: skip


def other(desk: Desk, random: Random, name: str) -> list[ev.Effect]:
    fragment, version = random.randint(0, 3), random.randint(0, 3)
    kinds = (msg.DataKind.PUBLICATION, msg.DataKind.STATE, msg.DataKind.PUSH)
    ranges = ((random.choice(EXTREMES), random.choice(EXTREMES)),)
    messages: tuple[msg.ControlMessage, ...] = (
        msg.Adopted(fragment, version),
        msg.Fetch(fragment, random.choice((-(1 << 40), -1, 0, 1 << 40))),
        msg.Missing(random.choice(kinds), fragment, version, 0, ranges),
        msg.Decline(fragment, version, random.randint(0, 2), "busy"),
        msg.Alive(random.randint(0, 3)),
        msg.Bye("enough"),
    )
    return desk.say(name, random.choice(messages))


def join(desk: Desk, random: Random, name: str) -> list[ev.Effect]:
    """From a connection that may be another learner's."""
    incarnation = incarnation_of(name, random.randint(1, 3))
    versions = tuple(random.choice((0, 1, 1 << 40)) for _ in range(random.randint(0, 3)))
    tokens = random.choice(EXTREMES)
    message = hello(name, incarnation=incarnation, versions=versions, tokens=tokens)
    return desk.say(random.choice(NAMES), message)


def reload(desk: Desk, random: Random) -> list[ev.Effect]:
    wan = replace(desk.state.config.wan, total_up=random.choice((0.0, 1e6, 1e9)))
    return desk.do(ev.ConfigRead(replace(desk.state.config, wan=wan)))


def answer(desk: Desk, effects: list[ev.Effect]) -> None:
    """The shell does what it is told; what it sends can be decoded."""
    for send in only(effects, ev.Send):
        message = send.message
        if isinstance(message, msg.Welcome):  # The desk has no ports.
            message = structs.replace(message, uplink_port=1, downlink_port=2)
        decode_control(encode_control(message))
    for merge in only(effects, ev.StartMerge):
        done = ev.Merged(merge.fragment, merge.version, merge.version, 0)
        answer(desk, desk.do(done))
    for _ in only(effects, ev.WriteCheckpoint):
        answer(desk, desk.do(ev.CheckpointWritten(desk.state.version_sum)))


@pytest.mark.parametrize("seed", range(30))
def test_whatever_learners_say_the_broker_goes_on(seed: int) -> None:
    random = Random(seed)
    goal = random.choice((0, 1 << 30))
    mode = random.choice(("decoupled", "streaming"))
    settings: dict[str, Any] = {
        "wan__total_up": random.choice((0, "1Mbit/s")),
        "run__goal_tokens": goal,
    }
    desk = Desk(mode, **settings).running(*NAMES)
    for _ in range(400):
        name, kind = random.choice(NAMES), random.random()
        if kind < 0.2:
            effects = desk.say(name, report(random))
        elif kind < 0.6:
            effects = push_or_chunk(desk, random, name)
        elif kind < 0.75:
            effects = other(desk, random, name)
        elif kind < 0.9:
            effects = join(desk, random, name)
        elif kind < 0.92:
            effects = reload(desk, random)
        elif kind < 0.95:
            effects = desk.do(ev.PeerLost(random.choice(NAMES).encode()))
        else:
            effects = desk.wait(random.choice((0.1, 1.0, 5.0)))
        answer(desk, effects)


def test_a_step_that_takes_no_time_is_no_reason_to_end() -> None:
    desk = Desk("decoupled", wan__up="1Mbit/s").running("a")
    desk.say("a", msg.Report(5, 1000, 5e-324, None, (0,), msg.TokenLedger(), 0.0))
    assert desk.wait(5.0)


def test_wild_counts_of_tokens_leave_the_beats_readable() -> None:
    desk = Desk("decoupled").running("a", "b")
    join_again = hello("c")
    desk.say("c", join_again)
    for fragment in range(2):
        desk.say("c", msg.Adopted(fragment, 0))
    for _ in range(400):
        for tokens in (1 << 62, 0):
            desk.say(
                "c", msg.Report(5, tokens, 0.1, None, (0,), msg.TokenLedger(), 0.0), after_s=0.0005
            )
    for name in "abc":
        desk.say(name, msg.Alive(0))
    beats = only(desk.wait(1.0), ev.Send)
    told = [send.message for send in beats if isinstance(send.message, msg.Beat)]
    assert told and all(decode_control(encode_control(beat)) == beat for beat in told)
