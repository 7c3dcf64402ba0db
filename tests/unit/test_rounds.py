"""One round: announcements and chunks in any order, contributions, ends."""

from __future__ import annotations

import pytest
from machines import ELEMENTS, Desk

from narrows.broker.syncer.rounds import Incoming, Round
from narrows.proto.errors import ErrorCode, RemoteProtocolError
from narrows.proto.messages import Push


def round_of(quorum: int = 1) -> Round:
    return Round(0, 0, 1, -1, ELEMENTS[0], ELEMENTS[0], 10.0, quorum, {"a", "b"})


def announced(push_id: int = 1, tokens: int = 100) -> Push:
    return Push(0, 0, 1, push_id, ELEMENTS[0], tokens, 2)


def add(round_: Round, name: str, push_id: int = 1, *, handle: int = 1) -> Incoming:
    push = round_.incoming_of(name, "i" + name, push_id, 11.0)
    header = Desk().header(name, 0, count=ELEMENTS[0])
    round_.add_chunk(push, header, handle, 11.0)
    return push


def contribute(round_: Round, name: str, *, handle: int = 1) -> None:
    push = add(round_, name, handle=handle)
    round_.announce(push, announced())
    assert round_.settle_if_complete(push, 12.0)


def test_chunks_before_the_announcement_count() -> None:
    round_ = round_of()
    push = add(round_, "a")
    assert not round_.settle_if_complete(push, 12.0)
    round_.announce(push, announced())
    assert round_.settle_if_complete(push, 12.0)
    assert round_.contributed["a"].handles == (1,)
    assert not round_.incoming


def test_the_quorum_is_reached_once() -> None:
    round_ = round_of(quorum=2)
    contribute(round_, "b")
    assert round_.quorum_at is None
    contribute(round_, "a")
    assert round_.quorum_at == 12.0


def test_contributions_come_in_name_order() -> None:
    round_ = round_of()
    contribute(round_, "b")
    contribute(round_, "a")
    assert [done.learner for done in round_.contributions()] == ["a", "b"]


def test_only_the_first_complete_push_of_a_name_counts() -> None:
    round_ = round_of()
    contribute(round_, "a")
    assert round_.has("ia", 1, "a") and not round_.has("ia", 2, "a")
    with pytest.raises(RemoteProtocolError) as error:
        round_.incoming_of("a", "ia", 2, 13.0)
    assert error.value.code is ErrorCode.PUSH_CONFLICT


def test_a_newer_push_replaces_an_unfinished_one() -> None:
    round_ = round_of()
    add(round_, "a", 1, handle=5)
    assert round_.supersede("a", "ia", 1) == ()
    assert round_.supersede("a", "ia", 2) == (5,)
    assert round_.incoming_of("a", "ia", 2, 13.0).push_id == 2


def test_a_new_incarnation_replaces_the_push_of_the_old_one() -> None:
    round_ = round_of()
    add(round_, "a", 7, handle=5)
    assert round_.supersede("a", "other", 1) == (5,)


def test_the_same_announcement_again_changes_nothing() -> None:
    round_ = round_of()
    push = round_.incoming_of("a", "ia", 1, 11.0)
    round_.announce(push, announced())
    round_.announce(push, announced())
    with pytest.raises(RemoteProtocolError):
        round_.announce(push, announced(tokens=101))


def test_an_announcement_takes_a_decline_back() -> None:
    round_ = round_of()
    round_.declined["a"] = "evaluating"
    round_.announce(round_.incoming_of("a", "ia", 1, 11.0), announced())
    assert not round_.declined


def test_close_gives_up_unfinished_pushes_only() -> None:
    round_ = round_of()
    contribute(round_, "a", handle=3)
    add(round_, "b", handle=4)
    assert round_.close() == (4,)
    assert list(round_.contributed) == ["a"]


def test_discard_gives_up_everything() -> None:
    round_ = round_of()
    contribute(round_, "a", handle=3)
    add(round_, "b", handle=4)
    assert round_.discard() == (4, 3)
    assert not round_.contributed
