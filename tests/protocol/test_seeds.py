"""Seeded runs with faults: nothing wrong happens, and once the faults stop all is well again."""

from __future__ import annotations

from functools import partial
from math import prod
from random import Random

import pytest
from checkers import check_end, check_progress, check_safety
from gated_broker import GatedBroker
from line_checkers import check_lines
from msgspec import structs

from narrows.bench.sim import simulation
from narrows.bench.sim.learner import LearnerSpec, SimulatedLearner
from narrows.bench.sim.line import Acknowledged, Crossing, LineSpec
from narrows.bench.sim.payloads import BITS_PER_ELEMENT
from narrows.bench.sim.simulation import LAYOUT, Simulation
from narrows.bench.sim.virtual import Faults
from narrows.broker.config import BrokerConfig, preset
from narrows.proto.config import override
from narrows.proto.limits import RATE_MIN
from narrows.proto.messages import LayoutEntry, Mode
from narrows.proto.socket_options import STREAM_WINDOW_BYTES

FAULTS_UNTIL_S = 20.0
HEALING_S = 40.0
"""From the last fault until merges must go on: freezes and restarts of 15 s, then liveness."""
MEASURED_S = 30.0
END_S = 400.0

STEP_S = (0.3, 0.8)
SURPLUS = (2.0, 8.0)
"""A limited line carries so many times what the fastest rounds take."""


class Hanging(SimulatedLearner):
    """Its training thread never comes back from its last step; the rest of it lives on."""

    def _train(self) -> None:
        if not self.session.should_stop:
            super()._train()


class SeededRun(Simulation):
    """A run in which one learner may hang at the end; `log` has all that went onto the lines."""

    hanging = ""

    def __init__(
        self,
        config: BrokerConfig,
        seed: int,
        faults: Faults,
        learners: list[LearnerSpec],
        *,
        layout: tuple[LayoutEntry, ...],
        window_bytes: int,
    ) -> None:
        self.log: list[Crossing | Acknowledged] = []
        super().__init__(
            config, seed, faults, learners, layout=layout, window_bytes=window_bytes,
            on_line=self.log.append,
        )  # fmt: skip

    def make_learner(self, spec: LearnerSpec) -> SimulatedLearner:
        kind = Hanging if spec.name == self.hanging else SimulatedLearner
        return kind(self.clock, self.random, self.faults, self, spec, self.layout)


def draw(seed: int) -> SeededRun:
    """A run whose mode, learners, lines and faults all follow from the seed."""
    random = Random(seed)
    mode = random.choice([Mode.DECOUPLED, Mode.DECOUPLED, Mode.STREAMING, Mode.DILOCO])
    scale, period = random.choice([1, 1, 1, 10]), random.choice([4, 6, 10])
    layout = scaled(LAYOUT, scale)
    needed = bits_per_s_needed(layout, period)
    learners = [
        LearnerSpec(
            name,
            step_s=random.uniform(*STEP_S),
            tokens_per_step=random.randint(50, 150),
            joins_at_s=random.choice([0.0, 0.0, random.uniform(0.0, 15.0)]),
            contribute_after_steps=random.choice([0, 0, 5]),
            line=draw_line(random, needed),
        )
        for name in "abcd"[: random.randint(1, 4)]
    ]
    ends = random.random() < 0.6
    goal = sum(s.tokens_per_step / s.step_s for s in learners) * (FAULTS_UNTIL_S + 2.0)
    config = override(
        override(BrokerConfig(), preset(mode)),
        {
            "fragments.count": 1 if mode is Mode.DILOCO else random.randint(1, 4),
            "fragments.sync_period_steps": period,
            "fragments.overlap_steps": 0 if mode is Mode.DILOCO else random.randint(0, 3),
            # The periods are short, so that much happens in little time; a quarter of one would be
            # shorter than a step of the slowest learner.
            "merge.wait_fraction": 0.5,
            "merge.quorum": min(len(learners), random.choice([1, 1, 2])),
            "codec.chunk_elements": scale * random.choice([512, 1024, 4096]),
            "wan.streams": random.choice([1, 2, 4, 8]),
            **draw_rates(random, needed, len(learners)),
            "broker.checkpoint_versions": random.choice([1, 5, 20]),
            "run.goal_tokens": int(goal) if ends else 0,
            "run.learners_at_start": random.choice([1, len(learners)]),
        },
    )
    window_bytes = random.choice([STREAM_WINDOW_BYTES, random.randint(4_000, 64_000)])
    simulation = SeededRun(
        config, seed, draw_faults(random), learners, layout=layout, window_bytes=window_bytes
    )
    if ends and len(learners) > 1 and random.random() < 0.25:
        simulation.hanging = learners[-1].name
    if random.random() < 0.25:
        reloaded = override(config, draw_rates(random, needed, len(learners)))
        at_s = random.uniform(1.0, FAULTS_UNTIL_S)
        simulation.clock.at(at_s, partial(simulation.reload, reloaded))
    return simulation


def scaled(layout: tuple[LayoutEntry, ...], scale: int) -> tuple[LayoutEntry, ...]:
    """A model with so many times the parameters."""
    return tuple(
        structs.replace(entry, shape=(scale * entry.shape[0], *entry.shape[1:])) for entry in layout
    )


def bits_per_s_needed(layout: tuple[LayoutEntry, ...], period_steps: int) -> float:
    """Rate that a learner's fastest rounds take in one direction, control included."""
    elements = sum(prod(entry.shape) for entry in layout)
    push_bits = BITS_PER_ELEMENT["int4-zstd"] * elements
    return RATE_MIN + push_bits / (period_steps * STEP_S[0])


def draw_line(random: Random, needed: float) -> LineSpec:
    """Half of the directions have a capacity, which may be below the rate that is allowed."""

    def some() -> float:
        return random.choice([0.0, needed * random.uniform(*SURPLUS)])

    return LineSpec(some(), some(), random.choice([0.0, random.uniform(0.0, 0.2)]))


def draw_rates(random: Random, needed: float, learners: int) -> dict[str, object]:
    """Each of the four rates is absent in most of the runs."""

    def some(times: int) -> str:
        rate = times * needed * random.uniform(*SURPLUS)
        return random.choice(["0", "0", f"{rate:.0f}bit/s"])

    return {
        "wan.up": some(1),
        "wan.down": some(1),
        "wan.total_up": some(learners),
        "wan.total_down": some(learners),
    }


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
    check_lines(simulation.log, simulation.window_bytes)


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


@pytest.mark.parametrize("seed", range(8))
def test_honest_learners_meet_no_quota(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither at full speed, nor when all come back after a restart of the broker."""
    monkeypatch.setattr(simulation, "SimulatedBroker", GatedBroker)
    GatedBroker.passed = 0
    draw(seed).run(FAULTS_UNTIL_S + HEALING_S)
    assert GatedBroker.passed > 50
