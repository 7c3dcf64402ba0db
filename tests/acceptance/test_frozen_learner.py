"""A learner stands still for a while, as when its machine swaps or is suspended."""

from __future__ import annotations

import pytest
from acceptance.kit import Site, wait_until


@pytest.mark.parametrize("is_long", [False, True], ids=["shortly", "until it is silent"])
def test_a_frozen_learner_holds_nobody_up_and_comes_back(site: Site, is_long: bool) -> None:
    broker = site.broker(learners_at_start=3, fragments=2)
    frozen, *_ = [site.learner(name, seed=seed) for seed, name in enumerate("abc")]
    site.contribute("a", "b", "c", count=2)
    frozen.freeze()
    site.contribute("b", "c", count=5)
    # Its last pushes had arrived before; from here on the others are on their own.
    alone = len(site.merged())
    site.contribute("b", "c", count=20)
    if is_long:
        wait_until(lambda: site.view().learners["a"].state == "silent", "silence of a", broker)
    assert not any("a" in one["contributors"] for one in site.merged()[alone:])
    frozen.thaw()
    site.contribute("a", "b", "c", count=3)
    broker.stop()
    site.check_equal_copies("a", "b", "c")
    site.check_replay()
