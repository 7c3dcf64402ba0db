"""`narrows demo` in miniature: what a newcomer sees first."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from dataclasses import replace

import psutil
import pytest
from acceptance.kit import Site, wait_until

PATIENCE_S = 60.0
"""The demo starts programs one by one, none of which has imported torch before."""


@pytest.mark.timeout(180)
def test_a_killed_learner_comes_back_and_all_copies_are_equal(site: Site) -> None:
    kept, results, picture = (site.folder / name for name in ("demo", "results.json", "demo.svg"))
    demo = site.shell(
        "demo", "narrows", "demo", "--learners", "2", "--steps", "120", "--plain",
        "--keep", str(kept), "--json", str(results), "--picture", str(picture),
    )  # fmt: skip
    run = replace(site, folder=kept)

    def find(name: str) -> psutil.Process | None:
        for each in demo.ps.children(recursive=True):
            with suppress(psutil.Error):  # It has just ended.
                if name == each.name():
                    return each
        return None

    wait_until(lambda: find("site-b"), "site-b to start", demo, timeout_s=PATIENCE_S)
    first, other = find("site-b"), find("site-a")
    assert first is not None and other is not None
    first.wait(PATIENCE_S)
    wait_until(lambda: find("site-b"), "site-b to start again", demo)
    # So short a run would be over before site-b is back: the other one stands still meanwhile.
    other.suspend()
    merged = run.contributions("site-b")
    wait_until(lambda: run.contributions("site-b") >= merged + 2, "it to be merged again", demo)
    other.resume()
    demo.ends(0, PATIENCE_S)
    (result,) = json.loads(results.read_text())["rows"]
    assert result["killed"] and result["rejoin_s"] is not None
    assert result["digests_compared"] > 0 == result["digests_differing"]
    run.check_copies("site-a", "site-b")
    # A model that has learned nothing takes every byte for equally likely.
    assert result["loss_global"] < math.log(256) - 2
    moved = result["up_bytes"] + result["down_bytes"]
    assert moved < result["data_parallel_bytes"] / 10
    assert max(map(len, demo.log.splitlines())) <= 100
    assert "was killed" in picture.read_text().replace("&#160;", " ")
    told = " ".join(demo.log.split())
    assert "went over the wire; data parallel would have needed" in told
    assert f"{round(result['data_parallel_bytes'] / moved)} times as much" in told
