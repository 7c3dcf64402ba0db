"""Three slow learners train beside a fast one: the work of each counts."""

from __future__ import annotations

from acceptance.kit import Site

SLOW = ("slow-a", "slow-b", "slow-c")
SHARE = 0.9
"""Part of its own tokens that each learner has merged. The rest is on its way: about two steps."""


def test_slow_learners_beside_a_fast_one_have_their_work_merged(site: Site) -> None:
    broker = site.broker(learners_at_start=4, fragments=1, sync_period=12)
    for seed, name in enumerate(SLOW):
        site.learner(name, seed=seed, step_s=0.3)
    site.learner("fast", seed=3, step_s=0.01)
    site.steps_on(28, *SLOW, "fast")
    view = site.view()
    shares = {name: one.merged_tokens / one.logged_tokens for name, one in view.learners.items()}
    assert len(shares) == 4 and min(shares.values()) >= SHARE, shares
    # The clock counts what was merged, no more and no less.
    broker.stop()
    merged = sum(one.merged_tokens for one in site.last_view().learners.values())
    assert site.last_view().run_tokens == merged == sum(one["tokens"] for one in site.merged())
