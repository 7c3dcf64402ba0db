"""The time at which a joining learner gives up, and the reason: the broker, or a port."""

from __future__ import annotations

from dataclasses import replace

import pytest

from narrows.learner.session.joining import DataConnection, DataConnections, JoinWatch

UP, DOWN = DataConnection(7071, True, False, 0), DataConnection(7072, True, False, 0)
MESSAGE_BYTES = 2_000_000
MESSAGE_S = 160.0
"""Time of a message at the smallest rate of a budget."""


class Joiner:
    """A learner that looks once a second."""

    def __init__(self, timeout_s: float = 60.0) -> None:
        self.watch = JoinWatch("tcp://broker:7070", timeout_s, 0.0)
        self.now = 0.0

    def gives_up(self, path: DataConnections | None, seconds: int) -> str:
        """Its error within so many seconds of seeing this; "" if it waits on."""
        for _ in range(seconds):
            self.now += 1
            if (error := self.watch.look(path, self.now)) is not None:
                return str(error)
        return ""


def path(up: DataConnection = UP, down: DataConnection = DOWN) -> DataConnections:
    return DataConnections(up, down, MESSAGE_BYTES)


def test_without_a_session_no_broker_has_answered() -> None:
    joiner = Joiner()
    assert not joiner.gives_up(None, 60)
    assert "no broker answered at tcp://broker:7070 for 60 s" in joiner.gives_up(None, 1)


def test_who_waits_for_others_waits_for_ever() -> None:
    assert not Joiner().gives_up(path(), 100_000)


@pytest.mark.parametrize(
    ("blocked", "named"),
    [
        (path(up=replace(UP, is_open=False)), ["7071 (uplink: no connection)"]),
        (path(down=replace(DOWN, is_open=False)), ["7072 (downlink: no connection)"]),
        (
            path(replace(UP, is_open=False), replace(DOWN, is_open=False)),
            ["ports 7071 (uplink: no connection) and 7072 (downlink: no connection)"],
        ),
    ],
)
def test_a_port_without_connection_is_named(blocked: DataConnections, named: list[str]) -> None:
    joiner = Joiner()
    assert not joiner.gives_up(blocked, 60)
    told = joiner.gives_up(blocked, 2)
    assert all(each in told for each in named) and told.count("(") == len(named) + told.count(
        " and 7"
    )


def test_a_connection_that_loses_what_is_large_is_named_later() -> None:
    """A handshake passes, a full segment does not; each connection is closed after a while."""
    joiner = Joiner()
    due = replace(DOWN, is_due=True)
    told = ""
    while not told and joiner.now < 1000:
        told = joiner.gives_up(path(down=due), 20) or joiner.gives_up(
            path(down=replace(due, is_open=False)), 1
        )
    assert "7072 (downlink: connected, but nothing comes)" in told
    assert MESSAGE_S < joiner.now < MESSAGE_S + 5
    up = replace(UP, is_due=True)
    assert "7071 (uplink: connected, but nothing is acknowledged)" in Joiner().gives_up(
        path(up), 1000
    )


def test_progress_however_slow_is_waited_for() -> None:
    joiner = Joiner()
    for sent in range(20):
        up, down = replace(UP, is_due=True), replace(DOWN, is_due=True)
        moving = path(replace(up, progress=sent), replace(down, progress=sent))
        assert not joiner.gives_up(moving, int(MESSAGE_S) - 1)


def test_a_new_session_begins_anew() -> None:
    joiner, blocked = Joiner(), path(up=replace(UP, is_open=False))
    for _ in range(3):
        assert not joiner.gives_up(blocked, 50)
        assert not joiner.gives_up(None, 50)


def test_what_becomes_due_late_has_its_full_time() -> None:
    joiner = Joiner()
    assert not joiner.gives_up(path(), 5000)
    assert not joiner.gives_up(path(down=replace(DOWN, is_due=True)), int(MESSAGE_S))
    assert joiner.gives_up(path(down=replace(DOWN, is_due=True)), 2)
