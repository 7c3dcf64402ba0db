"""Pushes that wait for their decoding: their number is bounded, not their chunks."""

from __future__ import annotations

import pytest
from machines import Desk, one, only

from narrows.broker.syncer import events as ev
from narrows.broker.syncer.decoding import Decoding
from narrows.proto import messages as msg
from narrows.proto.errors import ErrorCode, RemoteProtocolError


def arrives(desk: Desk, push_id: int, **fields: object) -> tuple[msg.Header, list[ev.Effect]]:
    """A chunk comes, and its decoding takes its time."""
    desk.handle += 1
    header = desk.header("a", desk.round.fragment, push_id=push_id, **fields)
    return header, desk.do(ev.ChunkArrived(header, desk.handle))


def test_pushes_beyond_the_bound_are_refused_and_not_queued() -> None:
    desk = Desk(merge__rounds_in_flight=1).running("a", "b")
    headers: list[msg.Header] = []
    for push_id in (1, 2):
        header, effects = arrives(desk, push_id)
        headers.append(header)
        assert only(effects, ev.Unpack)
    _, effects = arrives(desk, 3)
    refuse = one(effects, msg.Refuse)
    assert (refuse.code, refuse.push_id) == (ErrorCode.TOO_MANY_PUSHES, 3)
    assert refuse.expected.startswith("at most 2 pushes")
    assert not only(effects, ev.Unpack) and only(effects, ev.Drop)
    # The decoder catches up, and there is room again.
    desk.do(ev.ChunkUnpacked(headers[0], 1))
    _, effects = arrives(desk, 4)
    assert only(effects, ev.Unpack)


def test_an_endless_flood_holds_two_pushes() -> None:
    desk = Desk(merge__rounds_in_flight=1).running("a", "b")
    unpacked = sum(len(only(arrives(desk, n)[1], ev.Unpack)) for n in range(1, 200))
    assert unpacked == 2
    assert desk.state.tally.refused == {ErrorCode.TOO_MANY_PUSHES: 197}


def test_each_learner_has_its_own_bound_and_leaves_nothing_behind() -> None:
    desk = Desk().running("a", "b")
    decoding = Decoding(1)
    headers = [desk.header(name, 0, push_id=n) for name in "ab" for n in (1, 2)]
    for header in (*headers, headers[0]):
        decoding.begin(header)
    with pytest.raises(RemoteProtocolError, match="too_many_pushes"):
        decoding.begin(desk.header("a", 0, push_id=3))
    decoding.done(headers[0])
    with pytest.raises(RemoteProtocolError):
        decoding.begin(desk.header("a", 0, push_id=3))
    for header in headers:
        decoding.done(header)
    assert decoding == Decoding(1)
