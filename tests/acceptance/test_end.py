"""The end of a run waits for slow lines, and not for a learner that hangs."""

from __future__ import annotations

import pytest
from acceptance.kit import CODECS, GIVEN_UP_S, SILENT_S, Site, equal, is_final


def check_final(site: Site) -> None:
    """a and b have left with the newest durable version of each fragment, bit for bit."""
    site.check_newest("a", "b")
    assert all(is_final(site.folder / f"{name}.safetensors") for name in "ab")
    assert equal(site.final("a"), site.final("b"))
    site.check_equal_copies("a", "b")
    site.check_replay()


@pytest.mark.timeout(60 + 2 * GIVEN_UP_S)
def test_a_hung_learner_is_left_behind_and_named(site: Site) -> None:
    broker = site.broker(goal_tokens=20_000, learners_at_start=3, sync_period=20)
    hung = site.learner("hung", seed=3, hang_at=0.7)
    patient = {"leave_timeout_s": None}
    a, b = site.learner("a", seed=1, **patient), site.learner("b", seed=2, **patient)
    for child in (a, b, broker):
        assert child.wait(60 + GIVEN_UP_S) == 0, child.tail()
    assert hung.exit_code is None and site.not_final() == {"hung"}
    hung.kill()
    check_final(site)
    # What was trained until the goal is in it: one last round of each fragment follows, though one
    # or two may have nothing to merge. Without last rounds at most one is still under way.
    assert len({one["fragment"] for one in site.merged() if one["run_tokens"] >= 20_000}) >= 2


def test_learners_on_slow_lines_get_the_final_model(site: Site) -> None:
    """The model is on its way to them for longer than a round waits for anybody: the end waits,
    because something of it arrives all the time."""
    broker = site.broker(
        goal_tokens=150, learners_at_start=2, fragments=1, down="300kbit/s",
        publish_codec=CODECS["lossless"],
    )  # fmt: skip
    a = site.learner("a", seed=1, width=200, step_s=0.1)  # The model has 161 kB: 4.3 s.
    b = site.learner("b", seed=2, width=200, step_s=0.1)
    for child in (a, b, broker):
        child.ends(0)
    assert not site.not_final()
    check_final(site)
    made = site.merged()[-1]
    for name in "ab":
        adopted = site.events(name, "installed")[-1]
        assert adopted["version"] == made["version"]
        assert adopted["time_s"] - made["time_s"] > SILENT_S
