"""A broker is stopped in order and started again; its learners come back by themselves."""

from __future__ import annotations

from typing import Any

from acceptance.kit import Site

SETTINGS: dict[str, Any] = {"learners_at_start": 2, "fragments": 2, "journal_keep": True}


def test_a_restart_has_the_same_versions_and_the_learners_come_back(site: Site) -> None:
    broker = site.broker(**SETTINGS)
    learners = [site.learner(name, seed=seed) for seed, name in enumerate("ab")]
    site.contribute("a", "b", count=3)
    # Nobody adds a version between the two looks at them.
    for learner in learners:
        learner.freeze()
    broker.stop()
    before = site.last_view()
    broker = site.broker(**SETTINGS)
    after = site.view()
    assert after.run_id == before.run_id and after.life > before.life
    assert after.versions == before.versions and sum(after.versions) >= 3
    assert after.run_tokens == before.run_tokens > 0
    for learner in learners:
        learner.thaw()
    site.contribute("a", "b", count=3)
    broker.stop()
    for learner in learners:
        learner.kill()
    site.check_durable("a", "b")
    site.check_equal_copies("a", "b")
    site.check_replay()
