"""Bad input: each case is refused with code, expected, got and remedy, and changes nothing else."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from machines import EPOCH, RUN, Desk, Seat, hello, incarnation_of, one, only

from narrows.broker.syncer import events as ev
from narrows.learner.session import events as lev
from narrows.learner.session.dialer import Connection
from narrows.proto import messages as msg
from narrows.proto.errors import OF_ONE_MESSAGE, RETRYABLE, ErrorCode


def essence(desk: Desk) -> object:
    """The state that a refused message may not change: rounds, versions, the run's clock, the
    members.

    Liveness, counters of refusals and stream positions may change: a refused sender is still alive,
    and its bytes have left the line.
    """
    state = desk.state
    rounds = {
        index: (r.base_version, r.attempt, sorted(r.contributed), r.merging)
        for index, r in state.rounds.items()
    }
    members = [(m.name, m.incarnation, m.presence.peer, tuple(m.copies.held)) for m in state.roster]
    return copy.deepcopy((rounds, state.heads, state.clock.run_tokens, members, state.layout))


HELLOS: list[tuple[ErrorCode, dict[str, object], str, str]] = [
    (ErrorCode.PROTOCOL_VERSION, {"protocol": 2}, "3", "2"),
    (ErrorCode.BAD_NAME, {"name": "../evil"}, "1 to 64 of A-Z", "'../evil'"),
    (ErrorCode.BAD_NAME, {"incarnation": "xyz"}, "32 hex digits", "'xyz'"),
    (ErrorCode.WRONG_RUN, {"run_id": "another"}, RUN, "another"),
    (ErrorCode.WRONG_EPOCH, {"run_id": RUN, "epoch": (1, 0, 0)}, "term 0 at most", "term 1"),
    (ErrorCode.UNKNOWN_CODEC, {"codecs": ("raw32",)}, "int4-zstd", "raw32"),
    (ErrorCode.LAYOUT_MISMATCH, {"fingerprint": "5" * 32}, "2 tensors", "5" * 32),
    (ErrorCode.LAYOUT_MISMATCH, {"frozen_digest": 7}, "2 tensors", ""),
]


@pytest.mark.parametrize(("code", "fields", "expected", "got"), HELLOS)
def test_hello_is_refused(code: ErrorCode, fields: dict[str, Any], expected: str, got: str) -> None:
    desk = Desk().running("a")
    before = essence(desk)
    effects = desk.say("x", hello(**{"name": "x", **fields}))
    refuse = one(effects, msg.Refuse)
    assert refuse.code == code
    assert expected in refuse.expected and got in refuse.got
    assert refuse.remedy or code in (ErrorCode.BAD_MESSAGE, ErrorCode.BAD_NAME)
    assert not only(effects, msg.Welcome)
    assert essence(desk) == before
    assert desk.state.tally.refused == {code: 1}


def test_live_name_is_refused_after_the_holder_answered_the_probe() -> None:
    desk = Desk().running("a")
    before = essence(desk)
    newcomer = hello("a", incarnation=incarnation_of("a", 2))
    probe = one(desk.say("x", newcomer), msg.Probe)
    assert only(desk.say("x", newcomer), msg.Probe) == []
    refuse = one(desk.say("a", msg.Alive(probe.nonce)), msg.Refuse)
    assert refuse.code == ErrorCode.NAME_IN_USE
    assert "held from tcp://a for 1" in refuse.got and "--name" in refuse.remedy
    assert essence(desk) == before


def test_old_incarnation_is_refused() -> None:
    desk = Desk().running("a")
    desk.do(ev.PeerLost(b"a"))
    desk.say("x", hello("a", incarnation=incarnation_of("a", 2)))
    before = essence(desk)
    # Its chunks have nobody to answer to; its messages and its Hello are refused.
    assert desk.chunk("a", 0) == [ev.Drop((desk.handle,))]
    assert desk.state.tally.refused == {ErrorCode.OLD_INCARNATION: 1}
    assert one(desk.push("a"), msg.Refuse).code == ErrorCode.UNKNOWN_SESSION
    refuse = one(desk.say("a", hello("a")), msg.Refuse)
    assert refuse.code == ErrorCode.SUPERSEDED and refuse.remedy
    assert essence(desk) == before


CHUNKS: list[tuple[ErrorCode, dict[str, object], str, str]] = [
    (ErrorCode.WRONG_RUN, {"run_id": "another"}, RUN, "another"),
    (ErrorCode.WRONG_EPOCH, {"epoch": (0, 0, 7)}, "(0, 1, 7)", "(0, 0, 7)"),
    (ErrorCode.WRONG_EPOCH, {"epoch": (0, 2, 7)}, "(0, 1, 7)", "(0, 2, 7)"),
    (ErrorCode.WRONG_EPOCH, {"epoch": (0, 1, 8)}, "(0, 1, 7)", "(0, 1, 8)"),
    (ErrorCode.BAD_FRAGMENT, {"fragment": 2}, "below 2", "2"),
    (ErrorCode.BAD_RANGE, {"offset": 1, "count": 1000}, "0..1000", "1+1000"),
    (ErrorCode.UNKNOWN_CODEC, {"codec": "int8-zstd"}, "int4-zstd", "int8-zstd"),
    (ErrorCode.FUTURE_BASE, {"version": 1}, "base version 0", "1"),
    (ErrorCode.NO_ROUND, {"fragment": 1, "count": 1000}, "a round", "no open round"),
    (ErrorCode.BAD_MESSAGE, {"kind": msg.DataKind.STATE}, "PUSH or FOUND", "STATE"),
]


@pytest.mark.parametrize(("code", "fields", "expected", "got"), CHUNKS)
def test_chunk_is_refused(code: ErrorCode, fields: dict[str, Any], expected: str, got: str) -> None:
    desk = Desk().running("a", "b")
    assert desk.round.fragment == 0
    before = essence(desk)
    effects = desk.chunk("a", **{"fragment": 0, **fields})
    refuse = one(effects, msg.Refuse)
    assert (refuse.code, refuse.push_id) == (code, 1)
    assert expected in refuse.expected and got in refuse.got
    assert one(effects, ev.Drop).handles == (desk.handle,)
    # Once per push, not once per chunk; the refused push stays out.
    assert not only(desk.chunk("a", **{"fragment": 0, **fields}), msg.Refuse)
    assert essence(desk) == before


PUSHES: list[tuple[ErrorCode, dict[str, object], str, str]] = [
    (ErrorCode.BAD_FRAGMENT, {"fragment": 7, "base_version": 0, "elements": 1}, "below 2", "7"),
    (ErrorCode.FUTURE_BASE, {"base_version": 3}, "base version 0", "3"),
    (ErrorCode.BAD_RANGE, {"elements": 999}, "1000", "999"),
    (ErrorCode.BAD_TOKENS, {"tokens": 0}, "at least one token", "0 tokens"),
    (ErrorCode.BAD_TOKENS, {"steps": 0}, "at least one token", "0 steps"),
]


@pytest.mark.parametrize(("code", "fields", "expected", "got"), PUSHES)
def test_push_is_refused(code: ErrorCode, fields: dict[str, Any], expected: str, got: str) -> None:
    desk = Desk().running("a", "b")
    before = essence(desk)
    values = {"push_id": 1, "attempt": 1, "tokens": 5, "steps": 1, "base_version": 0}
    message = msg.Push(**{"fragment": 0, "elements": 1000, **values, **fields})
    refuse = one(desk.say("a", message), msg.Refuse)
    assert (refuse.code, refuse.push_id) == (code, 1)
    assert expected in refuse.expected and got in refuse.got
    desk.chunk("a", 0)
    assert essence(desk) == before


def test_stale_base_is_refused() -> None:
    desk = Desk().running("a", "b")
    desk.contribute("b")
    desk.wait(6.0)
    desk.do(ev.Merged(0, 1, 5, 0))
    before = essence(desk)
    refuse = one(desk.push("a", base_version=0, push_id=4), msg.Refuse)
    assert (refuse.code, refuse.push_id) == (ErrorCode.STALE_BASE, 4)
    assert (refuse.expected, refuse.got) == ("base version 1", "0")
    assert essence(desk) == before


def test_same_range_with_other_bytes_is_refused_and_frees_the_push() -> None:
    desk = Desk().running("a", "b")
    desk.push("a")
    first = desk.handle + 1
    assert not only(desk.chunk("a", 0, count=600, payload_digest=1), msg.Refuse)
    before = essence(desk)
    effects = desk.chunk("a", 0, count=600, payload_digest=2)
    refuse = one(effects, msg.Refuse)
    assert refuse.code == ErrorCode.CHUNK_CONFLICT and refuse.remedy
    dropped = {handle for drop in only(effects, ev.Drop) for handle in drop.handles}
    assert dropped == {first, first + 1}
    assert essence(desk) == before
    assert not desk.round.incoming


def test_a_chunk_in_another_codec_than_its_push_is_refused_and_frees_the_push() -> None:
    desk = Desk(codec__push="auto").running("a", "b")
    desk.push("a")
    first = desk.handle + 1
    desk.chunk("a", 0, count=600, codec="int4-zstd")
    effects = desk.chunk("a", 0, offset=600, count=400, codec="int8-zstd")
    refuse = one(effects, msg.Refuse)
    assert refuse.code == ErrorCode.CHUNK_CONFLICT and refuse.remedy
    assert ("int4-zstd" in refuse.expected, refuse.got) == (True, "int8-zstd")
    dropped = {handle for drop in only(effects, ev.Drop) for handle in drop.handles}
    assert dropped == {first, first + 1}
    assert not desk.round.incoming and not desk.round.contributed


def test_overlap_that_differs_is_refused() -> None:
    desk = Desk().running("a", "b")
    desk.chunk("a", 0, count=600)
    refuse = one(desk.chunk("a", 0, offset=599, count=401), msg.Refuse)
    assert refuse.code == ErrorCode.CHUNK_CONFLICT
    assert "0+600" in refuse.expected and "599+401" in refuse.got


def test_same_push_id_announced_differently_is_refused() -> None:
    desk = Desk().running("a", "b")
    desk.push("a", tokens=100)
    before = essence(desk)
    refuse = one(desk.push("a", tokens=200), msg.Refuse)
    assert refuse.code == ErrorCode.PUSH_CONFLICT
    assert "100 tokens" in refuse.expected and "200 tokens" in refuse.got
    assert essence(desk) == before


def test_second_contribution_of_a_name_is_refused() -> None:
    desk = Desk().running("a", "b")
    desk.contribute("a", push_id=1)
    before = essence(desk)
    refuse = one(desk.push("a", push_id=2), msg.Refuse)
    assert (refuse.code, refuse.expected, refuse.got) == (
        ErrorCode.PUSH_CONFLICT, "push 1", "push 2",
    )  # fmt: skip
    assert essence(desk) == before


def test_payload_that_does_not_decode_refuses_its_push_alone() -> None:
    desk = Desk().running("a", "b")
    desk.push("b")
    desk.push("a")
    header = desk.header("a", 0)
    desk.do(ev.ChunkArrived(header, 99))
    before = essence(desk)
    effects = desk.do(ev.ChunkDamaged(header, 99, ErrorCode.NOT_FINITE, "scale is NaN"))
    assert one(effects, msg.Refuse).code == ErrorCode.NOT_FINITE
    assert ev.Drop((99,)) in effects
    assert list(desk.round.incoming) == ["b"]
    assert essence(desk) == before


def test_message_without_a_session_is_refused() -> None:
    desk = Desk().running("a")
    before = essence(desk)
    refuse = one(desk.say("x", msg.Bye("")), msg.Refuse)
    assert refuse.code == ErrorCode.UNKNOWN_SESSION and refuse.remedy
    assert essence(desk) == before


def test_message_that_only_a_broker_sends_is_refused() -> None:
    desk = Desk().running("a")
    before = essence(desk)
    refuse = one(desk.say("a", msg.Probe(1)), msg.Refuse)
    assert (refuse.code, refuse.got) == (ErrorCode.BAD_MESSAGE, "Probe")
    assert essence(desk) == before


def nonsense(desk: Desk) -> list[Callable[[], list[ev.Effect]]]:
    """Messages about things that do not exist: there is nothing to refuse, and nothing to do."""
    return [
        lambda: desk.say("a", msg.Adopted(9, 0)),
        lambda: desk.say("a", msg.Adopted(0, 99)),
        lambda: desk.say("a", msg.Fetch(9, -1)),
        lambda: desk.say("a", msg.Fetch(0, 99)),
        lambda: desk.say("a", msg.Decline(9, 0, 1, "")),
        lambda: desk.say("a", msg.Alive(77)),
        lambda: desk.say("a", msg.Missing(msg.DataKind.PUSH, 0, 0, 1, ((0, 1),))),
        lambda: desk.say("a", msg.Missing(msg.DataKind.STATE, 9, 0, 0, ((0, 1),))),
    ]


@pytest.mark.parametrize("index", range(8))
def test_nonsense_changes_nothing(index: int) -> None:
    desk = Desk().running("a")
    before = essence(desk)
    effects = nonsense(desk)[index]()
    assert not only(effects, ev.Publish) and not only(effects, ev.StartMerge)
    assert essence(desk) == before


@pytest.mark.parametrize("code", sorted(set(ErrorCode) - RETRYABLE - OF_ONE_MESSAGE))
def test_learner_ends_when_its_session_is_refused(code: ErrorCode) -> None:
    seat = Seat().joined()
    fail = one(seat.hear(msg.Refuse(code, "no", "this", "that", "do so")), lev.Fail)
    assert (fail.error.code, fail.error.expected, fail.error.got) == (code, "this", "that")
    assert fail.error.remedy == "do so"
    assert seat.session.connection is Connection.REFUSED
    assert seat.session.next_deadline() is None


@pytest.mark.parametrize("code", sorted(OF_ONE_MESSAGE))
def test_a_damaged_message_does_not_end_the_session(code: ErrorCode) -> None:
    seat = Seat().joined()
    effects = seat.hear(msg.Refuse(code, "flipped bit"))
    assert not [effect for effect in effects if isinstance(effect, lev.Fail)]
    assert seat.session.connection is Connection.JOINED


@pytest.mark.parametrize("code", sorted(RETRYABLE))
def test_learner_tries_again_when_told_so(code: ErrorCode) -> None:
    seat = Seat().joined()
    effects = seat.hear(msg.Refuse(code, "not now"))
    assert one(effects, msg.Hello).epoch == EPOCH
    assert not only(effects, lev.Fail)


def test_learner_drops_data_that_is_not_for_it() -> None:
    seat = Seat().joined()
    strange: list[dict[str, object]] = [
        {"run_id": "another"},
        {"epoch": (0, 0, 0)},
        {"epoch": (0, 1, 8)},
        {"incarnation": incarnation_of("a", 2)},
        {"kind": msg.DataKind.PUSH},
        {"version": 0},
        {"version": 100},
    ]
    for fields in strange:
        version = fields.pop("version", 1)
        assert isinstance(version, int)
        effects = seat.data(0, version, **fields)
        assert one(effects, lev.Drop).handles == (seat.handle,)
    assert not any(each.held_handles() for each in seat.session.fragments)


def test_learner_ignores_a_broker_that_was_replaced() -> None:
    seat = Seat().joined()
    seat.restarted()
    before = seat.session.phase, [each.known for each in seat.session.fragments]
    seat.beat((9, 9), phase=msg.Phase.ENDED, epoch=EPOCH)
    assert before == (seat.session.phase, [each.known for each in seat.session.fragments])


def test_refusal_texts_fit_the_wire() -> None:
    desk = Desk().running("a")
    many = tuple(msg.LayoutEntry("n" * 500 + str(i), (3,), "float32", "mean") for i in range(9))
    refuse = one(desk.say("x", hello("x", layout=many)), msg.Refuse)
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(refuse), type=msg.Refuse)
    assert again == refuse
