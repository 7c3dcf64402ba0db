"""`narrows bench bandwidth`: bits per parameter on the wire, and Gbit/s per site.

Bits are counted in runs of the reference model: by the broker in the frames of ZeroMQ, and where
namespaces can be made (as root) by the kernel on a line between two of them, with the headers of
all layers. First copies are not counted: a long run does not notice them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

from narrows.bench.kit import line as lines
from narrows.bench.kit.rows import Column, Json, Row, Short, bench
from narrows.bench.kit.run import Run, payload_bits
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
"""The source names neither the model's size nor its step: with MODEL_PARAMS and the numbers above
both figures come out, within 2%."""
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
    """One run of two learners with this step of the codes."""

    rho: float


CELLS: Final = (BandwidthCell(0.5), BandwidthCell(1.0))


def bandwidth(*, short: Short = False, json: Json = None) -> None:
    """Measure bits per parameter on the wire, and Gbit/s per site."""
    bench("bandwidth", CELLS[:1] if short else CELLS, measure, COLUMNS, headline, json=json)


def measure(cell: BandwidthCell, *, steps: int = STEPS) -> Row:
    """One run; `line_...` are None without namespaces."""
    settings = {
        "run.learners_at_start": len(LEARNERS),
        "run.goal_tokens": steps * STEP_TOKENS * len(LEARNERS),
        "fragments.count": FRAGMENTS,
        "codec.rho": cell.rho,
    }
    with ExitStack() as stack:
        line = stack.enter_context(lines.Line()) if lines.available() else None
        run = stack.enter_context(Run(line=line))
        run.broker(settings)
        for name in LEARNERS:
            run.learner(name, "tiny")
        run.wait_joined(LEARNERS)
        before = run.ask("status", run.address, "--json")
        first = line.read() if line else None
        for name in ("broker", *LEARNERS):
            run.ends(name, 0)
        last = line.read() if line else None
        merges = run.merges()[before["merges"] :]
        crossed = (last.up - first.up, last.down - first.down) if first and last else None
        return bits(merges, before, run.final(), crossed)


def bits(
    merges: Sequence[dict[str, Any]],
    before: dict[str, Any],
    after: dict[str, Any],
    line_bytes: tuple[int, int] | None,
) -> Row:
    """Bits per parameter and exchange between two statuses, from the merges between them; if the
    bytes (up, down) that crossed the line are known, those too.

    Up, a learner sends a fragment; down, each receives its next version.
    """
    sent = sum(each["elements"] * len(each["contributors"]) for each in merges)
    received = len(LEARNERS) * sum(each["elements"] for each in merges)
    payload_up, payload_down = payload_bits(merges)
    return {
        "exchanges": len(merges),
        "payload_up_bits_per_param": payload_up,
        "payload_down_bits_per_param": payload_down,
        "wire_up_bits_per_param": 8 * (after["up_bytes"] - before["up_bytes"]) / sent,
        "wire_down_bits_per_param": 8 * (after["down_bytes"] - before["down_bytes"]) / received,
        "line_up_bits_per_param": 8 * line_bytes[0] / sent if line_bytes else None,
        "line_down_bits_per_param": 8 * line_bytes[1] / received if line_bytes else None,
    }


def headline(rows: Sequence[Row]) -> list[str]:
    """Gbit/s of one site for a large model beside published figures."""
    told = [
        f"Gbit/s of one of {SITES} sites, {MODEL_PARAMS / 1e9:g} B parameters, {STEP_S:g} s a step,"
        f" each parameter exchanged every {SYNC_PERIOD_STEPS} steps:"
    ]
    for row in rows:
        up, down = (site_gbps(row[f"payload_{way}_bits_per_param"]) for way in ("up", "down"))
        told.append(f"  Narrows, rho {row['rho']:g}: {up:.2f} up, {down:.2f} down")
    return [
        *told,
        f"  Decoupled DiLoCo: {PUBLISHED_DECOUPLED_GBPS} published ({PUBLISHED_SOURCE})",
        f"  data parallel: {PUBLISHED_DATA_PARALLEL_GBPS:g} published, "
        f"{data_parallel_gbps():.0f} by arithmetic (bf16 ring, {UTILIZATION:.0%} computing)",
    ]


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
