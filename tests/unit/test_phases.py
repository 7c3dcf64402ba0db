"""The transition table of a run's phases: every phase with every event."""

from __future__ import annotations

from itertools import product

import pytest

from narrows.broker.syncer.phases import TRANSITIONS, RunPhase, Turn, next_phase, resumed_phase
from narrows.proto.errors import ErrorCode, LocalProtocolError
from narrows.proto.messages import Phase

COURSE = ("FOUNDING", "RUNNING", "ENDING", "CLOSING", "ENDED")
TURNS = ("BEGIN", "REACH_GOAL", "CLOSE_LAST_ROUND", "CONFIRM_END")
#: Where each event leads, written down a second time: a changed table must change here too.
LEADS = dict(zip(zip(COURSE, TURNS, strict=False), COURSE[1:], strict=True))


def test_the_table_speaks_of_all_phases_and_events() -> None:
    assert tuple(phase.name for phase in RunPhase) == COURSE
    assert tuple(turn.name for turn in Turn) == TURNS
    assert len(TRANSITIONS) == len(LEADS)


@pytest.mark.parametrize(("phase", "turn"), list(product(RunPhase, Turn)))
def test_every_pair_leads_on_or_is_an_internal_error(phase: RunPhase, turn: Turn) -> None:
    after = LEADS.get((phase.name, turn.name))
    if after is not None:
        assert next_phase(phase, turn) is RunPhase[after]
        return
    with pytest.raises(LocalProtocolError) as error:
        next_phase(phase, turn)
    assert error.value.code is ErrorCode.MISUSE
    assert phase.name in error.value.message
    assert error.value.got.startswith(turn.name)


def test_a_run_goes_through_its_phases_once_and_in_order() -> None:
    phase = RunPhase.FOUNDING
    for turn, after in zip(Turn, list(RunPhase)[1:], strict=True):
        phase = next_phase(phase, turn)
        assert phase is after


def test_learners_see_the_end_when_it_is_durable_and_the_disk_keeps_it_before() -> None:
    visible = [phase.visible for phase in RunPhase]
    stored = [phase.stored for phase in RunPhase]
    assert visible == [
        Phase.FOUNDING, Phase.RUNNING, Phase.ENDING, Phase.ENDING, Phase.ENDED,
    ]  # fmt: skip
    assert stored == [
        Phase.FOUNDING, Phase.RUNNING, Phase.ENDING, Phase.ENDED, Phase.ENDED,
    ]  # fmt: skip
    assert [phase.name for phase in RunPhase if phase.is_over] == ["CLOSING", "ENDED"]


@pytest.mark.parametrize("stored", list(Phase))
def test_a_restart_goes_on_in_the_phase_on_disk(stored: Phase) -> None:
    phase = resumed_phase(stored)
    assert phase.stored is phase.visible is stored
