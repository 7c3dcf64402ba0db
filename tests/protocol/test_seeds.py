"""Seeded runs with faults: nothing wrong happens, and once the faults stop all is well again."""

from __future__ import annotations

from random import Random

import pytest
from checkers import check_end, check_progress, check_safety

from narrows.bench.sim.learner import LearnerSpec, SimulatedLearner
from narrows.bench.sim.simulation import Simulation
from narrows.bench.sim.virtual import Faults
from narrows.broker.config import BrokerConfig, preset
from narrows.proto.config import override
from narrows.proto.messages import Mode

FAULTS_UNTIL_S = 20.0
HEALING_S = 40.0
"""From the last fault until merges must go on: freezes and restarts of 15 s, then liveness."""
MEASURED_S = 30.0
END_S = 400.0


class Hanging(SimulatedLearner):
    """Its training thread never comes back from its last step; the rest of it lives on."""

    def _train(self) -> None:
        if not self.session.should_stop:
            super()._train()


class SeededRun(Simulation):
    """A run in which one learner may hang at the end."""

    hanging = ""

    def make_learner(self, spec: LearnerSpec) -> SimulatedLearner:
        kind = Hanging if spec.name == self.hanging else SimulatedLearner
        return kind(self.clock, self.random, self.faults, self, spec, self.layout)


def draw(seed: int) -> SeededRun:
    """A run whose mode, learners and faults all follow from the seed."""
    random = Random(seed)
    mode = random.choice([Mode.DECOUPLED, Mode.DECOUPLED, Mode.STREAMING, Mode.DILOCO])
    learners = [
        LearnerSpec(
            name,
            step_s=random.uniform(0.3, 0.8),
            tokens_per_step=random.randint(50, 150),
            joins_at_s=random.choice([0.0, 0.0, random.uniform(0.0, 15.0)]),
            contribute_after_steps=random.choice([0, 0, 5]),
        )
        for name in "abcd"[: random.randint(1, 4)]
    ]
    ends = random.random() < 0.6
    goal = sum(s.tokens_per_step / s.step_s for s in learners) * (FAULTS_UNTIL_S + 2.0)
    config = override(
        override(BrokerConfig(), preset(mode)),
        {
            "fragments.count": 1 if mode is Mode.DILOCO else random.randint(1, 4),
            "fragments.sync_period_steps": random.choice([4, 6, 10]),
            "fragments.overlap_steps": 0 if mode is Mode.DILOCO else random.randint(0, 3),
            # The periods are short, so that much happens in little time; a quarter of one would be
            # shorter than a step of the slowest learner.
            "merge.wait_fraction": 0.5,
            "merge.quorum": min(len(learners), random.choice([1, 1, 2])),
            "codec.chunk_elements": random.choice([512, 1024, 4096]),
            "wan.streams": random.choice([1, 2, 4]),
            "broker.checkpoint_versions": random.choice([1, 5, 20]),
            "run.goal_tokens": int(goal) if ends else 0,
            "run.learners_at_start": random.choice([1, len(learners)]),
        },
    )
    simulation = SeededRun(config, seed, draw_faults(random), learners)
    if ends and len(learners) > 1 and random.random() < 0.25:
        simulation.hanging = learners[-1].name
    return simulation


def draw_faults(random: Random) -> Faults:
    """Each kind of fault is absent in half of the runs, so that some see only a few."""

    def some(largest: float) -> float:
        return random.choice([0.0, random.uniform(0.0, largest)])

    return Faults(
        until_s=FAULTS_UNTIL_S,
        loss=some(0.3),
        duplicate=some(0.2),
        slow=some(0.2),
        damage=some(0.05),
        breaks_per_s=some(0.2),
        crashes_per_s=some(0.1),
        freezes_per_s=some(0.1),
        pauses_per_s=some(0.1),
        broker_crashes_per_s=some(0.15),
        restores=some(1.0),
        copies=some(0.3),
    )


def run(seed: int) -> None:
    """One seed; raises AssertionError."""
    simulation = draw(seed)
    simulation.run(FAULTS_UNTIL_S)
    check_safety(simulation)
    if simulation.config.run.goal_tokens:
        simulation.run(END_S)
        check_safety(simulation)
        check_end(simulation, simulation.hanging)
    else:
        healed_s = FAULTS_UNTIL_S + HEALING_S
        simulation.run(healed_s + MEASURED_S)
        check_safety(simulation)
        check_progress(simulation, healed_s)


def test_seeds(seeds: range) -> None:
    for seed in seeds:
        try:
            run(seed)
        except AssertionError as error:
            again = f"make chaos SEEDS=1 ARGS=--first-seed={seed}"
            pytest.fail(f"seed {seed}: {error}\nrepeat it with: {again}")


def test_a_seed_gives_the_same_run_again() -> None:
    first, second = draw(3), draw(3)
    first.run(FAULTS_UNTIL_S)
    second.run(FAULTS_UNTIL_S)
    assert first.trace == second.trace
