"""The broker begins again from an older state while its learners live on. No other faults."""

from __future__ import annotations

import pytest
from checkers import check_progress, check_safety

from narrows.bench.sim.learner import LearnerSpec
from narrows.bench.sim.simulation import Simulation
from narrows.bench.sim.virtual import Faults, Noted
from narrows.broker.config import BrokerConfig, preset
from narrows.proto.config import override

LEARNERS = tuple(LearnerSpec(name, step_s=0.5) for name in "abc")


def restored(mode: str, start: int) -> Simulation:
    """Three starts, 20 s each; then it begins from what the directory held before `start`."""
    settings = {
        "fragments.count": 1 if mode == "diloco" else 2,
        "fragments.sync_period_steps": 4,
        "fragments.overlap_steps": 0 if mode == "diloco" else 1,
        "broker.checkpoint_versions": 1,
    }
    config = override(override(BrokerConfig(), preset(mode)), settings)
    simulation = Simulation(config, 3, Faults(), LEARNERS)
    for second in (20.0, 40.0):
        simulation.run(second)
        simulation.kill_broker(1.0)
    simulation.run(60.0)
    simulation.restore_broker(start, 1.0)
    simulation.run(90.0)
    return simulation


@pytest.mark.parametrize("mode", ["decoupled", "streaming", "diloco"])
@pytest.mark.parametrize("start", [0, 1, 2], ids=["no version", "two lives", "one life"])
def test_the_run_goes_on_with_everybody(mode: str, start: int) -> None:
    simulation = restored(mode, start)
    assert simulation.broker is not None
    assert simulation.broker.syncer.state.epoch == (0, start + 1, 4)
    check_safety(simulation)
    check_progress(simulation, since_s=70.0)
    ledgers = {n: each.session.fragments.ledger.total() for n, each in simulation.learners.items()}
    assert min(ledger.rolled_back for ledger in ledgers.values()) > 0, ledgers
    told = [n.text for n in simulation.trace if isinstance(n, Noted) and "history_lost" in n.text]
    assert told and all("restored from an older copy" in text for text in told), told
