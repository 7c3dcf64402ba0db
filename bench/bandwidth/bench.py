"""`narrows bench bandwidth`: Gbit/s for a compute utilisation, published, modelled and measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from rich.console import Console

from narrows.bench.bandwidth import published as published_bandwidth
from narrows.bench.bandwidth.model import (
    BITS,
    FP4_BITS,
    GRID_GBPS,
    METHODS,
    SETUPS,
    Method,
    Setup,
    compute_utilization,
    data_parallel_gbps,
    decoupled_gbps,
    nearest_index,
    printed_index,
    reaching,
    ring_factor,
)
from narrows.bench.bandwidth.wire import CASES, WireRow, measure
from narrows.bench.kit import machine
from narrows.broker.cli.tables import Table, show, terminal
from narrows.broker.planning import PACKET_FACTOR, gaussian_bits

SITES: Final = 8
STEP_S: Final = 1.0
UTILIZATION: Final = 0.95
PAPER_PERIOD_STEPS: Final = 24
OWN_PERIOD_STEPS: Final = 10
"""H of our defaults."""

DECODED_PARAMS: Final = 5.04e9
"""Assumed parameters: with this number both published figures come out. The source names none."""

ASKED_PARAMS: Final = 5e9
FINE_RHO, COARSE_RHO = 0.5, 1.0


@dataclass(frozen=True)
class BandwidthRow:
    """A cell of the table: one model, method and target."""

    model: str
    params: int
    method: str
    compute_utilization_percent: int
    gbps: float
    """The bandwidth that the model prints: the last one of the grid below the target."""
    gbps_reaching: float | None
    """The first bandwidth that reaches the target; None: none of the grid does."""
    gbps_published: float | None
    """None: the cell was predicted before anybody looked at the published value."""
    grid_steps_off: int | None
    """Distance from the printed to the published value, in steps of the grid (a factor of 1.21)."""

    @property
    def difference_gbps(self) -> float | None:
        return None if self.gbps_published is None else self.gbps - self.gbps_published

    @property
    def difference_percent(self) -> float | None:
        if self.gbps_published is None:
            return None
        return 100 * (self.gbps / self.gbps_published - 1)

    def as_dict(self) -> dict[str, Any]:
        """The row as JSON takes it."""
        differences = {
            "difference_gbps": self.difference_gbps,
            "difference_percent": self.difference_percent,
        }
        return {**asdict(self), **differences}


@dataclass(frozen=True)
class BandwidthHeadline:
    """Rates of one site out of 8, with each assumption as a field."""

    what: str
    params: float
    sites: int
    step_s: float
    sync_period_steps: int
    up_bits_per_param: float
    down_bits_per_param: float
    traffic_factor: float
    """Factor from data to traffic, per site and direction: 2 (1 - 1/M) for a ring, 1 for a broker.
    """
    compute_utilization_percent: float
    up_gbps: float
    down_gbps: float
    hub_gbps: float
    """Rate into the broker, and out of it; 0: there is no broker."""
    gbps_published: float | None = None


def run_bandwidth_bench(json_file: Path | None, plot: Path | None, *, wire: bool) -> None:
    """Prints the tables and writes the requested files. `wire`: also run real processes."""
    console = terminal()
    rows = table_rows()
    _show_table(console, rows)
    console.print()
    wire_rows: list[WireRow] = []
    if wire:
        console.print(f"Training {len(CASES)} small models, a broker and two learners each ...")
        wire_rows = measure()
        _show_wire(console, wire_rows)
        console.print()
    headlines = headline_rows(wire_rows)
    _show_headlines(console, headlines)
    result = {
        "seed": 0,
        "source": published_bandwidth.TABLE_SOURCE,
        "headline_source": published_bandwidth.HEADLINE_SOURCE,
        "rows": [row.as_dict() for row in rows],
        "headline": [asdict(row) for row in headlines],
        "wire": [
            {**asdict(row), "difference_percent": row.difference_percent} for row in wire_rows
        ],
    }
    machine.write_result(json_file, "bandwidth", result)
    if plot is not None:
        from narrows.bench.kit.plots import bandwidth

        bandwidth([asdict(row) for row in rows], plot)


def table_rows() -> list[BandwidthRow]:
    """Every cell of the published table, and the cells of the rows that were held back."""
    return [row for setup in SETUPS for method in METHODS for row in _rows(setup, method)]


def _rows(setup: Setup, method: Method) -> Iterator[BandwidthRow]:
    utilization = compute_utilization(setup, method, GRID_GBPS)
    targets = published_bandwidth.TARGETS_PERCENT
    known = published_bandwidth.TABLE.get((setup.name, method.name), (None,) * len(targets))
    for target, published in zip(targets, known, strict=True):
        printed, reached = printed_index(utilization, target), reaching(utilization, target)
        yield BandwidthRow(
            model=setup.name,
            params=int(setup.params),
            method=method.name,
            compute_utilization_percent=target,
            gbps=float(GRID_GBPS[printed]),
            gbps_reaching=float(GRID_GBPS[reached]) if reached < GRID_GBPS.size else None,
            gbps_published=published,
            grid_steps_off=None if published is None else printed - nearest_index(published),
        )


def headline_rows(wire_rows: Sequence[WireRow]) -> list[BandwidthHeadline]:
    """The published pair, then our rates at 5 B parameters and 8 sites.

    Our rates take the measured bits, or the entropy of Gaussian data if nothing was measured.
    Packet headers are added to our rates only.
    """
    parallel = data_parallel_gbps(DECODED_PARAMS, STEP_S, SITES, UTILIZATION)
    decoupled = decoupled_gbps(DECODED_PARAMS, STEP_S, PAPER_PERIOD_STEPS, FP4_BITS)
    rows = [
        BandwidthHeadline(
            "data parallel, bf16 ring", DECODED_PARAMS, SITES, STEP_S, 1, BITS, BITS,
            ring_factor(SITES), 100 * UTILIZATION, parallel, parallel, 0.0,
            published_bandwidth.HEADLINE_DATA_PARALLEL_GBPS,
        ),
        BandwidthHeadline(
            "Decoupled DiLoCo, int4", DECODED_PARAMS, SITES, STEP_S, PAPER_PERIOD_STEPS, FP4_BITS,
            FP4_BITS, 1.0, 100.0, decoupled, decoupled, SITES * decoupled,
            published_bandwidth.HEADLINE_DECOUPLED_GBPS,
        ),
    ]  # fmt: skip
    for period in (PAPER_PERIOD_STEPS, OWN_PERIOD_STEPS):
        for rho in (FINE_RHO, COARSE_RHO):
            rows.append(_ours(wire_rows, period, rho))
    return rows


def _ours(wire_rows: Sequence[WireRow], period: int, rho: float) -> BandwidthHeadline:
    up, down = (_bits(wire_rows, direction, rho) for direction in ("up", "down"))
    up_gbps, down_gbps = (decoupled_gbps(ASKED_PARAMS, STEP_S, period, bits) for bits in (up, down))
    return BandwidthHeadline(
        f"Narrows, rho {rho:g}", ASKED_PARAMS, SITES, STEP_S, period, up, down, 1.0, 100.0,
        up_gbps, down_gbps, SITES * max(up_gbps, down_gbps),
    )  # fmt: skip


def _bits(wire_rows: Sequence[WireRow], direction: str, rho: float) -> float:
    """Bits per parameter on the wire, packet headers included."""
    mine = [row for row in wire_rows if row.direction == direction and row.rho == rho]
    if not mine:
        return PACKET_FACTOR * gaussian_bits(rho)
    # The largest model: headers weigh least there, as they do in one of 5B.
    return PACKET_FACTOR * max(mine, key=lambda row: row.params).measured_bits_per_param


def _show_table(console: Console, rows: Sequence[BandwidthRow]) -> None:
    source = published_bandwidth.TABLE_SOURCE
    console.print(f"Gbit/s for a compute utilisation: model / {source}")
    show(console, utilization_table(rows))
    known = [row for row in rows if row.grid_steps_off is not None]
    exact = sum(row.grid_steps_off == 0 for row in known)
    worst = max(abs(row.grid_steps_off or 0) for row in known)
    apart = fmean(abs(row.difference_percent or 0.0) for row in known)
    console.print(
        f"{exact} of {len(known)} published cells are the model's grid point, the others at most "
        f"{worst} grid step off (*); mean difference {apart:.1f} %. Predictions: every row of 100B."
    )


def utilization_table(rows: Sequence[BandwidthRow]) -> Table:
    """Models and methods by target."""
    targets = [f"{target} %" for target in published_bandwidth.TARGETS_PERCENT]
    table = Table(("model", "method", *targets), keys=2)
    for setup in SETUPS:
        for method in METHODS:
            mine = [row for row in rows if (row.model, row.method) == (setup.name, method.name)]
            table.add(setup.name, method.name, *map(_cell, mine))
    return table


def _cell(row: BandwidthRow) -> str:
    """Our value / the published value, and the difference below."""
    if row.difference_gbps is None:
        return f"{row.gbps:.1f}\npredicted"
    mark = "" if row.grid_steps_off == 0 else " *"
    return (
        f"{row.gbps:.1f} / {row.gbps_published:.1f}{mark}\n"
        f"{row.difference_gbps:+.2f}, {row.difference_percent:+.1f} %"
    )


def _show_wire(console: Console, rows: Sequence[WireRow]) -> None:
    console.print("Bits per parameter and exchange, ZeroMQ frames: arithmetic and real runs")
    show(console, wire_table(rows))


def wire_table(rows: Sequence[WireRow]) -> Table:
    """Real runs beside the arithmetic; first copies in bytes."""
    table = Table(
        ("model", "params", "rho", "way", "exchanges", "modelled", "measured", "difference",
         "first copies", "measured, with control"),
        keys=4,
    )  # fmt: skip
    for row in rows:
        table.add(
            row.preset, f"{row.params:,}", f"{row.rho:g}", row.direction, f"{row.exchanges:,}",
            f"{row.modelled_bits_per_param:.3f}", f"{row.measured_bits_per_param:.3f}",
            f"{row.difference_percent:+.1f} %", f"{row.modelled_first_copy_bytes:,}",
            f"{row.measured_other_bytes:,}",
        )  # fmt: skip
    return table


def _show_headlines(console: Console, rows: Sequence[BandwidthHeadline]) -> None:
    source = published_bandwidth.HEADLINE_SOURCE
    console.print(f"One site of {SITES}, {STEP_S:g} s per step. Published: {source}")
    show(console, headline_table(rows))
    console.print(
        f"Nobody published the model's size: {DECODED_PARAMS:.3g} parameters, int4, P = H = 24, "
        "data parallel at 95 % utilisation and a step of 1 s give both figures; other settings do "
        "too. Ours: headers of all layers included, steady state, first copies not."
    )


def headline_table(rows: Sequence[BandwidthHeadline]) -> Table:
    """Rates of one site."""
    table = Table(
        ("", "params", "H", "bits up", "down", "factor", "CU %", "Gbit/s up", "down",
         "broker, each way", "published"),
        keys=3,
    )  # fmt: skip
    for row in rows:
        published = "-" if row.gbps_published is None else f"{row.gbps_published:g}"
        table.add(
            row.what, f"{row.params:.3g}", str(row.sync_period_steps),
            f"{row.up_bits_per_param:.2f}", f"{row.down_bits_per_param:.2f}",
            f"{row.traffic_factor:g}", f"{row.compute_utilization_percent:g}",
            f"{row.up_gbps:.3g}", f"{row.down_gbps:.3g}",
            f"{row.hub_gbps:.3g}" if row.hub_gbps else "-", published,
        )  # fmt: skip
    return table
