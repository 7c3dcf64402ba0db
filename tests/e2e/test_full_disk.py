"""Events are for benches and monitors: a disk that takes no more of them stops nobody."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from running import HANG_S, ToyHost, broker_config, client, live_broker, train, vector

FULL = Path("/dev/full")
"""Every write fails: no space left on device."""

pytestmark = pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full (Linux)")


def told(caplog: pytest.LogCaptureFixture, logger: str) -> int:
    lines = [r.getMessage() for r in caplog.records if r.name == logger]
    return sum("events are not written to /dev/full: No space left" in line for line in lines)


def test_a_broker_goes_on_without_its_events(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = broker_config(tmp_path, run__goal_tokens=40, fragments__sync_period_steps=4)
    with live_broker(config, events=FULL) as service:
        train(service, {"a": ToyHost(vector(1))}, rate=0.1, step_s=0.001)
        assert service.syncer.state.tally.merges > 0
    assert told(caplog, "narrows.broker") == 1


def test_a_learner_goes_on_without_its_events(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = broker_config(tmp_path, run__goal_tokens=40, fragments__sync_period_steps=4)
    host, pace = ToyHost(vector(1)), threading.Event()
    with live_broker(config) as service:
        learner = client(service, "a", host, events=FULL)
        learner.start()
        while not learner.should_stop:
            host.step(0.1)
            pace.wait(0.001)
            learner.boundary(1, 1.0)
        learner.finish(HANG_S)
        assert learner.stats()["versions_adopted"] > 0
    assert told(caplog, "narrows.learner") == 1
