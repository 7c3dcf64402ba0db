"""Every table that a command prints, on narrow terminals and in files: each cell can be read."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from narrows.bench.bandwidth import bench as bandwidth
from narrows.bench.bandwidth import wire as bandwidth_wire
from narrows.bench.chaos import results as chaos_results
from narrows.bench.codec import bench as codec
from narrows.bench.demo import results as demo_results
from narrows.bench.demo.story import DemoOptions, DemoStory
from narrows.bench.demo.view import View
from narrows.bench.goodput import bench as goodput
from narrows.bench.journal import bench as journal
from narrows.bench.loop import bench as loop
from narrows.bench.merge import bench as merge
from narrows.bench.peers import bench as peers
from narrows.bench.quality import report as quality_report
from narrows.bench.wan import bench as wan
from narrows.bench.wan import budget as wan_budget
from narrows.bench.wan import training as wan_training
from narrows.broker.cli import plan as plan_command
from narrows.broker.cli import status as status_command
from narrows.broker.cli.status import learner_table, show_status
from narrows.broker.cli.tables import Facts, Table, show, terminal, wrapped
from narrows.broker.config import BrokerConfig
from narrows.broker.planning.capacity import loads_of, make_plan
from narrows.broker.planning.demand import Site
from narrows.proto.messages import LearnerStatus, Mode, Phase, Status, TokenLedger

ROOT = Path(__file__).resolve().parents[2]
NARROW = 80
REASON = (
    "failed: hivemind could not average: the average is off by 0.012, at most 0.01 is fine; its log"
    " is in runs/wan.logs/3-hivemind-uniform8bit-100-Mbit-s-of-a-long-name/l0.log"
)


def results(name: str) -> list[dict[str, Any]]:
    """The rows of a bench as they were measured."""
    told = json.loads((ROOT / "docs" / "results" / f"{name}.json").read_text())
    return list(told.get("rows", [told]))


def printed(console: Console, tables: Iterable[Table | Facts]) -> str:
    for table in tables:
        show(console, table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def on_terminal(width: int) -> Console:
    return Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)


def words_of(table: Table | Facts) -> Counter[str]:
    """Every word of every cell, as often as it stands there; keys count once."""
    words: Counter[str] = Counter()
    for row in table.rows:
        for text in (*row.cells, row.note):
            words.update(text.split())
    for heading in table.headings if isinstance(table, Table) else ():
        words.update(heading.split())
    return words


def lost(table: Table | Facts, text: str) -> Counter[str]:
    """Words that the table holds and the text lacks; in a block a colon follows a heading."""
    found = Counter(text.split())
    found.update(word[:-1] for word in text.split() if word.endswith(":"))
    return words_of(table) - found


def wan_tables() -> list[Table]:
    rows = results("wan")
    failed = {"name": "hivemind uniform8bit", "line": rows[0]["line"], "failed": REASON[8:]}
    rows.append(failed)
    return [wan.table(t, [r for r in rows if r["line"] == t]) for t in {r["line"] for r in rows}]


def budget_tables() -> list[Table]:
    failed = {"name": "up, 4 learners", "line": "100 Mbit/s on a line of 1.0 Gbit/s"}
    return [wan_budget.table([*results("wan-budget"), failed | {"failed": REASON}])]


def training_tables() -> list[Table]:
    failed = {"name": "ddp bf16", "line": "tiny, 2 learners, 60 s, 20 Mbit/s", "skipped": REASON}
    return [wan_training.table([*results("wan-training"), failed])]


def peer_tables() -> list[Table]:
    labels = {"system": "hivemind", "version": "1.1.12", "event": "coordinator_killed"}
    return [peers.table_of([*results("peers"), labels | {"skipped": REASON}])]


def codec_tables() -> list[Table]:
    told = json.loads((ROOT / "docs" / "results" / "codec.json").read_text())
    rows = [codec.CodecRow(**row) for row in told["rows"]]
    return [codec.table(iter(rows)), codec.lone_table(told["lone_elements"])]


def goodput_tables() -> list[Table]:
    rows = results("goodput")
    found = [goodput.percent_table("t", [r for r in rows if not r["sweep"]], "goodput_percent", "")]
    for sweep in {row["sweep"] for row in rows if row["sweep"]}:
        found.append(goodput.sweep_table(sweep, [row for row in rows if row["sweep"] == sweep]))
    return found


def quality_tables() -> list[Table]:
    rows = results("quality")
    return [
        quality_report.table(group, [row for row in rows if row["group"] == group])
        for group in {row["group"] for row in rows}
    ]


def bandwidth_tables() -> list[Table]:
    told = json.loads((ROOT / "docs" / "results" / "bandwidth.json").read_text())
    names = bandwidth_wire.WireRow.__dataclass_fields__
    wire = [
        bandwidth_wire.WireRow(**{k: v for k, v in row.items() if k in names})
        for row in told["wire"]
    ]
    headline = [bandwidth.BandwidthHeadline(**row) for row in told["headline"]]
    return [
        bandwidth.utilization_table(bandwidth.table_rows()),
        bandwidth.wire_table(wire),
        bandwidth.headline_table(headline),
    ]


def loop_facts() -> list[Facts]:
    names = loop.LoopResult.__dataclass_fields__
    (told,) = results("loop")
    return [loop.facts(loop.LoopResult(**{k: v for k, v in told.items() if k in names}))]


def plan_tables() -> list[Table | Facts]:
    site = Site(
        params=12 * 10**9, step_s=2.0, learners=4, line_bits_per_s=2e9, broker_line_bits_per_s=2e9,
        broker_memory_bytes=256 << 30, broker_cores=4, disk_bytes_per_s=500 * 10**6,
        fragments=0, sync_period_steps=0,
    )  # fmt: skip
    plan = make_plan(site, BrokerConfig())
    return [plan_command.facts(plan), plan_command.load_table(loads_of(plan))]


def learner(name: str) -> LearnerStatus:
    return LearnerStatus(
        name=name, incarnation="0" * 32, state="live", address="203.0.113.77", last_heard_s=0.4,
        step=123456, step_s=12.3456, tokens=10**9, loss=1.2345, contributions=12345, refused=17,
        missed_running=0, ledger=TokenLedger(merged=90, overwritten=10), up_bytes=123 * 10**9,
        down_bytes=456 * 10**9,
    )  # fmt: skip


def status_of_a_run(learners: tuple[LearnerStatus, ...]) -> Status:
    return Status(
        run_id="0" * 16, epoch=(1, 1, 7), mode=Mode.DECOUPLED, phase=Phase.RUNNING, uptime_s=10.0,
        goal_tokens=0, run_tokens=10**9, tokens_per_s=1e4,
        versions=(1, 2, 3, 4), rounds=(), merges=10, contributions_merged=35, norms_clipped=0,
        mean_contributors_per_merge=3.5, longest_merge_gap_s=1.0, up_bytes=10**9,
        down_bytes=10**9, contributions_refused={}, checkpoint_version=0, learners=learners,
        waiting_for="",
    )  # fmt: skip


def status_tables() -> list[Table]:
    return [learner_table((learner("site-a"), learner("x" * 64)))]


PRINTERS: dict[str, Callable[[], Iterable[Table | Facts]]] = {
    "bench wan": wan_tables,
    "bench wan --budget": budget_tables,
    "bench wan --training": training_tables,
    "bench peers": peer_tables,
    "bench codec": codec_tables,
    "bench merge": lambda: [merge.table([merge.MergeRow(**row) for row in results("merge")])],
    "bench journal": lambda: [
        journal.table([journal.JournalRow(**row) for row in results("journal")])
    ],
    "bench goodput": goodput_tables,
    "bench quality": quality_tables,
    "bench bandwidth": bandwidth_tables,
    "bench loop": loop_facts,
    "bench chaos": lambda: [chaos_results.facts(row) for row in results("chaos")],
    "demo": lambda: [demo_results.facts(results("demo")[0])],
    "plan": plan_tables,
    "status": status_tables,
}


@pytest.mark.parametrize("name", PRINTERS)
def test_no_cell_is_lost_on_a_narrow_terminal(name: str) -> None:
    for table in PRINTERS[name]():
        text = printed(on_terminal(NARROW), [table])
        assert not lost(table, text), text
        for line in text.splitlines():
            # A word that is longer than the terminal, such as a path, is left to the terminal.
            assert len(line) <= NARROW or max(map(len, line.split())) > NARROW // 2, line


@pytest.mark.parametrize("name", PRINTERS)
def test_a_file_gets_one_line_per_row(name: str) -> None:
    for table in PRINTERS[name]():
        text = printed(Console(file=io.StringIO()), [table])
        assert not lost(table, text), text
        assert "\x1b" not in text
        for row in table.rows:
            assert any(
                all(part.split("\n")[0] in line for part in row.cells) for line in text.split("\n")
            ), row
            assert row.note in text


CELL = st.text("ab1.%-", min_size=1, max_size=30)


@given(
    rows=st.lists(st.lists(CELL, min_size=5, max_size=5), min_size=1, max_size=4),
    width=st.integers(1, 100),
    keys=st.integers(1, 3),
    note=st.text("xyz ", max_size=200),
)
def test_whatever_stands_in_a_table_can_be_read_at_any_width(
    rows: list[list[str]], width: int, keys: int, note: str
) -> None:
    table = Table(("h1", "h2", "h3", "h4", "h5"), keys=keys, title="of the table")
    # Every cell is marked, so that what is found is that cell and no other.
    marked = [[f"{r}_{c}_{cell}" for c, cell in enumerate(row)] for r, row in enumerate(rows)]
    for row in marked:
        table.add(*row, note=note)
    lines = [line.text for line in table.lines(width)]
    words = [word for line in lines for word in line.split()]
    for row in marked:
        for column, cell in enumerate(row):
            assert words.count(cell) >= 1 if column < keys else words.count(cell) == 1
            # Its row is named above it or before it, in this order.
            place = words.index(cell)
            assert all(key in words[: place + 1] for key in row[: min(keys, column)])
    assert Counter(note.split() * len(rows)) <= Counter(words)
    assert all(len(line) <= width or len(line.split()) == 1 for line in lines if ":" not in line)


@given(
    text=st.text("ab /", max_size=200), width=st.integers(1, 60), more=st.sampled_from(["", "  "])
)
def test_wrapping_breaks_at_blanks_alone(text: str, width: int, more: str) -> None:
    lines = wrapped(text, width, indent=" ", more=more)
    assert " ".join(lines).split() == text.split()
    assert all(len(line) <= max(width, 4) or len(line.split()) == 1 for line in lines)


def test_brackets_of_a_failure_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    failed = "[rank0]: cannot open [/tmp/x] :warning:"
    console = terminal()
    console.print(failed)
    table = Table(("name", failed))
    table.add("x", failed, note=failed)
    show(console, table)
    assert capsys.readouterr().out.count(failed) == 4


def test_no_text_of_a_broker_reaches_the_terminal_raw(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker may be anybody's: a monitor asks the address that it was given."""
    escapes = "\x1b[2J\x1b]0;x\x07"
    evil = msgspec.structs.replace(learner(escapes), address=escapes, state=escapes)
    status = msgspec.structs.replace(
        status_of_a_run((evil,)), waiting_for=escapes, run_id=escapes,
        contributions_refused={escapes: 1},
    )  # fmt: skip

    def ask_status(broker: str, *, timeout_s: float, key: object) -> Status:
        return status

    monkeypatch.setattr(status_command, "ask_status", ask_status)
    for as_json, escaped in ((False, "\\x1b[2J"), (True, "\\u001b[2J")):
        show_status("tcp://broker:7070", key_file=None, as_json=as_json, timeout_s=1.0)
        shown = capsys.readouterr().out
        assert all(c.isprintable() or c == "\n" for c in shown)
        assert shown.count(escaped) == 6


def test_the_live_display_fits_a_narrow_terminal() -> None:
    options = DemoOptions(learners=4, steps=10)
    console = on_terminal(NARROW)
    view = View(console, options, DemoStory(victim="site-b", killed_at=1.0), live=True)
    learners = tuple(learner(name) for name in options.names)
    status = msgspec.structs.replace(
        status_of_a_run(learners),
        goal_tokens=options.goal_tokens, run_tokens=options.goal_tokens // 2,
    )  # fmt: skip
    view.update(status, {"step": 17, "train_loss": 2.5})
    assert view.moment is not None
    console.print(view.moment)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "…" not in text and all(len(line.rstrip()) <= NARROW for line in text.splitlines())
    for each in learners:
        assert text.count(each.name) >= 1
    assert text.count("12345") >= 2 * len(learners) and "123 GB" in text and "456 GB" in text
