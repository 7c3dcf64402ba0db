"""Names, incarnations and liveness of the learners."""

from __future__ import annotations

import pytest
from machines import incarnation_of

from narrows.broker.syncer.member import Copies, Liveness, Member, Presence, Uplink
from narrows.broker.syncer.participation import Participation
from narrows.broker.syncer.roster import Roster, check_name
from narrows.proto.errors import ErrorCode, RemoteProtocolError
from narrows.proto.limits import LEARNERS_MAX


def member(name: str, *, life: int = 1, peer: bytes = b"", held: int = 0) -> Member:
    incarnation = incarnation_of(name, life)
    presence = Presence(peer or name.encode(), "", heard_at=100.0, joined_at=100.0)
    participation = Participation([0], contributed_at=100.0)
    return Member(name, incarnation, presence, Copies([held]), Uplink([0]), participation)


def roster(*names: str) -> Roster:
    members = Roster(late_s=3.0, lost_s=10.0)
    for name in names:
        members.admit(member(name))
    return members


@pytest.mark.parametrize("name", ["", "-a", "a b", "a/b", "ä", "a" * 65, "a\n"])
def test_names_outside_the_grammar_are_refused(name: str) -> None:
    with pytest.raises(RemoteProtocolError) as error:
        check_name(name, incarnation_of("a"))
    assert error.value.code is ErrorCode.BAD_NAME


@pytest.mark.parametrize("name", ["a", "site-a.example_1", "9" * 64])
def test_names_within_the_grammar_pass(name: str) -> None:
    check_name(name, incarnation_of("a"))


def test_iteration_is_in_name_order() -> None:
    assert [m.name for m in roster("c", "a", "b")] == ["a", "b", "c"]


def test_silence_makes_late_then_lost() -> None:
    members = roster("a")
    assert members.age(102.9) == []
    assert members.next_deadline() == 103.0
    assert [m.presence.liveness for m in members.age(103.0)] == [Liveness.LATE]
    assert members.next_deadline() == 110.0
    assert members.age(109.0) == []
    assert [m.presence.liveness for m in members.age(110.0)] == [Liveness.LOST]
    assert members.next_deadline() is None


def test_a_sign_of_life_is_reported_once_after_lateness() -> None:
    members = roster("a")
    (a,) = members
    members.age(104.0)
    assert members.heard(a, 105.0)
    assert not members.heard(a, 106.0)
    assert a.presence.liveness is Liveness.LIVE


def test_ready_means_connected_and_holding_everything() -> None:
    members = roster("a")
    members.admit(member("b", held=-1))
    assert [m.name for m in members.ready()] == ["a"]
    assert [m.name for m in members.connected()] == ["a", "b"]


def test_a_new_incarnation_supersedes_the_old_one() -> None:
    members = roster("a")
    (old,) = members
    assert members.admit(member("a", life=2, peer=b"new")) is old
    assert members.is_superseded("a", old.incarnation)
    assert members.by_peer(b"a") is None
    assert members.by_peer(b"new") is members.get("a")


def test_the_same_incarnation_moves_to_another_connection() -> None:
    members = roster("a")
    (a,) = members
    members.move(a, b"new", "tcp://new", 105.0)
    assert members.by_peer(b"new") is a and a.connected
    assert members.by_peer(b"a") is None
    assert not members.is_superseded("a", a.incarnation)


def test_a_late_disconnect_of_the_old_one_does_not_touch_the_new_one() -> None:
    members = roster("a")
    (old,) = members
    members.admit(member("a", life=2, peer=b"new"))
    members.disconnect(old)
    assert members.by_peer(b"new") is members.get("a")


def test_capacity_is_bounded_and_the_lost_make_room() -> None:
    members = roster(*(f"n{i}" for i in range(LEARNERS_MAX)))
    with pytest.raises(RemoteProtocolError) as error:
        members.admit(member("one-more"))
    assert error.value.code is ErrorCode.OVER_CAPACITY
    first = members.get("n0")
    assert first is not None
    members.disconnect(first)
    members.admit(member("one-more"))
    assert len(members.connected()) == LEARNERS_MAX
    with pytest.raises(RemoteProtocolError) as error:
        members.move(first, b"new", "tcp://new", 105.0)
    assert error.value.code is ErrorCode.OVER_CAPACITY


def test_a_contribution_is_expected_within_a_step_and_the_mean_at_least() -> None:
    took = Participation([0], contributed_at=100.0)
    assert took.predicted_s(2.0) is None
    took.arrival.add(0.1)
    assert took.predicted_s(2.0) == pytest.approx(2.1)
    took.arrival.add(20.0)
    assert took.predicted_s(2.0) == took.arrival.upper()
