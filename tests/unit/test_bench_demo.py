"""Decisions and pictures of `narrows demo`. A real demo is run by tests/acceptance."""

import io
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from narrows.bench.demo import SPARKS, SPARKS_MAX, STEP_TOKENS, Story, View, demo, report, sparkline
from narrows.bench.reference.gpt import PRESETS
from narrows.proto.errors import ConfigError

MEASURED = Path(__file__).parents[2] / "docs" / "results" / "demo.json"


def status(
    run_tokens: int, incarnation: str = "b.1", merged: int = 0, phase: str = "running"
) -> dict[str, Any]:
    victim = {"incarnation": incarnation, "merged_tokens": merged}
    return {"phase": phase, "run_tokens": run_tokens, "learners": {"b": victim}}


@pytest.fixture
def story() -> Story:
    """A run of 100 tokens that has just begun; its start took 10 seconds."""
    story = Story("b", 100, started_at=0.0)
    assert story.hear(status(0, phase="seeding"), 5.0) is None
    assert story.hear(status(0), 10.0) is None
    return story


@pytest.mark.parametrize(
    "course",
    [
        [
            (status(39), 40.0, None, ""),
            (status(40), 50.0, "kill", "b was killed .*"),
            (status(50), 60.0, None, "b was killed .*"),
            (status(60), 70.0, "return", "b is starting again"),
            # Pushes of its first life do not count.
            (status(70, merged=9), 75.0, None, "b is starting again"),
            (status(80, "b.2"), 80.0, None, "b is back, warming up"),
            (status(90, "b.2", merged=1), 82.0, None, "b contributes again after 12.0 s"),
            (status(95, "b.2", merged=2), 90.0, None, "b contributes again after 12.0 s"),
        ],
        [
            (status(45), 20.0, "kill", "b was killed .*"),
            # It is dead for a second, so that it is seen.
            (status(45), 20.9, None, "b was killed .*"),
            # The rest takes 13 s at this pace, and the start of all took 10.
            (status(45), 21.0, "return", "b is starting again"),
        ],
        [
            (status(100, phase="ended"), 11.0, None, ""),
            (status(100, phase="ending"), 11.0, "kill", "b was killed .*"),
        ],
    ],
    ids=["once each", "it returns soon where the rest of the run is short", "until the run ends"],
)
def test_the_victim_dies_returns_and_contributes(
    story: Story, course: list[tuple[dict[str, Any], float, str | None, str]]
) -> None:
    """Holds `Story.hear`."""
    for said, now, command, told in course:
        assert story.hear(said, now) == command
        assert re.fullmatch(told, story.tell())


def test_a_sparkline_shows_the_course() -> None:
    assert sparkline([]) == ""
    assert sparkline([3.0, 2.0]) == SPARKS[-1] + SPARKS[0]
    course = sparkline([10.0 / (1 + index) for index in range(333)])
    assert len(course) == SPARKS_MAX and list(course) == sorted(course, reverse=True)


def test_a_line_is_shown_of_a_learner_that_has_told_no_loss_yet(story: Story) -> None:
    """Holds `View.update`."""
    console = Console(file=io.StringIO(), width=60, record=True)
    view = View(console, story, is_live=False)
    joins = {"steps": 0, "contributions": 0, "state": "joining", "loss": None}
    said = status(0) | {"merges": 0, "line": {"up_bytes": 0, "down_bytes": 0}, "waiting_for": []}
    said["learners"]["b"] |= joins
    view.update(said)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(view, "_told_at", -math.inf)
        view.update(said)
    assert console.export_text().count("0 merges") == 2


@pytest.mark.parametrize("is_live", [True, False])
def test_sixty_columns_tell_the_story(story: Story, is_live: bool) -> None:
    """Holds `View.update`."""
    console = Console(file=io.StringIO(), width=60, record=True, force_terminal=is_live)
    view = View(console, story, is_live=is_live)
    with view.shown:
        line = {"up_bytes": 114.9e6, "down_bytes": 2.345e9}
        for tokens, now in ((20, 20.0), (40, 50.0), (60, 70.0)):
            said = status(tokens) | {"merges": 391, "line": line}
            learner = {"steps": 1234, "contributions": 123, "state": "training", "loss": 2.0}
            said["learners"]["b"] |= learner
            story.hear(said, now)
            view.update(said | {"waiting_for": []})
    console.print(view.moment)
    told = console.export_text()
    assert "up 114.9 MB, down 2.35 GB" in told and "b was killed (SIGKILL)" in told
    assert max(map(len, told.splitlines())) <= 60


@pytest.mark.parametrize("kept, step", [(None, "narrows demo --keep"), (Path("x"), "journal show")])
def test_the_results_fit_into_60_columns(kept: Path | None, step: str) -> None:
    """Holds `report`."""
    console = Console(file=io.StringIO(), width=60, record=True)
    row = json.loads(MEASURED.read_text())["rows"][0]
    console.print(report(row, kept))
    told = console.export_text()
    assert f"merged again {row['rejoin_s']:.1f} s after its start" in told, "no cell is broken"
    times = row["data_parallel_bytes"] / (row["up_bytes"] + row["down_bytes"])
    assert f"{times:.0f} times" in told and step in told and "examples/train.py" in told


def test_what_cannot_be_shown_is_told(tmp_path: Path) -> None:
    """Holds `demo`."""
    with pytest.raises(ConfigError, match="expected 2 to 26 learners, 1 step or more, got 1 and"):
        demo(learners=1)
    with pytest.raises(ConfigError, match=r"exists.*new folder"):
        demo(keep=tmp_path)
    preset = PRESETS["tiny"]
    assert STEP_TOKENS == preset.batch * preset.context
