"""The broker stops, is killed, finds the disk full, is set back: nothing that was seen is lost."""

import random
import shutil
import signal

import pytest
from acceptance.kit import LOSSLESS, Site, limit_files

from narrows.bench.kit.processes import wait_until

NAMES = ("a", "b", "c")
CRASH_POINTS = ("merged", "appended", "durable", "installed", "published")
"""Places of a round at which `NARROWS_CRASH_AT=NAME:N` ends a broker at the Nth visit."""

KEEP = "broker.keep_history=true"
HISTORY_LOST = "is an older copy"
"""Words in the broker's note that learners hold versions which its state directory lacks."""


@pytest.mark.timeout(120)
def test_a_stop_and_ten_kills_lose_no_version_that_a_learner_saw(site: Site) -> None:
    rng = random.Random(5)
    settings = ("fragments.count=2", KEEP)
    broker = site.broker(*settings)
    learners = [site.learner(name, seed=seed) for seed, name in enumerate(NAMES)]
    site.contribute(*NAMES, count=3)
    for learner in learners:  # Nobody adds a version between the two looks at them.
        learner.signal(signal.SIGSTOP)
    broker.stop()
    before = site.final()
    broker = site.broker(*settings)
    after = site.status()
    for fact in ("run_id", "run_tokens"):
        assert after[fact] == before[fact]
    old, versions = ([each["version"] for each in said["fragments"]] for said in (before, after))
    assert versions == old and sum(versions) >= 3 and after["run_tokens"] > 0
    assert int(after["epoch"].split("-")[0]) > int(before["epoch"].split("-")[0])
    for learner in learners:
        learner.signal(signal.SIGCONT)
    site.contribute(*NAMES)
    broker.kill()
    for number, place in enumerate(CRASH_POINTS):
        site.broker(*settings, crash_at=f"{place}:{rng.randint(1, 5)}").ends(-9)
        broker = site.broker(*settings)
        site.merge(rng.randint(1, 5))
        if number % 2 == 0:
            # What is published while the disk takes nothing is lost with the process.
            limit_files(broker, 0)
        site.steps_on(rng.randint(1, 30), *NAMES)
        broker.kill()
    broker = site.broker(*settings)
    site.contribute(*NAMES)
    broker.stop()
    for learner in learners:
        learner.kill()
    site.check_durable(*NAMES)
    site.check_run()


def test_a_full_disk_holds_publishing_back_and_costs_nothing_else(site: Site) -> None:
    """A limit on the length of files stands in for the full disk: it needs no rights, and stops the
    journal alone, which is longer than all other files."""
    broker = site.broker(KEEP, *LOSSLESS)
    learners = [site.learner("a", seed=1), site.learner("b", seed=2)]
    site.merge(8)
    limit_files(broker, 32_000)
    wait_until(lambda: "cannot be written" in broker.log, "a complaint", broker, *learners)
    site.steps_on(60, "a", "b")  # What was on disk before is adopted by now.
    adopted = [site.adopted(name) for name in "ab"]
    site.steps_on(40, "a", "b")
    assert [site.adopted(name) for name in "ab"] == adopted
    assert site.status()["disk"]["error"]

    limit_files(broker, -1)
    site.merge(8)
    assert not site.status()["disk"]["error"]
    for learner in learners:
        learner.kill()
    broker.stop()
    site.check_durable("a", "b")
    site.check_run()


def test_learners_that_are_ahead_of_a_restored_backup_go_back(site: Site) -> None:
    def both_take_part() -> None:
        site.contribute("a", "b", count=4)
        site.adopt("a", "b", count=5)

    def warned() -> bool:
        return any(HISTORY_LOST in note["text"] for note in site.events("broker", "note"))

    copy = site.folder / "copy"
    broker = site.broker(KEEP)
    learners = [site.learner("a", seed=1), site.learner("b", seed=2)]
    both_take_part()
    broker.stop()
    shutil.copytree(site.state, copy)

    lost = site.broker(KEEP)
    both_take_part()
    assert not warned()
    lost.kill()
    shutil.rmtree(site.state)
    shutil.copytree(copy, site.state)

    restored = site.broker(KEEP)
    both_take_part()
    for learner in learners:
        learner.kill()
    restored.stop()
    assert warned()
    durable = site.journal()
    for name in "ab":
        for one in site.events(name, "installed")[-5:]:
            known = durable.get((one["fragment"], one["version"]))
            assert known == one["digest"], f"{name} has not gone back"
    site.check_run("a", "b")
