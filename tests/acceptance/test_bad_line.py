"""A learner behind a bad line stays in the run, with the broker's bits, whatever the line does."""

from __future__ import annotations

from acceptance.kit import CODECS, Child, Site, wait_until
from acceptance.proxy import CONTROL, PUBLICATIONS, PUSHES, Direction, Proxy

CUTS: list[tuple[int, Direction, int]] = [
    (PUSHES, "up", 5_000),
    (PUBLICATIONS, "down", 5_000),
    (CONTROL, "up", 500),
    (CONTROL, "down", 500),
]
"""Port, direction, and bytes until the reset: half a fragment, or some reports or beats."""

ENOUGH = 2
"""Contributions of which the last builds on what the learner has adopted meanwhile."""


def contributes(site: Site, name: str, *watched: Child) -> None:
    """Waits until a learner has contributed again, and adopted again."""
    before, adopted = site.contributions(name), len(site.events(name, "installed"))
    wait_until(
        lambda: (
            site.contributions(name) >= before + ENOUGH
            and len(site.events(name, "installed")) >= adopted + ENOUGH
        ),
        f"{name} to contribute and to adopt",
        *watched,
    )


def test_resets_and_a_black_hole_cost_no_bit(site: Site) -> None:
    raw = {"push_codec": CODECS["lossless"], "publish_codec": CODECS["lossless"]}
    broker = site.broker(**raw)
    with Proxy(site.ports.first) as proxy:
        a = site.learner("a", seed=1, width=96)
        b = site.learner("b", seed=2, width=96, broker=proxy.address)
        watched = (broker, a, b)
        contributes(site, "b", *watched)

        for number, cut in enumerate(CUTS, 1):
            proxy.cut_after(*cut)
            wait_until(lambda: proxy.cuts >= number, f"the reset {cut}", *watched)  # noqa: B023
            contributes(site, "b", *watched)
        assert proxy.cuts == len(CUTS)
        proxy.cut()
        contributes(site, "b", *watched)

        proxy.hold()
        before = len(site.merged())
        wait_until(
            lambda: any(len(event["live"]) == 1 for event in site.merged()[before:]),
            "the run to go on without b",
            *watched,
        )
        contributes(site, "a", *watched)
        proxy.release()
        contributes(site, "b", *watched)

        for learner in (a, b):
            learner.kill()
        broker.stop()
    site.check_equal_copies("a", "b")
    site.check_replay()
