"""A learner joins late, and one is ten times slower than the others."""

from __future__ import annotations

from acceptance.kit import Site


def test_a_late_and_a_slow_learner_contribute(site: Site) -> None:
    broker = site.broker(learners_at_start=2, fragments=2, sync_period=20)
    site.learner("fast", seed=1, step_s=0.01)
    site.learner("slow", seed=2, step_s=0.1)
    site.contribute("fast", count=4)
    before = len(site.merged())
    site.learner("late", seed=3, step_s=0.01)
    site.contribute("slow", "late", "fast", count=3)
    broker.stop()
    rounds = site.merged()
    assert not any("late" in one["contributors"] for one in rounds[:before])
    assert any(len(one["contributors"]) >= 2 for one in rounds)
    site.check_equal_copies("fast", "slow", "late")
    site.check_replay()
