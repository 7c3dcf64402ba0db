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
    # Both have taught the model: it has gone towards the target of each. Two targets have nothing
    # in common, so a model that one has taught alone would have gone 0.02 of the way, by chance.
    start, final = start_model(WIDTH).weight.detach(), site.final("a")["weight"]
    for name, seed in seeds.items():
        target = target_of(WIDTH, seed)
        way = ((final - start) * target).sum() / target.square().sum()
        assert way > 0.1, f"{name}: {way:.3f} of the way to its target"
    # The export has the global model, which no learner holds before it is coded.
    assert largest_difference(site.final("a"), site.export()) < 0.1
