"""The two tables, exhaustively."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
from desk import Desk

from narrows.broker.syncer.stages import RunPhase, Stage, Step
from narrows.proto.messages import Phase


@pytest.mark.parametrize("step", Step)
def test_a_round_takes_only_the_six_moves(step: Step) -> None:
    assert len(Step) == len({each.value for each in Step}) == 6
    desk = Desk()
    round_ = desk.syncer.state.rounds[0]
    for stage in Stage:
        round_.stage = stage
        if stage is step.value[0]:
            desk.syncer._rounds.move(round_, step)
            assert round_.stage is step.value[1]
        else:
            with pytest.raises(AssertionError, match=f"{step.name} in stage {stage.name}"):
                desk.syncer._rounds.move(round_, step)


@pytest.mark.parametrize(("before", "after"), list(product(RunPhase, RunPhase)))
def test_a_run_takes_its_phases_in_order(before: RunPhase, after: RunPhase) -> None:
    state = Desk().syncer.state
    state.phase = before
    if (before, after) in pairwise(RunPhase):
        state.turn(after)
        assert state.phase is after
    else:
        with pytest.raises(AssertionError, match=f"{after.name} after {before.name}"):
            state.turn(after)


def test_learners_see_four_phases() -> None:
    assert {phase.visible for phase in RunPhase} == set(Phase)
    assert RunPhase.CLOSING.visible is Phase.ENDING
