"""A backup of the state directory is put back while learners hold what came after it."""

from __future__ import annotations

import shutil
from typing import Any

from acceptance.kit import HISTORY_LOST, Child, Site, wait_until


def both_take_part(site: Site, *learners: Child) -> None:
    """Waits for rounds of each fragment and of both learners, and until both have adopted some."""
    rounds, adoptions = len(site.merged()), {n: len(site.events(n, "installed")) for n in "ab"}

    def done() -> bool:
        new = site.merged()[rounds:]
        return (
            {name for event in new for name in event["contributors"]} == {"a", "b"}
            and len({event["fragment"] for event in new}) == 4
            and all(len(site.events(n, "installed")) >= adoptions[n] + 5 for n in "ab")
        )

    wait_until(done, "both to take part", site.broker_child, *learners)


def going_back(adopted: list[dict[str, Any]]) -> int:
    """Index of the first adoption of a version below one that the learner had before."""
    newest: dict[int, int] = {}
    for index, one in enumerate(adopted):
        if one["version"] < newest.get(one["fragment"], 0):
            return index
        newest[one["fragment"]] = one["version"]
    raise AssertionError(f"no learner has gone back: {newest}")


def test_learners_that_are_ahead_go_back_and_the_run_lives(site: Site) -> None:
    copy = site.folder / "copy"
    site.broker(journal_keep=True)
    learners = [site.learner("a", seed=1), site.learner("b", seed=2)]
    both_take_part(site, *learners)
    site.broker_child.stop()
    shutil.copytree(site.state, copy)

    lost = site.broker(journal_keep=True)
    both_take_part(site, *learners)
    assert not any(HISTORY_LOST in note["text"] for note in site.events("broker", "note"))
    lost.kill()
    shutil.rmtree(site.state)
    shutil.copytree(copy, site.state)

    restored = site.broker(journal_keep=True)
    both_take_part(site, *learners)
    for learner in learners:
        learner.kill()
    restored.stop()

    assert any(HISTORY_LOST in note["text"] for note in site.events("broker", "note"))
    durable = site.journal()
    for name in "ab":
        adopted = site.events(name, "installed")
        after = adopted[going_back(adopted) :]
        assert all(durable[one["fragment"], one["version"]] == one["digest"] for one in after)
    site.check_equal_copies("a", "b")
    site.check_replay()
