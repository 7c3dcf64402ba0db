"""`narrows demo` in miniature: what a newcomer sees first."""

from __future__ import annotations

import math

import pytest
from acceptance.demo import LEARNERS, PATIENCE_S, VICTIM, Demo
from acceptance.kit import Site

STEPS = 100
KILLED_FROM = 0.4
"""Share of the run from which on the demo kills a learner."""


@pytest.mark.timeout(180)
def test_a_killed_learner_comes_back_and_all_copies_are_equal(site: Site) -> None:
    demo = Demo(site, steps=STEPS)
    demo.wait_until(demo.run.merged, "the run to begin")
    share = KILLED_FROM * demo.goal_tokens()
    # The demo kills only if the rest of the run leaves time to come back. So short a run does
    # not: it has to stand still while that learner dies, and while it starts again.
    demo.wait_until(lambda: demo.run_tokens() >= share, "the hour of the victim")
    demo.freeze(*LEARNERS)
    demo.wait_until(lambda: not demo.living(VICTIM), "the demo to kill a learner")
    demo.thaw(*LEARNERS)
    demo.wait_until(lambda: demo.living(VICTIM), "the demo to start it again")
    merged = demo.run.contributions(VICTIM)
    others = [name for name in LEARNERS if name != VICTIM]
    demo.freeze(*others)
    demo.wait_until(lambda: demo.run.contributions(VICTIM) > merged, "it to be merged again")
    demo.thaw(*others)
    assert demo.child.wait(PATIENCE_S) == 0, demo.child.tail()
    result = demo.result()
    assert result.victim_merged_again
    assert result.copies_compared > 0 == result.copies_differing
    demo.run.check_equal_copies(*LEARNERS)
    # A model that has learned nothing takes every byte for equally likely.
    assert result.loss < math.log(256) - 2
    assert result.bytes_moved < result.data_parallel_bytes / 10
    assert max(map(len, demo.child.log.splitlines())) <= 100
    assert "was killed" in demo.picture.read_text().replace("&#160;", " ")
    told = " ".join(demo.child.log.split())
    ratio = round(result.data_parallel_bytes / result.bytes_moved)
    assert "went over the wire; data parallel would have needed" in told
    assert f"{ratio} times as much" in told
