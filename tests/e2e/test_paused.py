"""Two contributions are wanted, one learner evaluates, and goes on: over real sockets."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from running import ToyHost, broker_config, client, live_broker, vector, wait_until

from narrows.broker.syncer.status import status_of
from narrows.learner.transport.client import Client

STEP_S = 0.02


def steps(count: int, *learners: Client) -> None:
    pace = threading.Event()
    for _ in range(count):
        pace.wait(STEP_S)
        for learner in learners:
            learner.boundary(100, 1.0)


@pytest.mark.slow
def test_a_learner_that_evaluates_costs_the_other_no_pushes(tmp_path: Path) -> None:
    config = broker_config(
        tmp_path, run__learners_at_start=2, merge__quorum=2, fragments__sync_period_steps=8
    )
    with live_broker(config) as service:
        state = service.syncer.state
        a, b = (client(service, name, ToyHost(vector(seed))) for seed, name in enumerate("ab"))
        first = threading.Thread(target=a.start)
        first.start()
        b.start()
        first.join()

        def trained(versions: int) -> bool:
            steps(1, a, b)
            return state.version_sum >= versions

        wait_until(lambda: trained(4), "both to be merged")
        b.pause("evaluating")

        def waits() -> bool:
            steps(1, a)
            rounds = list(state.rounds.values())
            full = len(rounds) == config.merge.rounds_in_flight
            return full and all("a" in r.contributed and "b" in r.declined for r in rounds)

        wait_until(waits, "b to be waited for")
        told = status_of(service.syncer, {}, time.monotonic()).waiting_for
        assert "1 of 2 contributions; b declined (evaluating)" in told
        pushes, versions = a.stats()["pushes"], state.version_sum
        steps(int(3.0 / STEP_S), a)
        assert (a.stats()["pushes"], state.version_sum) == (pushes, versions)
        b.resume()
        wait_until(lambda: trained(versions + 4), "both to be merged again")
        a.abort()
        b.abort()
