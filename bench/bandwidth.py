"""`narrows bench bandwidth`: bits per parameter on the wire, Gbit/s per site, and the budget.

Bits are counted in real runs: by the broker in the frames of ZeroMQ, and where namespaces can be
made (as root) by the kernel on a line between two of them, with the headers of all layers. First
copies are not counted: a long run does not notice them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

from cyclopts import Parameter

from narrows.bench.kit import line as lines
from narrows.bench.kit.rows import Column, Row, bench
from narrows.bench.kit.run import EventLog, Run, Toy
from narrows.bench.reference.worker import need_torch
from narrows.proto.flow.budget import SEGMENT_BYTES, SEGMENT_OVERHEAD_BYTES
from narrows.proto.units import BitRate

LEARNERS: Final = 2
FRAGMENTS: Final = 4
TRAINED_STEPS: Final = 150
TRAINED_TOKENS: Final = 4 * 64
"""Tokens of a step of the trained model: batch and context of its preset."""
TOY_PARAMS: Final = 1 << 20
TOY_S: Final = 12.0

MODEL_PARAMS: Final = 5e9
SITES: Final = 8
STEP_S: Final = 1.0
SYNC_PERIOD_STEPS: Final = 24

PUBLISHED_SOURCE: Final = "arXiv 2604.21428, 8 data centres"
PUBLISHED_DATA_PARALLEL_GBPS: Final = 198.0
PUBLISHED_DECOUPLED_GBPS: Final = 0.84
"""The source names neither the model's size nor its step: with MODEL_PARAMS and the numbers above
both figures come out, within 2%."""
UTILIZATION: Final = 0.95
"""Share of the time in which data parallelism computes, in the published figure."""

COLUMNS: Final = (
    Column("model", "model"),
    Column("rho", "rho", "{:g}"),
    Column("budget", "budget"),
    Column("exchanges", "exchanges", "{:.0f}"),
    Column("payload bits up", "payload_up_bits_per_param", "{:.2f}"),
    Column("down", "payload_down_bits_per_param", "{:.2f}"),
    Column("wire bits up", "wire_up_bits_per_param", "{:.2f}"),
    Column("down", "wire_down_bits_per_param", "{:.2f}"),
    Column("line bits up", "line_up_bits_per_param", "{:.2f}"),
    Column("down", "line_down_bits_per_param", "{:.2f}"),
    Column("fullest second up", "peak_up_share", "{:.3f}"),
    Column("down", "peak_down_share", "{:.3f}"),
)


@dataclass(frozen=True)
class Cell:
    """One run of two learners."""

    model: str
    """gpt: the reference model trains. toy: pushes of noise fill the budget."""
    rho: float = 0.5
    budget: str = "0"
    """Rate of all learners together, in each direction; "0": no limit."""


CELLS: Final = (
    Cell("gpt", 0.5),
    Cell("gpt", 1.0),
    Cell("toy", 0.5, "10Mbit/s"),
    Cell("toy", 0.5, "100Mbit/s"),
)
SHORT: Final = (Cell("gpt"), Cell("toy", 0.5, "20Mbit/s"))


def bandwidth(
    *, short: bool = False, json_: Annotated[Path | None, Parameter(name="--json")] = None
) -> None:
    """Measure bits per parameter on the wire, Gbit/s per site, and whether the budget holds.

    Parameters
    ----------
    short
        Two runs instead of four.
    json_
        File for the rows.
    """
    need_torch()
    bench("bandwidth", SHORT if short else CELLS, measure, COLUMNS, headline, json=json_)


def measure(cell: Cell, *, steps: int = TRAINED_STEPS, seconds: float = TOY_S) -> Row:
    """One run. `line_...` and `peak_...` are None without namespaces, peaks also without a budget.

    `steps` are those of each trained learner, `seconds` the time of a toy run.
    """
    settings: dict[str, object] = {
        "run.learners_at_start": LEARNERS,
        "fragments.count": FRAGMENTS,
        "codec.rho": cell.rho,
    }
    rate = float(BitRate.parse(cell.budget))
    if rate:
        settings |= {"wan.total_up": cell.budget, "wan.total_down": cell.budget}
    if cell.model == "gpt":
        settings["run.goal_tokens"] = steps * TRAINED_TOKENS * LEARNERS
    else:  # A period far shorter than a round takes, so that something always waits to be sent.
        settings |= {"fragments.sync_period_steps": 4, "fragments.overlap_steps": 1}
    with ExitStack() as stack:
        line = stack.enter_context(lines.Line()) if lines.available() else None
        run = stack.enter_context(Run(line=line))
        run.broker(settings)
        for name in (names := [f"learner-{index}" for index in range(LEARNERS)]):
            _start(run, cell.model, name)
        run.wait_until(lambda: _joined(run, names), "all to join", *names)
        before = run.ask("status", run.address, "--json")
        first = line.read() if line is not None else None
        if cell.model == "gpt":
            for name in ("broker", *names):
                run.ends(name, 0)
            after = run.final()
        else:
            run.wait(seconds)
            after = run.stop_broker()
        last = line.read() if line is not None else None
        merges = run.merges()[before["merges"] :]
        peaks = lines.peak_bits_per_s(line.samples) if line is not None and rate else None
    row = bits(merges, before, after)
    row |= _line_bits(merges, first, last)
    up, down = peaks or (None, None)
    row["peak_up_share"] = None if up is None else up / rate
    row["peak_down_share"] = None if down is None else down / rate
    return row


def bits(merges: Sequence[dict[str, Any]], before: dict[str, Any], after: dict[str, Any]) -> Row:
    """Bits per parameter and exchange between two statuses, from the merges between them.

    Up, a learner sends a fragment; down, each receives its next version.
    """
    sent, received = _elements(merges)
    up, down = (after[key] - before[key] for key in ("up_bytes", "down_bytes"))
    published = sum(each["published_bytes"] for each in merges)
    return {
        "exchanges": len(merges),
        "payload_up_bits_per_param": 8 * sum(each["pushed_bytes"] for each in merges) / sent,
        "payload_down_bits_per_param": 8 * LEARNERS * published / received,
        "wire_up_bits_per_param": 8 * up / sent,
        "wire_down_bits_per_param": 8 * down / received,
    }


def _line_bits(
    merges: Sequence[dict[str, Any]], first: lines.Sample | None, last: lines.Sample | None
) -> Row:
    if first is None or last is None:
        return {"line_up_bits_per_param": None, "line_down_bits_per_param": None}
    sent, received = _elements(merges)
    return {
        "line_up_bits_per_param": 8 * (last.up - first.up) / sent,
        "line_down_bits_per_param": 8 * (last.down - first.down) / received,
    }


def _elements(merges: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """Elements that all learners have sent, and received, in these merges."""
    sent = sum(each["elements"] * len(each["contributors"]) for each in merges)
    return sent, LEARNERS * sum(each["elements"] for each in merges)


def headline(rows: Sequence[Row]) -> list[str]:
    """Gbit/s of one site for a large model beside published figures, and the budget."""
    told = [
        f"Gbit/s of one of {SITES} sites, {MODEL_PARAMS / 1e9:g} B parameters, {STEP_S:g} s a step,"
        f" each parameter exchanged every {SYNC_PERIOD_STEPS} steps:"
    ]
    for row in rows:
        if row["model"] == "gpt":
            up, down = (site_gbps(row[f"payload_{way}_bits_per_param"]) for way in ("up", "down"))
            told.append(f"  Narrows, rho {row['rho']:g}: {up:.2f} up, {down:.2f} down")
    told += [
        f"  Decoupled DiLoCo: {PUBLISHED_DECOUPLED_GBPS} published ({PUBLISHED_SOURCE})",
        f"  data parallel: {PUBLISHED_DATA_PARALLEL_GBPS:g} published, "
        f"{data_parallel_gbps():.0f} by arithmetic (bf16 ring, {UTILIZATION:.0%} computing)",
    ]
    peaks = [
        row[key] for row in rows for key in ("peak_up_share", "peak_down_share") if row.get(key)
    ]
    if peaks:
        told.append(f"budget: the fullest second of all had {max(peaks):.3f} of the rate")
    return told


def site_gbps(payload_bits: float) -> float:
    """Gbit/s of a site and direction, with the headers of full TCP segments; those of ZeroMQ are
    below a thousandth of a large chunk."""
    on_line = payload_bits * (1 + SEGMENT_OVERHEAD_BYTES / SEGMENT_BYTES)
    return MODEL_PARAMS * on_line / (SYNC_PERIOD_STEPS * STEP_S) / 1e9


def data_parallel_gbps() -> float:
    """The same for a ring all-reduce of bfloat16 gradients in every step.

    Gradients leave while the backward pass runs, the last two thirds of a step; what does not fit
    in there stalls. Source: the bandwidth tool of the first author of Decoupled DiLoCo.
    """
    sent_gbit = MODEL_PARAMS * 16 * 2 * (1 - 1 / SITES) / 1e9
    stall_s = STEP_S * (1 / UTILIZATION - 1)
    return sent_gbit / (stall_s + 2 / 3 * STEP_S)


def _start(run: Run, model: str, name: str) -> None:
    if model == "toy":
        run.toy(Toy(name, TOY_PARAMS, seed=int(name[-1])))
        return
    run.command(
        name, "learner", "--broker", run.address, "--name", name, "--preset", "tiny",
        "--events", str(run.folder / f"{name}.jsonl"),
    )  # fmt: skip


def _joined(run: Run, names: Sequence[str]) -> bool:
    """All of them hold every fragment, so that no first copy is on its way any more."""
    logs = (EventLog(run.folder / f"{name}.jsonl").read() for name in names)
    held = ({each["fragment"] for each in log if each["event"] == "installed"} for log in logs)
    return all(len(fragments) == FRAGMENTS for fragments in held)
