"""The end of a run waits for slow lines, and not for a learner that hangs."""

from __future__ import annotations

import signal
from typing import Final

from acceptance.kit import CODECS, Site, equal, is_final, wait_until

LIVENESS: Final = {"late": "500ms", "lost": "1500ms"}
"""A learner of which nothing comes is waited for as long as `lost`."""


def check_final(site: Site) -> None:
    """a and b have left with the newest durable version of each fragment, bit for bit."""
    durable = site.journal()
    newest = {fragment: max(v for f, v in durable if f == fragment) for fragment, _ in durable}
    for name in "ab":
        adopted = site.adopted(name)
        assert all(adopted[last] == durable[last] for last in newest.items())
        assert is_final(site.folder / f"{name}.safetensors")
    assert equal(site.final("a"), site.final("b"))
    site.check_equal_copies("a", "b")
    site.check_replay()


def test_a_hung_learner_is_left_behind_and_named(site: Site) -> None:
    broker = site.broker(goal_tokens=20_000, learners_at_start=3, sync_period=20, **LIVENESS)
    hung = site.learner("hung", seed=3, hang_at=0.7)
    for child in (site.learner("a", seed=1), site.learner("b", seed=2), broker):
        child.ends(0)
    assert hung.exit_code is None and site.not_final() == {"hung"}
    hung.kill()
    check_final(site)
    # What was trained until the goal is in it: rounds follow that began after it. A fragment of
    # which a round was under way at the goal may have nothing to merge any more.
    assert [one for one in site.merged() if one["run_tokens"] >= 20_000]


def test_learners_on_slow_lines_get_the_final_model(site: Site) -> None:
    """The model is on its way to them for more than twice `lost`: the broker may wait so long for
    the last contributions, and then again until the model is adopted."""
    config = site.folder / "broker.toml"
    config.touch()
    broker = site.broker(
        "--config", str(config), goal_tokens=500, learners_at_start=2, fragments=1,
        publish_codec=CODECS["lossless"], **LIVENESS,
    )  # fmt: skip
    a = site.learner("a", seed=1, width=200, step_s=0.1)
    b = site.learner("b", seed=2, width=200, step_s=0.1)
    wait_until(
        lambda: all((site.folder / f"{name}.joined").exists() for name in "ab"),
        "both to join", broker, a, b,
    )  # fmt: skip
    config.write_text('[wan]\ndown = "400kbit/s"\n')  # The model has 161 kB.
    broker.send(signal.SIGHUP)
    for child in (a, b, broker):
        child.ends(0)
    assert not site.not_final()
    check_final(site)
