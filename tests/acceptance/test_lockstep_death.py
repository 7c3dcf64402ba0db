"""In the lockstep modes everybody is waited for, until one is counted as lost."""

from __future__ import annotations

import pytest
from acceptance.kit import Site


@pytest.mark.parametrize("mode", ["streaming", "diloco"])
def test_the_others_go_on_after_a_death(site: Site, mode: str) -> None:
    broker = site.broker(mode=mode, learners_at_start=3)
    *_, dead = [site.learner(name, seed=seed) for seed, name in enumerate("abc")]
    site.contribute("a", "b", "c", count=3)
    dead.kill()
    site.contribute("a", "b", count=8)
    broker.stop()
    rounds = [set(one["contributors"]) for one in site.merged()]
    survived = rounds[-5:]
    assert survived == [{"a", "b"}] * len(survived)
    assert rounds.count({"a", "b", "c"}) >= 3
    site.check_equal_copies("a", "b")
    site.check_replay()
