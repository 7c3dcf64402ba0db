"""Well-formed control messages over real sockets that are wrong: typed refusals, nothing else."""

from __future__ import annotations

import msgspec
import pytest
from peer import PUSH, Peer, World
from running import LAYOUT, wait_until

from narrows.proto import messages as msg

# Who may join.


def other_layout() -> tuple[msg.LayoutEntry, ...]:
    more = (msg.LayoutEntry(f"more{i}", (3,), "float32", "mean") for i in range(9))
    return (msg.LayoutEntry("weight", (24, 17), "bfloat16", "mean"), *more)


HELLOS: dict[str, tuple[dict[str, object], str, str, str]] = {
    "other protocol": ({"protocol": 1}, "protocol_version", "3", "1"),
    "no name": ({"name": ""}, "bad_name", "1 to 64", "''"),
    "path as name": ({"name": "../../etc/passwd"}, "bad_name", "1 to 64", "etc/passwd"),
    "control characters": ({"name": "a\x1b[2J\n"}, "bad_name", "1 to 64", r"'a\x1b[2J\n'"),
    "long name": ({"name": "n" * 65}, "bad_name", "1 to 64", "nnn"),
    "huge name": ({"name": "n" * 10_000}, "bad_message", "", "1024"),
    "incarnation": ({"incarnation": "1"}, "bad_name", "32 hex digits", "'1'"),
    "other run": ({"run_id": "0" * 16}, "wrong_run", "", "0" * 16),
    "future term": ({"epoch": (5, 0, 0)}, "wrong_epoch", "term 1 at most", "term 5"),
    "codecs": ({"codecs": ("raw32", "lz4")}, "unknown_codec", "int4-zstd", "raw32, lz4"),
    "other model": ({"layout": other_layout()}, "layout_mismatch", "2 tensors", ""),
    "no fingerprint": ({"fingerprint": ""}, "bad_message", "", "fingerprint"),
    "other frozen ones": ({"frozen_digest": 3}, "layout_mismatch", "2 tensors", ""),
}


@pytest.mark.parametrize("case", HELLOS)
def test_a_hello_is_refused(mallory: Peer, case: str) -> None:
    fields, code, expected, got = HELLOS[case]
    mallory.send(mallory.hello(**fields))
    refuse = mallory.receive(msg.Refuse)
    assert refuse.code == code
    assert expected in refuse.expected
    assert got in refuse.got
    names = [learner.name for learner in mallory.status().learners]
    assert mallory.name not in names


def test_another_model_may_ask_for_the_run_s(mallory: Peer) -> None:
    hello = mallory.hello(layout=other_layout())
    mallory.send(hello)
    refuse = mallory.receive(msg.Refuse)
    assert refuse.got == hello.fingerprint and "same model code" in refuse.remedy
    mallory.send(msg.AskLayout(0))
    assert mallory.receive(msg.LayoutPart) == msg.LayoutPart(0, 1, 0, LAYOUT)


def test_a_stranger_may_not_ask_for_the_layout(mallory: Peer) -> None:
    mallory.send(msg.AskLayout(0))
    assert mallory.receive(msg.Refuse).code == "unknown_session"


def test_a_live_name_is_refused_with_the_holder_s_address(world: World, mallory: Peer) -> None:
    mallory.send(mallory.hello(name="good"))
    world.good.send(msg.Alive(world.good.receive(msg.Probe).nonce))
    refuse = mallory.receive(msg.Refuse)
    assert refuse.code == "name_in_use"
    assert "held from 127.0.0.1 for" in refuse.got
    assert "choose another --name" in refuse.remedy


def test_an_old_incarnation_is_superseded(world: World) -> None:
    with world.peer() as old:
        old.join()
    with Peer(old.address, old.name) as new:
        new.join()
        new.send(new.hello(incarnation=old.incarnation))
        assert new.receive(msg.Refuse).code == "superseded"
        before = new.refusals("old_incarnation")
        new.send_data(new.frames(bytes(4), incarnation=old.incarnation))
        wait_until(lambda: new.refusals("old_incarnation") > before, "the refusal")
        new.send(msg.Bye("enough"))


# Control messages of those who have no business to send them.


def test_without_a_session_nothing_is_taken(mallory: Peer) -> None:
    mallory.send(msg.Push(0, 0, 1, 1, 216, 5, 5))
    refuse = mallory.receive(msg.Refuse)
    assert refuse.code == "unknown_session"
    assert "Hello" in refuse.remedy


BROKER_SENDS: tuple[msg.ControlMessage, ...] = (
    msg.Beat((1, 1, 1), msg.Phase.ENDED, (9, 9), (), 10**9, 1.0, (), 0.0),
    msg.Refuse("layout_mismatch", "go away"),
    msg.Probe(1),
)


@pytest.mark.parametrize("message", BROKER_SENDS, ids=lambda m: type(m).__name__)
def test_what_only_a_broker_sends_is_refused(member: Peer, message: msg.ControlMessage) -> None:
    member.send(message)
    refuse = member.receive(msg.Refuse)
    assert refuse.code == "bad_message"
    assert "only a broker sends" in refuse.message
    assert refuse.got == type(message).__name__


def test_a_welcome_and_a_status_are_refused_too(member: Peer) -> None:
    assert member.welcome is not None
    for message in (member.welcome, member.status()):
        member.send(message)
        assert member.receive(msg.Refuse).got == type(message).__name__


PUSHES: dict[str, tuple[dict[str, object], str, str, str]] = {
    "no such fragment": ({"fragment": 99}, "bad_fragment", "below 2", "99"),
    "future base": ({"base_version": 7}, "future_base", "base version 0", "7"),
    "too few elements": ({"elements": 215}, "bad_range", "216 elements", "215"),
    "too many elements": ({"elements": 1 << 48}, "bad_range", "216 elements", str(1 << 48)),
    "no tokens": ({"tokens": 0}, "bad_tokens", "at least one token", "0 tokens"),
    "no steps": ({"steps": 0}, "bad_tokens", "at least one token", "0 steps"),
    "negative tokens": ({"tokens": -9}, "bad_message", "", "tokens"),
    "id 0": ({"push_id": 0}, "bad_message", "", "push_id"),
}


@pytest.mark.parametrize("case", PUSHES)
def test_an_announcement_is_refused(member: Peer, case: str) -> None:
    fields, code, expected, got = PUSHES[case]
    member.send(msgspec.structs.replace(PUSH, **fields))
    refuse = member.receive(msg.Refuse)
    assert refuse.code == code
    assert refuse.push_id == (0 if code == "bad_message" else 1)
    assert expected in refuse.expected
    assert got in refuse.got


def test_one_push_announced_in_two_ways_is_refused(member: Peer) -> None:
    member.send(PUSH)
    member.send(msgspec.structs.replace(PUSH, tokens=10))
    assert member.receive(msg.Refuse).code == "push_conflict"


NONSENSE: tuple[msg.ControlMessage, ...] = (
    msg.Adopted(99, 0),
    msg.Adopted(0, 1 << 53),
    msg.Decline(99, 99, 99, "because"),
    msg.Fetch(1 << 62, 0),
    msg.Fetch(0, -(1 << 63)),
    msg.Fetch(0, 1 << 62),
    msg.Missing(msg.DataKind.PUBLICATION, 0, 1 << 53, 0, ((0, 1 << 48),) * 256),
    msg.Missing(msg.DataKind.STATE, 0, 5, 0, ((1 << 48, 1 << 48),)),
    msg.Missing(msg.DataKind.PUSH, 0, 0, 1, ()),
    msg.Missing(msg.DataKind.STATE, 77, 0, 0, ()),
    msg.Alive(1 << 62),
    msg.Report(0, 0, 1e9, float("nan"), (1 << 62,) * 64, msg.TokenLedger(), 0.0),
    msg.Report(0, 0, 0.0, float("inf"), (), msg.TokenLedger(*[1 << 62] * 7), 0.0),
    msg.Bye("\x1b[2J\n" * 200),
)


@pytest.mark.parametrize("message", NONSENSE, ids=lambda m: type(m).__name__)
def test_nonsense_in_good_form_changes_nothing(member: Peer, message: msg.ControlMessage) -> None:
    member.send(message)
    member.status()  # Messages of one connection are handled in order.
