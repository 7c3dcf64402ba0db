"""Learners are slow, come late, freeze, die and come back: nobody is held up, no work is lost."""

from __future__ import annotations

from acceptance.kit import Site, wait_until

SLOW = ("slow-a", "slow-b", "slow-c")
SHARE = 0.9
"""Part of its own tokens that each learner has merged. The rest is on its way: about two steps."""


def test_slow_and_late_learners_beside_a_fast_one_have_their_work_merged(site: Site) -> None:
    settings = ("run.learners_at_start=4", "fragments.count=1", "fragments.sync_period_steps=12")
    broker = site.broker(*settings)
    for seed, name in enumerate(SLOW):
        site.learner(name, seed=seed, step_s=0.3)
    site.learner("fast", seed=3)
    site.contribute("fast", *SLOW)
    before = len(site.merged())
    site.learner("late", seed=4)
    site.steps_on(28, *SLOW, "fast")
    learners = site.status()["learners"]
    shares = {name: one["merged_tokens"] / one["logged_tokens"] for name, one in learners.items()}
    assert len(shares) == 5 and min(shares.values()) >= SHARE, shares
    site.contribute(*SLOW, "late", count=3)
    broker.stop()
    rounds, ended = site.merged(), site.last_status()
    assert not any("late" in one["contributors"] for one in rounds[:before])
    # The clock counts what was merged, no more and no less.
    merged = sum(one["merged_tokens"] for one in ended["learners"].values())
    assert ended["run_tokens"] == merged == sum(one["tokens"] for one in rounds)
    site.check_run(*SLOW, "fast", "late")


def test_who_freezes_or_dies_holds_nobody_up_and_comes_back(site: Site) -> None:
    broker = site.broker("run.learners_at_start=3", "fragments.count=2")
    a, b, c = [site.learner(name, seed=seed) for seed, name in enumerate("abc")]
    site.contribute("a", "b", "c", count=2)
    for is_long in (False, True):
        a.ps.suspend()
        site.contribute("b", "c", count=5)
        # Its last pushes had arrived before; from here on the others are on their own.
        alone = len(site.merged())
        site.contribute("b", "c", count=20)
        if is_long:
            wait_until(lambda: site.status()["learners"]["a"]["state"] == "silent", "its silence")
        assert not any("a" in one["contributors"] for one in site.merged()[alone:])
        a.ps.resume()
        site.contribute("a", "b", "c", count=3)

    before = site.status()
    c.kill()
    b.ps.suspend()
    for name in "bc":  # Another process takes the name.
        joined = site.folder / f"{name}.steps"
        joined.unlink()
        wait_until(joined.exists, f"another {name} to join", site.learner(name, seed=3), broker)
    site.contribute("a", "b", "c", count=2)
    taken = site.status()
    b.ps.resume()
    b.ends(3)
    site.contribute("a", "b", "c", count=6)
    broker.stop()
    after = site.last_status()
    for name in "bc":
        first, second, third = (
            view["learners"][name]["incarnation"] for view in (before, taken, after)
        )
        assert first != second == third
    assert before["run_tokens"] <= taken["run_tokens"] <= after["run_tokens"]
    assert 0 < after["run_tokens"] <= sum(one["tokens"] for one in site.merged()) / 2
    for each in after["learners"].values():
        assert 0 < each["merged_tokens"] <= each["logged_tokens"]
    site.check_run("a", "b", "c")
