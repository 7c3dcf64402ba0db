"""Two learners train to the goal of a run and leave with the final model."""

from __future__ import annotations

from acceptance.kit import Site, equal, largest_difference


def test_every_final_copy_is_the_brokers_bit_for_bit(site: Site) -> None:
    broker = site.broker(goal_tokens=20_000, learners_at_start=2)
    learners = [site.learner("a", seed=1), site.learner("b", seed=2)]
    for child in (*learners, broker):
        child.ends(0)
    durable = site.journal()
    newest = {f: max(v for g, v in durable if g == f) for f, _ in durable}
    for name in "ab":
        adopted = site.adopted(name)
        assert all(adopted[last] == durable[last] for last in newest.items())
        assert site.contributions(name) >= 4
        losses = site.told(name)["losses"]
        assert sum(losses[-10:]) < sum(losses[:10])
    site.check_equal_copies("a", "b")
    site.check_replay()
    assert equal(site.final("a"), site.final("b"))
    # The export has the global model, which no learner holds before it is coded.
    assert largest_difference(site.final("a"), site.export()) < 0.1
