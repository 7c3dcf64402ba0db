"""A disk that takes no more of a run holds its versions back, and costs nothing else."""

from __future__ import annotations

from acceptance.kit import CODECS, DISK_REMEDY, Site, wait_until


def test_nothing_is_published_that_is_not_on_disk(site: Site) -> None:
    """A limit on the length of files stands in for the full disk: it needs no rights, and stops the
    journal alone, which is longer than all other files."""
    raw = {"push_codec": CODECS["lossless"], "publish_codec": CODECS["lossless"]}
    broker = site.broker(journal_keep=True, **raw)
    learners = [site.learner("a", seed=1), site.learner("b", seed=2)]
    wait_until(lambda: len(site.merged()) >= 8, "rounds", broker, *learners)

    broker.limit_files(32_000)
    wait_until(lambda: DISK_REMEDY in broker.log, "the broker to complain", broker, *learners)
    site.steps_on(60, "a", "b")  # What was on disk before is adopted by now.
    adopted = [site.adopted(name) for name in "ab"]
    site.steps_on(40, "a", "b")
    assert [site.adopted(name) for name in "ab"] == adopted
    assert site.view().waits_for_disk

    broker.limit_files(None)
    rounds = len(site.merged())
    wait_until(lambda: len(site.merged()) >= rounds + 8, "more rounds", broker, *learners)
    assert not site.view().waits_for_disk
    for learner in learners:
        learner.kill()
    broker.stop()
    site.check_durable("a", "b")
    site.check_replay()
