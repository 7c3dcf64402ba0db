"""The cases of the end with small models; `end_of_run.py` has the literal ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos.end_of_run import CASES, Outcome, run

pytestmark = pytest.mark.slow

LOST_S = 4.0
"""Long enough for a busy machine, short enough that every case outlasts it."""


def of(case: str, folder: Path, parameters: int) -> Outcome:
    outcome = run(
        CASES[case](3 * LOST_S), folder, parameters=parameters, lost_s=LOST_S, broker_s=LOST_S
    )
    assert outcome.exit_codes["broker"] == 0
    return outcome


def test_a_line_on_which_the_last_transfer_takes_long_gets_the_final_model(tmp_path: Path) -> None:
    """Nothing is known of the line when the goal is reached, and a transfer takes 12 seconds."""
    outcome = of("slow-line", tmp_path, 400_000)
    assert outcome.final == {"a": "true"}
    assert outcome.same == {"a": True}
    assert min(outcome.versions) >= 1
    assert "goes on without" not in outcome.log
    assert outcome.log.rstrip().endswith("all learners have the final model")


def test_one_in_a_long_step_costs_nobody_the_final_model(tmp_path: Path) -> None:
    outcome = of("long-step", tmp_path, 20_000)
    assert outcome.final == dict.fromkeys(("a", "b", "slow"), "true")
    assert outcome.same == dict.fromkeys(("a", "b", "slow"), True)
    assert "the end goes on without slow" in outcome.log


def test_one_that_hangs_does_not_hold_the_end(tmp_path: Path) -> None:
    outcome = of("hung", tmp_path, 20_000)
    assert outcome.final == {"a": "true", "b": "true"}
    assert outcome.same == {"a": True, "b": True}
    assert "2 of 3 learners have the final model; not adopted: hung" in outcome.log


def test_a_trickle_does_not_hold_the_end_and_its_learner_is_told(tmp_path: Path) -> None:
    outcome = of("trickle", tmp_path, 100_000)
    assert outcome.final == {"a": "true", "b": "true", "narrow": "false"}
    assert (outcome.same["a"], outcome.same["b"]) == (True, True)
    assert (outcome.exit_codes["a"], outcome.exit_codes["narrow"]) == (0, 1)
    assert "left without the final versions of" in outcome.said["narrow"]
    assert "the end goes on without narrow" in outcome.log
