"""Failures at a learner beside training: copies, encodings, decodings; training goes on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from running import HANG_S, ToyHost, broker_config, client, live_broker, vector

from narrows.broker.process.service import Service
from narrows.learner.session import events as ev
from narrows.learner.transport.client import Client
from narrows.learner.transport.datapath import DataPath
from narrows.learner.transport.push import encode_push
from narrows.proto.codec import F32
from narrows.proto.codec.transfer import advance_copy
from narrows.proto.errors import Unfinished
from narrows.proto.fragments import Fragment


class FailingHost(ToyHost):
    """Fails at the given numbers of its snapshots and adoptions, those half done."""

    def __init__(self, failing: str, numbers: range, error: Exception) -> None:
        super().__init__(vector(1))
        self.failing, self.numbers, self.error = failing, numbers, error
        self.counts = {"snapshot": 0, "adopt": 0}
        self.failed = 0
        self.torn: set[int] = set()
        """Fragments of which the parameters hold only a part."""

    def _fails(self, kind: str) -> bool:
        self.counts[kind] += 1
        fails = kind == self.failing and self.counts[kind] in self.numbers
        self.failed += fails
        return fails

    def snapshot(self, fragment: Fragment, out: F32) -> None:
        assert fragment.index not in self.torn, "a push from a wrong base"
        if self._fails("snapshot"):
            raise self.error
        super().snapshot(fragment, out)

    def adopt(self, fragment: Fragment, values: F32) -> None:
        if self._fails("adopt"):
            before = self.x.copy()
            super().adopt(fragment, values)
            self.x[::2] = before[::2]
            self.torn.add(fragment.index)
            raise self.error
        super().adopt(fragment, values)
        self.torn.discard(fragment.index)


@pytest.fixture
def service(tmp_path: Path) -> Generator[Service]:
    config = broker_config(tmp_path, fragments__sync_period_steps=4, merge__quorum=1)
    with live_broker(config) as service:
        yield service


def train_until(
    learner: Client,
    host: ToyHost,
    condition: Callable[[], bool],
    caught: type[Exception] | tuple[()] = (),
) -> int:
    """Trains as a loop that skips a batch after an error `caught`; returns the number of errors."""
    pace, errors = threading.Event(), 0
    for _ in range(int(HANG_S * 100)):
        if condition():
            return errors
        host.step(0.02)
        pace.wait(0.01)
        try:
            learner.boundary(1, 1.0)
        except caught:
            errors += 1
    raise AssertionError("trained in vain")


def progress(service: Service, versions: int) -> Callable[[], bool]:
    """True once every fragment has so many versions more than now."""
    goal = [version + versions for version in service.syncer.state.versions]
    return lambda: all(v >= g for v, g in zip(service.syncer.state.versions, goal, strict=True))


def told(caplog: pytest.LogCaptureFixture, what: str) -> list[str]:
    """The learner's lines about it; the broker may tell why rounds were declined."""
    lines = [r.getMessage() for r in caplog.records if r.name == "narrows.learner"]
    return [line for line in lines if what in line]


@pytest.mark.parametrize("failing", ["snapshot", "adopt"])
@pytest.mark.parametrize("kind", [MemoryError, torch.OutOfMemoryError, KeyError])
def test_a_copy_that_fails_leaves_no_fragment_behind(
    failing: str, kind: type[Exception], service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    host = FailingHost(failing, range(8, 11), kind("in a copy"))
    learner = client(service, "a", host)
    learner.start()
    try:
        with caplog.at_level(logging.INFO, "narrows.learner"):
            errors = train_until(learner, host, lambda: host.failed == 3, kind)
            errors += train_until(learner, host, progress(service, 3), kind)
        # Lack of memory passes; anything else may be a bug, and is raised as often as it happens.
        assert errors == (3 if kind is KeyError else 0)
        (line,) = told(caplog, "in a copy")
        assert f"{kind.__name__}: " in line
        learner.finish(HANG_S)
    finally:
        learner.abort()


@pytest.mark.parametrize("kind", [MemoryError, KeyError])
def test_an_encoding_that_fails_is_declined_and_told_once(
    kind: type[Exception],
    service: Service,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU with full memory: the next rounds may find some."""
    failed = 0

    def failing(*arguments: Any) -> None:
        nonlocal failed
        if failed < 4:
            failed += 1
            raise kind("no room to encode")
        encode_push(*arguments)

    host = ToyHost(vector(1))
    learner = client(service, "a", host)
    learner.start()
    try:
        train_until(learner, host, progress(service, 1))
        with caplog.at_level(logging.INFO, "narrows.learner"):
            monkeypatch.setattr("narrows.learner.transport.datapath.encode_push", failing)
            train_until(learner, host, lambda: failed == 4)
            train_until(learner, host, progress(service, 3))
        (line,) = told(caplog, "is not sent")
        assert "no room to encode" in line
        learner.finish(HANG_S)
    finally:
        learner.abort()


def test_a_publication_that_cannot_be_applied_is_applied_later(
    service: Service, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = 0

    def failing(*arguments: Any) -> F32:
        nonlocal failed
        if failed < 3:
            failed += 1
            raise MemoryError("no room for the copy")
        return advance_copy(*arguments)

    host = ToyHost(vector(1))
    learner = client(service, "a", host)
    learner.start()
    try:
        with caplog.at_level(logging.INFO, "narrows.learner"):
            monkeypatch.setattr("narrows.learner.transport.datapath.advance_copy", failing)
            train_until(learner, host, lambda: failed == 3)
            train_until(learner, host, progress(service, 3))
        assert len(told(caplog, "no room for the copy")) == 1
        learner.finish(HANG_S)
    finally:
        learner.abort()


def test_version_0_is_read_as_soon_as_it_is_asked_for(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training thread may be faster than the background, which prepares to send it."""
    read, opened = threading.Event(), DataPath.open_streams

    class Host(ToyHost):
        def snapshot(self, fragment: Fragment, out: F32) -> None:
            super().snapshot(fragment, out)
            read.set()

    def open_late(exchange: DataPath, effect: ev.OpenStreams) -> None:
        assert read.wait(HANG_S)
        opened(exchange, effect)

    monkeypatch.setattr(DataPath, "open_streams", open_late)
    learner = client(service, "a", Host(vector(1)))
    learner.start()
    learner.abort()


@contextmanager
def without_room_at_the_goal(tmp_path: Path, failures: int) -> Generator[Client]:
    """A learner whose run is at its goal; so many of its next adoptions lack memory."""
    config = broker_config(tmp_path, fragments__sync_period_steps=4, run__goal_tokens=30)
    with live_broker(config) as service:
        host = FailingHost("adopt", range(0), MemoryError("no room for the last version"))
        learner = client(service, "a", host)
        learner.start()
        try:
            train_until(learner, host, lambda: learner.should_stop)
            first = host.counts["adopt"] + 1
            host.numbers = range(first, first + failures)
            host.step(0.02)  # What it does is to be undone: there is something to adopt.
            learner.boundary(1, 1.0)
            yield learner
            assert host.failed
        finally:
            learner.abort()


def test_a_final_model_is_adopted_once_there_is_memory_again(tmp_path: Path) -> None:
    with without_room_at_the_goal(tmp_path, failures=3) as learner:
        learner.finish(HANG_S)
        assert learner.standing()["narrows.final"] == "true"


def test_a_final_model_that_cannot_be_adopted_is_raised(tmp_path: Path) -> None:
    """To leave quietly would be to leave with another model."""
    with without_room_at_the_goal(tmp_path, failures=10**6) as learner:
        with pytest.raises(Unfinished, match="without the final versions of fragment"):
            learner.finish(timeout_s=5.0)
        assert learner.standing()["narrows.final"] == "false"


def test_what_fails_before_training_is_raised(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any, **__: Any) -> None:
        raise MemoryError("no room for version 0")

    monkeypatch.setattr("narrows.learner.transport.datapath.encode_fragment", failing)
    with pytest.raises(MemoryError, match="no room for version 0"):
        client(service, "a", ToyHost(vector(1))).start()
