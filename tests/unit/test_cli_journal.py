"""`narrows journal` and `narrows export`: what they read from a state directory."""

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest
from cli_cases import Narrows
from learner_cases import House, begun
from safetensors import safe_open

from narrows.broker.store import History, Store
from narrows.broker.store import history as history_module
from narrows.broker.store.history import Audit

LOSSES = {1: 4.0, 2: math.nan, 3: 2.5}
"""Version -> the loss that the learner tells with its push."""


@pytest.fixture
def house(tmp_path: Path) -> House:
    """A broker that has ended after versions 1, 2 and 3 of its only fragment."""
    house = House(tmp_path / "state", {"broker.keep_history": True})
    (a,) = begun(house, "site-a")
    for version in (1, 2, 3):
        a.push(loss=LOSSES[version])
        house.until(lambda: house.heads == (version,), "a version", a)  # noqa: B023
    house.host.pipeline.close()
    house.kill()
    return house


@pytest.fixture
def state(house: House) -> str:
    """The state directory of that broker."""
    return str(house.folder)


def rounds(narrows: Narrows, state: str) -> list[dict[str, Any]]:
    """The rows of `narrows journal show`, one for each round."""
    assert narrows.run("journal", "show", state, "--json") == 0
    return [json.loads(line) for line in narrows.out.splitlines()]


def test_the_next_life_goes_on_at_the_versions_and_the_pace_of_the_journal(house: House) -> None:
    house.start()
    assert house.host.syncer.state.rounds[0].merged == {"site-a.00000001": 3}
    assert house.host.syncer.state.xi_s > 0
    (resumed,) = house.noted("resumed")
    tokens = house.host.syncer.state.clock.run_tokens
    assert f"at versions 3 to 3, {tokens:,} tok" in resumed.text
    house.kill()


def test_journal_show_prints_every_round_or_the_last(narrows: Narrows, state: str) -> None:
    rows = rounds(narrows, state)
    assert [(row["fragment"], row["version"]) for row in rows] == [(0, 1), (0, 2), (0, 3)]
    assert all(row["contributors"] == ["site-a"] for row in rows)
    assert narrows.run("journal", "show", state, "--last", "1") == 0
    assert "fragment 0 version 3 " in narrows.out and rows[2]["published"] in narrows.out


def test_the_journal_has_the_curve_of_every_learner(
    narrows: Narrows, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = rounds(narrows, state)
    assert [row["losses"]["site-a"] for row in shown] == [4.0, None, 2.5]
    file = tmp_path / "curve.csv"
    assert narrows.run("journal", "curve", state, "--csv", str(file)) == 0
    with file.open(newline="") as lines:
        points = list(csv.DictReader(lines))
    assert [each["loss"] for each in points] == ["4.0", "", "2.5"], "NaN is no number of a curve"
    assert [each["run_tokens"] for each in points] == ["100", "200", "300"]
    first = points[0]
    assert (first["learner"], first["steps"], first["tokens"]) == ("site-a", "1", "100")
    assert narrows.run("journal", "curve", state) == 0
    assert narrows.out.split() == file.read_text().split()
    monkeypatch.setattr(history_module, "CURVE_ROUNDS", 2)
    assert narrows.run("journal", "curve", state) == 0
    assert narrows.out.split() == file.read_text().split(), "also where it is read in parts"
    assert narrows.run("journal", "curve", state, "--csv", str(tmp_path)) == 2


def test_a_replay_makes_the_model_that_export_writes(
    narrows: Narrows, state: str, tmp_path: Path
) -> None:
    newest = rounds(narrows, state)[-1]
    assert narrows.run("journal", "audit", state) == 0
    replayed = tmp_path / "replayed.safetensors"
    assert narrows.run("journal", "replay", state, "--out", str(replayed)) == 0
    assert newest["published"] in narrows.out
    exported = tmp_path / "exported.safetensors"
    assert narrows.run("export", state, "--to", str(exported)) == 0
    assert exported.read_bytes() == replayed.read_bytes()
    with safe_open(exported, "np") as file:
        told = file.metadata()
    assert told["narrows.run"] and told["narrows.versions"] == "[3]"


def test_no_file_of_a_run_is_written_over(narrows: Narrows, state: str) -> None:
    assert narrows.run("journal", "replay", state, "--out", f"{state}/packs/x") == 2
    assert narrows.run("export", state, "--to", f"{state}/run.db") == 2


def test_export_tells_the_layout(narrows: Narrows, state: str) -> None:
    assert narrows.run("export", state, "--layout") == 0
    assert [entry[0] for entry in json.loads(narrows.out)["entries"]] == ["w", "b"]


def test_rollback_makes_a_directory_that_ends_at_a_round(
    narrows: Narrows, state: str, tmp_path: Path
) -> None:
    second = rounds(narrows, state)[1]
    back = str(tmp_path / "back")
    assert narrows.run("journal", "rollback", state, back, "--to", str(second["round"])) == 0
    assert [row["version"] for row in rounds(narrows, back)] == [1, 2]


def test_an_audit_prints_all_that_it_found(
    narrows: Narrows, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Store(tmp_path, durable=False).close()
    found = Audit(10, 7, ("pack 1 is damaged", "clock 5,\n but 6\x1b[2J"))
    monkeypatch.setattr(History, "audit", lambda _: found)
    assert narrows.run("journal", "audit", str(tmp_path)) == 1
    *_, one, other, bound = narrows.out.splitlines()
    assert (one, other) == ("pack 1 is damaged", "clock 5,\\n but 6\\x1b[2J")
    assert "after the first damage" in bound and "2 problems" in narrows.err
