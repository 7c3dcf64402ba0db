"""A learner's process dies or freezes, and another one takes its name."""

from __future__ import annotations

from acceptance.kit import Child, Site, wait_until


def in_place_of(site: Site, name: str) -> Child:
    """Starts another process under the name of a learner and waits until it has joined."""
    joined = site.folder / f"{name}.joined"
    joined.unlink()
    successor = site.learner(name, seed=3)
    wait_until(joined.exists, f"another {name} to join", successor, site.broker_child)
    return successor


def test_a_killed_learner_returns_and_is_merged_again(site: Site) -> None:
    broker = site.broker(learners_at_start=2, fragments=2)
    site.learner("a", seed=1)
    first = site.learner("b", seed=2)
    site.contribute("a", "b", count=2)
    before = site.view()
    first.kill()
    in_place_of(site, "b")
    returned = site.view()
    site.contribute("a", "b", count=6)
    broker.stop()
    after = site.last_view()
    assert after.learners["b"].incarnation != before.learners["b"].incarnation
    assert after.learners["b"].contributions > 0
    assert before.run_tokens <= returned.run_tokens <= after.run_tokens
    assert 0 < after.run_tokens <= sum(one["tokens"] for one in site.merged()) / 2
    for each in after.learners.values():
        assert 0 < each.merged_tokens <= each.logged_tokens
    site.check_equal_copies("a", "b")
    site.check_replay()


def test_a_frozen_learner_whose_name_was_taken_is_refused(site: Site) -> None:
    broker = site.broker()
    old = site.learner("a", seed=1)
    site.contribute("a")
    old.freeze()
    in_place_of(site, "a")
    site.contribute("a")
    taken = site.view().learners["a"]
    old.thaw()
    old.ends(3)
    site.contribute("a", count=3)
    kept = site.view().learners["a"]
    assert kept.incarnation == taken.incarnation and kept.contributions >= taken.contributions + 3
    broker.stop()
    assert all(one["contributors"] == ["a"] for one in site.merged())
    site.check_equal_copies("a")
    site.check_replay()
