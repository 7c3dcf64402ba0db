"""A broker is killed ten times under load; no version that a learner saw is lost."""

from __future__ import annotations

import random
from typing import Any

import pytest
from acceptance.kit import CRASH_POINTS, Child, Site, wait_until

NAMES = ("a", "b", "c")
OFTEN: dict[str, Any] = {
    "fragments": 2,
    "journal_keep": True,
}


def rounds_on(site: Site, count: int, broker: Child) -> None:
    """Returns once the broker has made `count` more versions."""
    goal = len(site.merged()) + count
    wait_until(lambda: len(site.merged()) >= goal, "more versions", broker)


@pytest.mark.timeout(120)
def test_ten_kills_lose_no_version_that_a_learner_saw(site: Site) -> None:
    rng = random.Random(5)
    broker = site.broker(**OFTEN)
    learners = [site.learner(name, seed=seed) for seed, name in enumerate(NAMES)]
    site.contribute(*NAMES)
    broker.kill()
    for number, place in enumerate(CRASH_POINTS):
        site.broker(crash_at=f"{place}:{rng.randint(1, 5)}", **OFTEN).ends(-9)
        broker = site.broker(**OFTEN)
        rounds_on(site, rng.randint(1, 5), broker)
        if number % 2 == 0:
            # What is published while the disk takes nothing is lost with the process.
            broker.limit_files(0)
        site.steps_on(rng.randint(1, 30), *NAMES)
        broker.kill()
    broker = site.broker(**OFTEN)
    site.contribute(*NAMES)
    broker.stop()
    for learner in learners:
        learner.kill()
    site.check_durable(*NAMES)
    site.check_replay()
