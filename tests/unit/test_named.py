"""Causes that the log names once in a while."""

from __future__ import annotations

from narrows.broker.process.named import NAMED_MAX, NAMED_S, Named


def test_a_cause_is_named_once_and_again_after_an_hour() -> None:
    named = Named()
    assert [named.is_due("a", now) for now in (0.0, 1.0, NAMED_S - 1.0, NAMED_S)] == [
        True, False, False, True,
    ]  # fmt: skip


def test_a_flood_of_causes_ends_and_leaves_room_for_later_ones() -> None:
    named = Named()
    assert sum(named.is_due(f"n{number}", 1.0) for number in range(9999)) == NAMED_MAX
    assert not named.is_due("honest", NAMED_S)
    assert named.is_due("honest", NAMED_S + 1.0)
