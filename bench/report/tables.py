"""The tables of the report: the columns of each bench's rows, and the nature of the figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from narrows.bench.report.files import ResultFile, Row

Show: TypeAlias = Callable[[Row], str]


@dataclass(frozen=True)
class Column:
    """One figure of a row: its heading, its key, and its format."""

    heading: str
    key: str
    form: str = "{}"
    times: float = 1.0

    def text(self, row: Row) -> str:
        """The text of the cell; empty where the row has no such figure."""
        value: Any = row.get(self.key)
        if value is None:
            return ""
        if isinstance(value, bool):
            return "yes" if value else "no"
        return self.form.format(value if self.times == 1 else value * self.times)


@dataclass(frozen=True)
class TableShape:
    """A table of some rows of a file."""

    title: str
    nature: str
    """Measurement or model, in words."""
    columns: Sequence[Column]
    key: str = "rows"
    keep: Callable[[Row], bool] = lambda row: True


@dataclass(frozen=True)
class ReportTable:
    """A table with its cells as text."""

    title: str
    nature: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


def tables_of(result: ResultFile) -> list[ReportTable]:
    """The tables of a file; tables without rows are left out."""
    made = [_made(shape, result) for shape in SHAPES[result.bench]]
    return [table for table in made if table.rows]


def _made(shape: TableShape, result: ResultFile) -> ReportTable:
    rows = [row for row in result.rows(shape.key) if shape.keep(row)]
    notes = [_note(row) for row in rows]
    headings = [column.heading for column in shape.columns]
    cells = [[column.text(row) for column in shape.columns] for row in rows]
    if any(notes):
        headings.append("note")
        cells = [[*row, note] for row, note in zip(cells, notes, strict=True)]
    return ReportTable(shape.title, shape.nature, headings, cells)


def _note(row: Row) -> str:
    """Reason why a row has no figures, or a remark on them."""
    for word in ("failed", "skipped"):
        if word in row:
            return f"{word}: {row[word]}"
    if row.get("problems"):
        return "; ".join(row["problems"])
    return "computed, not measured" if row.get("computed") else str(row.get("note", ""))


def _of(key: str, *values: str) -> Callable[[Row], bool]:
    return lambda row: row.get(key) in values


_MEASURED: Final = "measured"
_STEPS: Final = "{:.0f}"
_PERCENT: Final = "{:.1f}"

SHAPES: Final[Mapping[str, Sequence[TableShape]]] = {
    "bandwidth": (
        TableShape("Gbit/s for a compute utilisation", "model; published values beside it", (
            Column("model", "model"), Column("method", "method"),
            Column("utilisation %", "compute_utilization_percent"),
            Column("Gbit/s", "gbps", "{:.2f}"),
            Column("published", "gbps_published"),
            Column("difference %", "difference_percent", "{:+.1f}"),
        )),
        TableShape("One site of several: the headline",
              "arithmetic, with the bits of the next table if there is one", (
            Column("", "what"), Column("params", "params", "{:.3g}"), Column("sites", "sites"),
            Column("H", "sync_period_steps"), Column("bits up", "up_bits_per_param", "{:.2f}"),
            Column("bits down", "down_bits_per_param", "{:.2f}"),
            Column("Gbit/s up", "up_gbps", "{:.3g}"), Column("down", "down_gbps", "{:.3g}"),
            Column("at the broker, each way", "hub_gbps", "{:.3g}"),
            Column("published", "gbps_published"),
        ), "headline"),
        TableShape("Bits per parameter of real runs", "measured, beside arithmetic", (
            Column("model", "preset"), Column("params", "params", "{:,}"), Column("rho", "rho"),
            Column("way", "direction"), Column("exchanges", "exchanges"),
            Column("arithmetic", "modelled_bits_per_param", "{:.3f}"),
            Column("measured", "measured_bits_per_param", "{:.3f}"),
            Column("difference %", "difference_percent", "{:+.1f}"),
        ), "wire"),
    ),
    "goodput": (
        TableShape("Goodput and uptime",
              "model: a stall model, or the real machines on simulated failures", (
            Column("method", "method"), Column("learners", "learners"),
            Column("chips", "chips", "{:,}"),
            Column("goodput %", "goodput_percent", _PERCENT),
            Column("from", "ci_low_percent", _PERCENT),
            Column("to", "ci_high_percent", _PERCENT), Column("published", "published_percent"),
            Column("uptime %", "uptime_percent", _PERCENT), Column("source", "source"),
        ), keep=lambda row: row["method"] != "sweep"),
        TableShape("Goodput: distance from the published cells, points",
              "four constants fitted to all rows but that which is predicted", (
            Column("cells of", "cells_of"), Column("cells", "cells"),
            Column("mean", "mean_points", _PERCENT), Column("worst", "worst_points", _PERCENT),
        ), "agreement"),
        TableShape("Goodput, one thing varied", "the real state machines on simulated failures", (
            Column("sweep", "sweep"), Column("variant", "name"),
            Column("goodput %", "goodput_percent", _PERCENT),
            Column("uptime %", "uptime_percent", _PERCENT),
            Column("merged %", "merged_percent", _PERCENT),
            Column("learners per merge", "contributors_mean", "{:.2f}"),
            Column("relative time", "relative_time", "{:.2f}"),
            Column("published", "published_relative_time"),
        ), keep=_of("method", "sweep")),
    ),
    "chaos": (
        TableShape("Faults", "measured; inner steps are timed waits", (
            Column("learners", "learners"), Column("s", "seconds", _STEPS),
            Column("faults", "faults"),
            Column("kills", "kills"), Column("stops", "stops"), Column("cuts", "cuts"),
            Column("broker kills", "broker_kills"),
            Column("throughput kept %", "throughput_kept_percent", _PERCENT),
            Column("available %", "available_percent", _PERCENT),
            Column("merged kept %", "merged_kept_percent", _PERCENT),
            Column("participation %", "participation_percent", _PERCENT),
            Column("fewest", "participation_min"),
            Column("killed, merged again s", "rejoin_kill_median_s", "{:.1f}"),
            Column("digests", "digests_compared"), Column("different", "digests_different"),
            Column("versions lost", "versions_lost"), Column("replay equal", "replay_equal"),
            Column("ledger balanced", "ledger_ok"),
        )),
    ),
    "wan": (
        TableShape("Exchanges over a line", "measured; rows marked so are computed", (
            Column("line", "line"), Column("", "name"),
            Column("s/exchange", "exchange_s_median", "{:.3f}"),
            Column("p95", "exchange_s_p95", "{:.3f}"),
            Column("bytes/rate s", "line_s_per_exchange", "{:.3f}"),
            Column("MB up", "up_wire_bytes_per_exchange", "{:.2f}", 1e-6),
            Column("MB down", "down_wire_bytes_per_exchange", "{:.2f}", 1e-6),
            Column("cpu s", "cpu_s_per_exchange", "{:.2f}"),
            Column("control p99 ms", "control_round_trip_s_p99", _STEPS, 1e3),
        )),
    ),
    "wan-budget": (
        TableShape("Shares of the budget, windows of one second", _MEASURED, (
            Column("budget", "line"), Column("", "name"),
            Column("up mean", "up_mean_over_cap", "{:.3f}"),
            Column("peak", "up_peak_over_cap", "{:.3f}"),
            Column("down mean", "down_mean_over_cap", "{:.3f}"),
            Column("peak", "down_peak_over_cap", "{:.3f}"),
            Column("control p99 ms", "control_round_trip_s_p99", _STEPS, 1e3),
            Column("holds", "holds"), Column("uses", "uses"),
            Column("control in time", "control_in_time"),
        )),
    ),
    "wan-training": (
        TableShape("Training over a line", _MEASURED, (
            Column("line", "line"), Column("", "name"),
            Column("tokens/s", "tokens_per_s", "{:,.0f}"),
            Column("loss", "validation_loss", "{:.3f}"),
            Column("kB up per step", "up_wire_bytes_per_step", "{:,.0f}", 1e-3),
            Column("communication/compute", "communication_over_compute", "{:.2f}"),
            Column("of unlimited", "of_its_own_unlimited_rate", "{:.2f}"),
            Column("times data parallel", "times_data_parallel", "{:.2f}"),
        )),
    ),
    "peers": (
        TableShape("Other systems beside ours, hurt and not", "measured, one run per row", (
            Column("system", "system"), Column("version", "version"), Column("event", "event"),
            Column("loss", "loss", "{:.4f}"), Column("s", "seconds", "{:.1f}"),
            Column("MB", "bytes", "{:,.1f}", 1e-6), Column("went on", "went_on"),
            Column("recovered after s", "recovered_after_s", "{:.1f}"),
            Column("all back after s", "rejoined_after_s", "{:.1f}"),
            Column("longest pause s", "longest_pause_s", "{:.1f}"),
        )),
    ),
    "quality": (
        TableShape("Test loss over data parallel at equal tokens",
              "measured on small models; time is virtual", (
            Column("group", "group"), Column("cell", "cell"), Column("model", "model"),
            Column("learners", "learners"), Column("bits up", "up_bits_per_param", "{:.2f}"),
            Column("down", "down_bits_per_param", "{:.2f}"), Column("loss", "loss", "{:.4f}"),
            Column("data parallel", "loss_data_parallel", "{:.4f}"),
            Column("excess %", "excess_percent", "{:+.1f}"),
            Column("from", "ci_low_percent", "{:+.1f}"),
            Column("to", "ci_high_percent", "{:+.1f}"), Column("seeds", "seeds"),
        )),
    ),
    "codec": (
        TableShape("Codecs", _MEASURED, (
            Column("data", "data"), Column("codec", "codec"), Column("rho", "rho"),
            Column("threads", "threads"),
            Column("bits", "wire_bits_per_param", "{:.2f}"), Column("SNR dB", "snr_db", "{:.1f}"),
            Column("Shannon bits", "shannon_bits_at_snr", "{:.2f}"),
            Column("encode G/s", "encode_params_per_s", "{:.3f}", 1e-9),
            Column("decode + add G/s", "decode_accumulate_params_per_s", "{:.2f}", 1e-9),
            Column("memcpy G/s", "memcpy_params_per_s", "{:.2f}", 1e-9),
        )),
    ),
    "merge": (
        TableShape("Merges", "measured; memory beside its formula", (
            Column("learners", "learners"), Column("params", "params", "{:,}"),
            Column("fragments", "fragments"),
            Column("ms per round", "seconds_per_round", "{:.1f}", 1e3),
            Column("M params/s", "params_per_s", "{:.0f}", 1e-6),
            Column("peak MB", "peak_bytes", "{:,.0f}", 1e-6),
            Column("formula MB", "formula_bytes", "{:,.0f}", 1e-6),
        )),
    ),
    "loop": (
        TableShape("The whole exchange on loopback", _MEASURED, (
            Column("learners", "learners"), Column("params", "params", "{:,}"),
            Column("rounds/s", "rounds_per_s", "{:.2f}"),
            Column("M params merged/s", "params_merged_per_s", "{:.1f}", 1e-6),
            Column("Gbit/s up", "up_gbit_per_s", "{:.2f}"),
            Column("down", "down_gbit_per_s", "{:.2f}"),
            Column("broker cores", "broker_cores", "{:.2f}"),
            Column("learner cores", "learner_cores", "{:.2f}"),
        )),
    ),
    "journal": (
        TableShape("What the journal costs", _MEASURED, (
            Column("journal", "journal"), Column("params", "params", "{:,}"),
            Column("learners", "learners"),
            Column("rounds/s", "rounds_per_s", "{:.2f}"),
            Column("MB per round", "bytes_per_round", "{:.1f}", 1e-6),
            Column("merge ms", "merge_ms_median", _STEPS),
            Column("added ms", "added_ms_median", "{:.1f}"),
            Column("p99", "added_ms_p99", "{:.1f}"),
        )),
    ),
    "demo": (
        TableShape("The demo", "measured; data parallelism's bytes are computed", (
            Column("learners", "learners"), Column("steps", "steps"),
            Column("params", "parameters", "{:,}"),
            Column("tokens", "tokens", "{:,}"), Column("loss", "loss_global", "{:.4f}"),
            Column("one learner alone", "loss_alone", "{:.4f}"),
            Column("data parallel", "loss_data_parallel", "{:.4f}"),
            Column("recovered %", "recovered", "{:.0f}", 100.0),
            Column("bits up", "up_bits_per_param", "{:.2f}"),
            Column("down", "down_bits_per_param", "{:.2f}"),
            Column("times fewer bytes", "traffic_ratio", "{:.0f}"),
            Column("rejoin s", "rejoin_s", "{:.1f}"), Column("digests", "digests_compared"),
            Column("differing", "digests_differing"), Column("s", "wall_s", _STEPS),
        )),
    ),
}  # fmt: skip
