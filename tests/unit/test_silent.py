"""Connections that have never sent a message, by address."""

from __future__ import annotations

from narrows.broker.process.silent import CUT_AT_ONCE_MAX, SilentConnections


def silent(**addresses: range) -> list[tuple[str, int]]:
    return sorted(
        ((a, d) for a, those in addresses.items() for d in those), key=lambda each: each[1]
    )


def test_within_what_its_names_may_have_nobody_is_too_many() -> None:
    those = SilentConnections()
    those.admitted("lab", "a", 6)
    those.admitted("lab", "b", 6)
    assert those.too_many([]) == []
    assert those.too_many(silent(lab=range(12))) == []
    assert those.too_many(silent(lab=range(13))) == [0]


def test_the_oldest_of_the_worst_go() -> None:
    those = SilentConnections()
    those.admitted("lab", "a", 6)
    those.admitted("den", "mallory", 6)
    those.admitted("cave", "mallory", 6)
    # Two addresses of one name have together what the name may have.
    found = silent(lab=range(0, 7), den=range(10, 15), cave=range(20, 25))
    assert those.too_many(found) == [10, 11, 12, 13]


def test_where_nobody_has_proved_a_key_all_are_too_many() -> None:
    those = SilentConnections()
    those.admitted("lab", "a", 6)
    assert those.too_many(silent(lab=range(6), street=range(7, 9))) == [7, 8]


def test_few_go_at_once() -> None:
    found = SilentConnections().for_room(silent(street=range(1000)))
    assert found == list(range(CUT_AT_ONCE_MAX))


def test_what_is_too_many_goes_bit_by_bit_while_there_is_room() -> None:
    those = SilentConnections()
    those.admitted("lab", "a", 6)
    there, seconds = range(106), 0
    while gone := those.due(silent(lab=there), float(seconds)):
        assert gone == list(there)[: len(gone)] and len(gone) <= 7
        there, seconds = range(there.start + len(gone), 106), seconds + 1
        assert not those.due(silent(lab=there), seconds - 0.5)
    assert len(there) == 6 and seconds < 60


def test_an_address_has_the_names_that_were_admitted_there() -> None:
    those = SilentConnections()
    those.admitted("fe80::1%eth0", "a", 6)
    assert those.has("fe80::1", {"a", "b"})
    assert not those.has("fe80::1", {"b"}) and not those.has("fe80::2", {"a"})


def test_an_address_without_connections_is_forgotten() -> None:
    those = SilentConnections()
    those.admitted("fe80::1%eth0", "a", 6)
    those.keep({"fe80::1"})
    assert those.too_many([("fe80::1", 3)]) == []
    those.keep(set())
    assert those.too_many([("fe80::1", 3)]) == [3]
