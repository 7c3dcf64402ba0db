"""The wide-area bench: layouts, cells, arithmetic, resuming, and what it says without root."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import cast

import pytest

from narrows.bench.kit.cells import Row, run_missing
from narrows.bench.kit.lab import Lab, Meter
from narrows.bench.kit.qdisc import QueueCounters
from narrows.bench.kit.rows import read_rows
from narrows.bench.wan import budget as wan_budget
from narrows.bench.wan import cells as wan_cells
from narrows.bench.wan import training as wan_training
from narrows.bench.wan.cells import MILLION, WanCell
from narrows.bench.wan.exchanger import transformer_layout
from narrows.proto.errors import ConfigError
from narrows.proto.fragments import build_table

CELL = WanCell("narrows", "int4-zstd", 100, 0, MILLION, streams=4)


@pytest.mark.parametrize("params", [1000, 1 << 16, 100_003, MILLION, 16 * MILLION, 64 * MILLION])
def test_layouts_have_exactly_so_many_elements(params: int) -> None:
    layout = transformer_layout(params)
    assert sum(math.prod(entry.shape) for entry in layout) == params
    assert all(min(entry.shape) > 0 for entry in layout)
    table = build_table(layout, wan_cells.FRAGMENTS)
    assert sum(fragment.elements for fragment in table) == params
    if params >= MILLION:
        sizes = [fragment.elements for fragment in table]
        assert max(sizes) <= 1.5 * min(sizes), "an exchange would end with its largest fragment"


def test_a_sample_that_came_late_hides_no_bytes() -> None:
    class Growing:
        bytes = 0

        def read(self) -> dict[str, int]:
            return {"eth0": self.bytes}

    counters = Growing()
    meter = Meter(cast(QueueCounters, counters), {"l0": cast(QueueCounters, counters)})
    for counters.bytes in (0, 1000, 3000, 7000):
        meter.sample()
    track = meter._own["l0"]
    times_s = [at for at, _ in track.samples]
    between_s = [(a + b) / 2 for a, b in pairwise(times_s)]
    rates = meter.rates("l0", "up", since_s=between_s[1], until_s=between_s[2])
    assert rates.wire_bytes == 6000, "all that can have been in this time"
    at_samples = meter.rates("l0", "up", since_s=times_s[1], until_s=times_s[2])
    assert at_samples.wire_bytes == 2000
    assert meter.rates("l0", "up").wire_bytes == 7000


def test_time_of_the_bytes_alone() -> None:
    bits = MILLION * 3.1 * 1514 / 1448
    assert CELL.line_s == pytest.approx(bits / 1e8 * 17 / 16)
    peer = replace(CELL, system="ddp_gloo", variant="f32", streams=0)
    assert peer.line_s == pytest.approx(MILLION * 32 * 1514 / 1448 / 1e8)
    assert replace(peer, learners=4).line_s == pytest.approx(1.5 * peer.line_s)
    assert replace(CELL, rate_mbit_per_s=0).line_s == 0


@pytest.mark.parametrize("cells", [wan_cells.small(), wan_cells.full()], ids=["small", "full"])
def test_no_cell_stands_twice(cells: list[WanCell]) -> None:
    assert len(set(cells)) == len(cells)
    assert {cell.system for cell in cells} == {"narrows", *wan_cells.PEERS}


def test_the_small_selection_takes_ten_minutes() -> None:
    exchanges_s = sum((c.exchanges + wan_cells.WARM_UP) * c.line_s for c in wan_cells.small())
    assert exchanges_s < 450


def test_budgets_are_told_to_the_broker() -> None:
    one, four = (wan_budget.BudgetCell(10, learners) for learners in (1, 4))
    assert one.settings == ["--set", "wan.up=10Mbit/s", "--set", "wan.down=10Mbit/s"]
    assert "wan.total_down=10Mbit/s" in four.settings
    up = replace(one, ways=("up",))
    assert up.settings == ["--set", "wan.up=10Mbit/s"]
    assert one.params * 32 > 10e6
    assert len(set(wan_budget.cells())) == len(wan_budget.cells())


@dataclass(frozen=True)
class Toy:
    """A cell for the test below."""

    number: int
    line = "a line"

    @property
    def name(self) -> str:
        return f"toy {self.number}"


def test_what_was_interrupted_goes_on_and_failures_are_run_again(tmp_path: Path) -> None:
    path, run, said = tmp_path / "rows.jsonl", list[int](), list[str]()

    def measure(cell: Toy) -> Row:
        run.append(cell.number)
        return {"failed": "no"} if cell.number == 2 and run.count(2) == 1 else {"value": 1}

    first = run_missing([Toy(1), Toy(2)], path, measure, said.append)
    assert ["failed" in row for row in first] == [False, True]
    path.write_text(path.read_text() + '{"kind": "Toy", "cell"')
    again = run_missing([Toy(3), Toy(2), Toy(1)], path, measure, said.append)
    assert run == [1, 2, 3, 2]
    assert [row["cell"]["number"] for row in again] == [3, 2, 1]
    assert all(row["value"] == 1 for row in again)
    assert "failed: no" in said[3] and said[2].endswith("toy 2 ...") and len(said) == 8


def test_what_was_interrupted_says_that_it_goes_on(tmp_path: Path) -> None:
    path, said = tmp_path / "rows.jsonl", list[str]()

    def measure(cell: Toy) -> Row:
        if cell.number == 2:
            raise KeyboardInterrupt
        return {"value": 1}

    with pytest.raises(KeyboardInterrupt):
        run_missing([Toy(1), Toy(2)], path, measure, said.append)
    assert said[-1] == f"{path} keeps what is done; the same command goes on"
    assert [row["cell"]["number"] for row in read_rows(path)] == [1]


def test_training_is_compared_with_itself_and_with_data_parallel() -> None:
    def row(name: str, rate: float, **told: float) -> Row:
        return {"name": name, "cell": {"rate_mbit_per_s": rate}, **told}

    rows = [
        row("narrows", 20.0, tokens_per_s=95.0),
        row("ddp f32", 20.0, tokens_per_s=10.0, communication_over_compute=8.0),
        row("narrows", 0.0, tokens_per_s=100.0),
    ]
    slow, parallel, fast = wan_training.compared(rows)
    assert slow["of_its_own_unlimited_rate"] == 0.95
    assert slow["times_data_parallel_over_1_plus_r"] == pytest.approx(9.5 / 9)
    assert "times_data_parallel" not in parallel and "times_data_parallel" not in fast


def test_without_root_the_lab_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match="sudo"), Lab(1, 1e6):
        pass


def test_rows_are_json(tmp_path: Path) -> None:
    rows = run_missing([CELL], tmp_path / "rows", lambda _: {"value": 1.5}, lambda _: None)
    assert json.loads(json.dumps(rows)) == rows


def test_the_table_of_budgets_names_what_was_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shares = {f"{way}_{kind}_over_cap": 1.0 for way in ("up", "down") for kind in ("mean", "peak")}
    told = shares | {"control_round_trip_s_p99": 0.1, "holds": True, "control_in_time": False}

    def run_cell(_: object) -> Row:
        return dict(told)

    monkeypatch.setattr(wan_budget, "run_cell", run_cell)
    monkeypatch.setattr(wan_budget, "check_able", lambda: None)
    wan_budget.run_budget_bench(tmp_path / "rows", tmp_path / "json", short=False)
    assert "not: control_in_time" in capsys.readouterr().out
