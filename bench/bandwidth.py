"""`narrows bench bandwidth`: bits per parameter on the wire, and Gbit/s per site.

The reference model is trained. The broker counts bits in the frames of ZeroMQ. Where namespaces
can be made (as root), the kernel counts them as well, on a line between two namespaces, with the
headers of all layers. First copies are not counted: a long run does not notice them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Final

from narrows.bench.kit.line import Line, available
from narrows.bench.kit.rows import Column, Json, Row, Short, bench
from narrows.bench.kit.run import Deployment, payload_bits
from narrows.proto.flow.budget import SEGMENT_BYTES, SEGMENT_OVERHEAD_BYTES

LEARNERS: Final = ("learner-0", "learner-1")
FRAGMENTS: Final = 4
STEPS: Final = 150
"""Steps of each learner."""
STEP_TOKENS: Final = 4 * 64
"""Tokens of a step: batch and context of the preset."""

MODEL_PARAMS: Final = 5e9
SITES: Final = 8
STEP_S: Final = 1.0
SYNC_PERIOD_STEPS: Final = 24

PUBLISHED_SOURCE: Final = "arXiv 2604.21428, 8 data centres"
PUBLISHED_DATA_PARALLEL_GBPS: Final = 198.0
PUBLISHED_DECOUPLED_GBPS: Final = 0.84
"""The source names neither the model's size nor its step. MODEL_PARAMS and the numbers beside it
give both published figures within 2%."""
UTILIZATION: Final = 0.95
"""Share of the time in which data parallelism computes, in the published figure."""

COLUMNS: Final = (
    Column("rho", "rho", "{:g}"),
    Column("exchanges", "exchanges", "{:.0f}"),
    Column("payload bits up", "payload_up_bits_per_param", "{:.2f}"),
    Column("down", "payload_down_bits_per_param", "{:.2f}"),
    Column("wire bits up", "wire_up_bits_per_param", "{:.2f}"),
    Column("down", "wire_down_bits_per_param", "{:.2f}"),
    Column("line bits up", "line_up_bits_per_param", "{:.2f}"),
    Column("down", "line_down_bits_per_param", "{:.2f}"),
)


@dataclass(frozen=True)
class BandwidthCell:
    """One run of two learners."""

    rho: float
    """Step of the codes, in units of the rms."""


CELLS: Final = (BandwidthCell(0.5), BandwidthCell(1.0))


def bandwidth(*, short: Short = False, json: Json = None) -> None:
    """Measure bits per parameter on the wire, and Gbit/s per site."""
    cells = CELLS[:1] if short else CELLS
    bench("bandwidth", cells, measure, COLUMNS, headline, json=json)


def measure(cell: BandwidthCell, *, steps: int = STEPS) -> Row:
    """One run; `line_...` are None without namespaces."""
    settings = {
        "run.learners_at_start": len(LEARNERS),
        "run.goal_tokens": steps * STEP_TOKENS * len(LEARNERS),
        "fragments.count": FRAGMENTS,
        "codec.rho": cell.rho,
    }
    maybe_line = Line() if available() else nullcontext()
    with maybe_line as line, Deployment(line=line) as run:
        run.broker(settings)
        for name in LEARNERS:
            run.learner(name, "tiny")
        run.wait_joined(LEARNERS)

        # All first copies have arrived: now counting begins.
        before = run.ask("status", run.address, "--json")
        first = None if line is None else line.read()
        for name in ("broker", *LEARNERS):
            run.running[name].ends(0)
        crossed = None
        if line is not None and first is not None:
            last = line.read()
            crossed = (last.up - first.up, last.down - first.down)
        merges = run.merges()[before["merges"] :]
        return bits(merges, before, run.final(), crossed)


def bits(
    merges: Sequence[dict[str, Any]],
    before: dict[str, Any],
    after: dict[str, Any],
    line_bytes: tuple[int, int] | None,
) -> Row:
    """Bits per parameter and exchange between two statuses of the broker.

    `merges` are those between the two, `line_bytes` the bytes (up, down) that crossed the line, if
    they are known. Up, a learner sends a fragment; down, every learner receives its next version.
    """
    sent = sum(each["elements"] * len(each["contributors"]) for each in merges)
    received = len(LEARNERS) * sum(each["elements"] for each in merges)
    payload_up, payload_down = payload_bits(merges)
    wire_up = after["line"]["up_bytes"] - before["line"]["up_bytes"]
    wire_down = after["line"]["down_bytes"] - before["line"]["down_bytes"]
    row: Row = {
        "exchanges": len(merges),
        "payload_up_bits_per_param": payload_up,
        "payload_down_bits_per_param": payload_down,
        "wire_up_bits_per_param": 8 * wire_up / sent,
        "wire_down_bits_per_param": 8 * wire_down / received,
        "line_up_bits_per_param": None,
        "line_down_bits_per_param": None,
    }
    if line_bytes is not None:
        line_up, line_down = line_bytes
        row["line_up_bits_per_param"] = 8 * line_up / sent
        row["line_down_bits_per_param"] = 8 * line_down / received
    return row


def headline(rows: Sequence[Row]) -> list[str]:
    """Gbit/s of one site for a large model, beside published figures."""
    told = [
        f"Gbit/s of one of {SITES} sites, {MODEL_PARAMS / 1e9:g} B parameters, {STEP_S:g} s a step,"
        f" each parameter exchanged every {SYNC_PERIOD_STEPS} steps:"
    ]
    for row in rows:
        up = site_gbps(row["payload_up_bits_per_param"])
        down = site_gbps(row["payload_down_bits_per_param"])
        told.append(f"  Narrows, rho {row['rho']:g}: {up:.2f} up, {down:.2f} down")
    return [
        *told,
        f"  Decoupled DiLoCo: {PUBLISHED_DECOUPLED_GBPS} published ({PUBLISHED_SOURCE})",
        f"  data parallel: {PUBLISHED_DATA_PARALLEL_GBPS:g} published, "
        f"{data_parallel_gbps():.0f} by arithmetic (bf16 ring, {UTILIZATION:.0%} computing)",
    ]


def site_gbps(payload_bits: float) -> float:
    """Gbit/s of a site in one direction.

    Headers of full TCP segments are added. Those of ZeroMQ are left out: they are below a
    thousandth of a large chunk.
    """
    on_line = payload_bits * (1 + SEGMENT_OVERHEAD_BYTES / SEGMENT_BYTES)
    return MODEL_PARAMS * on_line / (SYNC_PERIOD_STEPS * STEP_S) / 1e9


def data_parallel_gbps() -> float:
    """Gbit/s of a site that makes a ring all-reduce of bfloat16 gradients in every step.

    Gradients leave during the backward pass, the last two thirds of a step. The step stalls for
    those that have not left by its end. Source: the bandwidth tool of the first author of Decoupled
    DiLoCo.
    """
    sent_gbit = MODEL_PARAMS * 16 * 2 * (1 - 1 / SITES) / 1e9
    stall_s = STEP_S * (1 / UTILIZATION - 1)
    return sent_gbit / (stall_s + 2 / 3 * STEP_S)
