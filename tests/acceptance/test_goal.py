"""Two learners train to the goal of a run and leave with the final model."""

from __future__ import annotations

from acceptance.kit import Site, equal, largest_difference
from acceptance.toy import start_model, target_of

WIDTH = 48


def test_every_final_copy_is_the_brokers_bit_for_bit(site: Site) -> None:
    broker = site.broker(goal_tokens=20_000, learners_at_start=2)
    seeds = {"a": 1, "b": 2}
    learners = [site.learner(name, seed=seed, width=WIDTH) for name, seed in seeds.items()]
    for child in (*learners, broker):
        child.ends(0)
    site.check_newest("a", "b")
    assert min(site.contributions(name) for name in "ab") >= 4
    site.check_equal_copies("a", "b")
    site.check_replay()
    assert equal(site.final("a"), site.final("b"))
    # Both have taught the model: it is nearer to each target than at the start. The model of one
    # alone would be 1.4 times as far from the other's target.
    start, final = start_model(WIDTH).weight, site.final("a")["weight"]
    for name, seed in seeds.items():
        target = target_of(WIDTH, seed)
        assert (final - target).norm() < 0.95 * (start - target).norm(), name
    # The export has the global model, which no learner holds before it is coded.
    assert largest_difference(site.final("a"), site.export()) < 0.1
