"""The goal of a run: everybody leaves with the final model, bit for bit; the end waits for slow
lines, and not for a learner that hangs."""

from __future__ import annotations

import re

import pytest
from acceptance.kit import LOSSLESS, Child, Site, equal, metadata
from acceptance.toy import start_model, target_of

SILENT_S = 3.0
"""Seconds after which rounds do not wait for a learner of which nothing is heard."""
GIVEN_UP_S = 30.0
"""Seconds without anything moving after which the end of a run does not wait for a learner."""
GOAL = 20_000


def not_final(broker: Child) -> set[str]:
    """Learners that took part in the end and lack the final model, as the broker says at last."""
    names = broker.log.partition("without the final model:")[2]
    return set(re.findall(r"(\S+) \(fragment", names))


def check_final(site: Site) -> None:
    """a and b have left with the newest durable version of each fragment, bit for bit."""
    durable = site.journal()
    newest = {fragment: max(v for f, v in durable if f == fragment) for fragment, _ in durable}
    assert newest
    for name in "ab":
        assert {(*last, durable[last]) for last in newest.items()} <= site.adopted(name)
        assert metadata(site.folder / f"{name}.safetensors")["narrows.final"] == "true"
    assert equal(site.final("a"), site.final("b"))
    site.check_run("a", "b")


@pytest.mark.timeout(60 + 2 * GIVEN_UP_S)
def test_a_hung_learner_is_left_behind_and_named(site: Site) -> None:
    settings = ("run.learners_at_start=3", "fragments.sync_period_steps=20")
    broker = site.broker(*settings, goal_tokens=GOAL)
    hung = site.learner("hung", seed=3, hang_at=0.7)
    seeds = {"a": 1, "b": 2}
    patient = [site.learner(name, seed=s, leave_timeout_s=None) for name, s in seeds.items()]
    for child in (*patient, broker):
        child.ends(0, 60 + GIVEN_UP_S)
    assert hung.exit_code is None and not_final(broker) == {"hung"}
    hung.kill()
    check_final(site)
    # What was trained until the goal is in it: one last round of each fragment follows, though one
    # or two may have nothing to merge. Without last rounds at most one is still under way.
    assert len({one["fragment"] for one in site.merged() if one["run_tokens"] >= GOAL}) >= 2
    # Both have taught the model: it has gone towards the target of each. Two targets have nothing
    # in common, so a model that one has taught alone would have gone 0.02 of the way, by chance.
    start, final = start_model(48).weight.detach(), site.final("a")["weight"]
    for name, seed in seeds.items():
        target = target_of(48, seed)
        way = ((final - start) * target).sum() / target.square().sum()
        assert way > 0.1, f"{name}: {way:.3f} of the way to its target"
    # The export has the global model, which no learner holds before it is coded.
    exported = site.export()["weight"]
    behind, way = ((each - exported).square().mean().sqrt() for each in (final, start))
    assert 0 < behind < 0.25 * way, f"{behind:.3f} of {way:.3f}"


def test_learners_on_slow_lines_get_the_final_model(site: Site) -> None:
    """The model is on its way to them for longer than a round waits for anybody: the end waits,
    because something of it arrives all the time."""
    broker = site.broker(
        "run.learners_at_start=2", "fragments.count=1", "wan.down=300kbit/s", *LOSSLESS,
        goal_tokens=150,
    )  # fmt: skip
    a = site.learner("a", seed=1, width=200, step_s=0.1)  # The model has 161 kB: 4.3 s.
    b = site.learner("b", seed=2, width=200, step_s=0.1)
    for child in (a, b, broker):
        child.ends(0)
    assert not not_final(broker)
    check_final(site)
    made = site.merged()[-1]
    for name in "ab":
        adopted = site.events(name, "installed")[-1]
        assert adopted["version"] == made["version"]
        assert adopted["time_s"] - made["time_s"] > SILENT_S
