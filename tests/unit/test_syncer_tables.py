"""The two tables, exhaustively."""

from __future__ import annotations

from itertools import product

import pytest

from narrows.broker.syncer.stages import (
    PHASES,
    STAGES,
    RunPhase,
    Stage,
    Step,
    Turn,
    next_phase,
    next_stage,
)
from narrows.proto.messages import Phase


@pytest.mark.parametrize(("stage", "step"), list(product(Stage, Step)))
def test_a_round_takes_only_the_six_transitions(stage: Stage, step: Step) -> None:
    assert len(STAGES) == 6
    if (stage, step) in STAGES:
        assert next_stage(stage, step) is STAGES[stage, step]
    else:
        with pytest.raises(AssertionError, match=f"{step.name} .* in stage {stage.name}"):
            next_stage(stage, step)


@pytest.mark.parametrize(("phase", "turn"), list(product(RunPhase, Turn)))
def test_a_run_takes_only_the_four_transitions(phase: RunPhase, turn: Turn) -> None:
    assert len(PHASES) == 4
    if (phase, turn) in PHASES:
        assert next_phase(phase, turn) is PHASES[phase, turn]
    else:
        with pytest.raises(AssertionError, match=f"{turn.name} .* in phase {phase.name}"):
            next_phase(phase, turn)


def test_learners_see_four_phases() -> None:
    assert {phase.visible for phase in RunPhase} == set(Phase)
    assert RunPhase.CLOSING.visible is Phase.ENDING
