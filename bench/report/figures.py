"""The headline figures of every bench: ours beside published ones and other systems.

Every figure names the file and the row that it was read from. Only published figures are written
down here, each with its source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from narrows.bench.report.files import ResultFile, Row
from narrows.proto.units import format_bytes

Nature: TypeAlias = Literal["measured", "model", "simulated", "measured bits, arithmetic"]

FAULTS_SOURCE: Final = "torchft DiLoCo, 32 replicas (nicholi.ai, 2026)"
FAULTS_THROUGHPUT_PERCENT: Final = 97.7
FAULTS_PARTICIPATION_MIN: Final = 16
FAULTS_REJOIN_S: Final = 149.0

QUALITY_SEEDS: Final = 5
"""Cells with fewer seeds are in the tables only; the modes are always shown."""


@dataclass(frozen=True)
class Figure:
    """One line of the table of results."""

    what: str
    ours: str
    other: str
    """The published figure, or another system in the same run; "" without either."""
    nature: Nature
    source: str
    """File and row of our figure."""


def figures_of(result: ResultFile) -> list[Figure]:
    """The figures of a file; figures that the file does not have are left out."""
    return list(FIGURES[result.bench](result))


def _bandwidth(result: ResultFile) -> Iterator[Figure]:
    known = [row for row in result.rows() if row["grid_steps_off"] is not None]
    if known:
        exact = sum(row["grid_steps_off"] == 0 for row in known)
        yield Figure(
            "Gbit/s for a compute utilisation: published cells that our model gives (fitted)",
            f"{exact} of {len(known)}", str(result.data["source"]), "model", f"{result.file} rows",
        )  # fmt: skip
    published = [row for row in result.rows("headline") if row["gbps_published"] is not None]
    beside = "; ".join(f"{row['what']}: {row['gbps_published']:g} published" for row in published)
    for rho in (0.5, 1):
        found = result.find("headline", what=f"Narrows, rho {rho:g}", sync_period_steps=24)
        if found:
            place, row = found
            params, sites = row["params"] / 1e9, row["sites"]
            yield Figure(
                f"Gbit/s per site, {params:g} B parameters, {sites} sites, H 24, rho {rho:g}",
                f"{row['up_gbps']:.2f} up, {row['down_gbps']:.2f} down", beside,
                "measured bits, arithmetic" if result.rows("wire") else "model", place,
            )  # fmt: skip


def _goodput(result: ResultFile) -> Iterator[Figure]:
    for method, learners, fitted in (
        ("data_parallel", 1, " (fitted)"),
        ("elastic", 1, " (fitted)"),
        ("decoupled", 8, " (fitted)"),
        ("decoupled", 2, " (predicted)"),
    ):
        found = result.find(method=method, learners=learners, chips=1_200_000)
        if found:
            place, row = found
            name = method.replace("_", " ") + (f", M = {learners}" if learners > 1 else "")
            half = row["goodput_percent"] - row["ci_low_percent"]
            published = row["published_percent"]
            yield Figure(
                f"goodput of 1.2 M chips, {name}{fitted}",
                f"{row['goodput_percent']:.1f}% ±{half:.1f}",
                "" if published is None else f"{published:g}% (arXiv 2604.21428)",
                "model" if row["source"] == "stall model" else "simulated", place,
            )  # fmt: skip
    for name in ("decoupled, fitted", "decoupled, M = 2, predicted"):
        found = result.find("agreement", cells_of=name)
        if found:
            place, row = found
            yield Figure(
                f"goodput, distance from {row['cells']} published cells: {name}",
                f"{row['mean_points']:.1f} points in the mean, {row['worst_points']:.1f} at worst",
                "whole percents (arXiv 2604.21428)", "simulated", place,
            )  # fmt: skip


def _chaos(result: ResultFile) -> Iterator[Figure]:
    found = result.find()
    if found is None:
        return
    place, row = found
    faults = f"{row['learners']} learners, {row['faults']} faults in {row['seconds']:.0f} s"
    available = f"{row['available_percent']:.1f}% available"
    # Both: a learner that is cut off makes steps that nobody merges.
    kept = (
        f"{row['throughput_kept_percent']:.1f}% of the steps, "
        f"{row['merged_kept_percent']:.1f}% of the merged tokens"
    )
    yield Figure(
        f"throughput kept, {faults}, steps are timed waits", f"{kept} ({available})",
        f"{FAULTS_THROUGHPUT_PERCENT}%: {FAULTS_SOURCE}", "measured", place,
    )  # fmt: skip
    lowest = f"{row['participation_percent']:.1f}% in the mean, at least {row['participation_min']}"
    yield Figure(
        f"contributors per merge, {faults}", f"{lowest} of {row['learners']}",
        f"fell to {FAULTS_PARTICIPATION_MIN} of 32: {FAULTS_SOURCE}", "measured", place,
    )  # fmt: skip
    if row["rejoin_kill_median_s"] is not None:
        yield Figure(
            "a killed learner is merged again after (median)",
            f"{row['rejoin_kill_median_s']:.1f} s",
            f"{FAULTS_REJOIN_S:.0f} s: {FAULTS_SOURCE}", "measured", place,
        )  # fmt: skip
    yield Figure(
        "copies that differ from the journal's, versions lost",
        f"{row['digests_different']} of {row['digests_compared']}, {row['versions_lost']}", "",
        "measured", place,
    )  # fmt: skip


def _wan(result: ResultFile) -> Iterator[Figure]:
    for line in dict.fromkeys(row["line"] for row in result.rows()):
        found = result.find(line=line, name="narrows int4-zstd, 4 streams")
        if found and not found[1].get("computed"):
            beside = [
                r for r in result.rows() if r["line"] == line and r["name"] != found[1]["name"]
            ]
            yield Figure(
                f"seconds per exchange: {line}", f"{found[1]['exchange_s_median']:.3f}",
                ", ".join(map(_exchange, beside)), "measured", found[0],
            )  # fmt: skip


def _exchange(row: Row) -> str:
    for word in ("failed", "skipped"):
        if word in row:
            return f"{row['name']} {word}"
    computed = " (computed)" if row.get("computed") else ""
    return f"{row['name']} {row['exchange_s_median']:.3f}{computed}"


def _budget(result: ResultFile) -> Iterator[Figure]:
    for word, what in (("holds", "budgets held"), ("uses", "budgets used to 95%")):
        flags = [row[word] for row in result.rows() if word in row]
        if flags:
            count = f"{sum(flags)} of {len(flags)}"
            yield Figure(f"{what} on the wire", count, "", "measured", f"{result.file} rows")


def _training(result: ResultFile) -> Iterator[Figure]:
    for line in dict.fromkeys(row["line"] for row in result.rows()):
        found, parallel = result.find(line=line, name="narrows"), result.find(
            line=line, name="ddp f32"
        )  # fmt: skip
        if found and parallel:
            ours, theirs = (f"{row['tokens_per_s']:,.0f}" for _, row in (found, parallel))
            yield Figure(
                f"tokens per second while training: {line}", ours,
                f"data parallel over Gloo, float32: {theirs}", "measured", found[0],
            )  # fmt: skip


def _peers(result: ResultFile) -> Iterator[Figure]:
    for event, what in (
        ("none", "undisturbed"),
        ("member_killed", "SIGKILL of a member"),
        ("coordinator_killed", "SIGKILL of the coordinator"),
    ):
        found = result.find(system="narrows", event=event)
        if found:
            rows = [r for r in result.rows() if r["event"] == event and r["system"] != "narrows"]
            beside = "; ".join(f"{row['system']} {_peer(row)}" for row in rows)
            yield Figure(
                f"loss, bytes, seconds; {what}", _peer(found[1]), beside, "measured", found[0]
            )


def _peer(row: Row) -> str:
    if "skipped" in row:
        return "skipped"
    loss = "no model" if row["loss"] is None else f"{row['loss']:.3f}"
    text = f"{loss}, {format_bytes(row['bytes'])}, {row['seconds']:.0f} s"
    return text if row["went_on"] is not False else f"{text}, did not go on"


def _quality(result: ResultFile) -> Iterator[Figure]:
    for number, row in enumerate(result.rows()):
        measure = row["mode"] == "data_parallel"
        if not measure and (row["group"] == "modes" or len(row["seeds"]) >= QUALITY_SEEDS):
            low, high = row["ci_low_percent"], row["ci_high_percent"]
            interval = "" if low is None else f" [{low:+.1f}, {high:+.1f}]"
            yield Figure(
                f"test loss over data parallel: {row['cell']} ({row['learners']} learners,"
                f" {row['steps']} steps, {row['up_bits_per_param']:.1f} bits, {row['model']})",
                f"{row['excess_percent']:+.1f}%{interval}",
                f"data parallel: {row['loss_data_parallel']:.4f} nats per byte", "measured",
                f"{result.file} rows[{number}]",
            )  # fmt: skip


def _codec(result: ResultFile) -> Iterator[Figure]:
    for rho in (0.5, 1.0):
        found = result.find(data="recorded", codec="int4-zstd", rho=rho, threads=1)
        if found:
            place, row = found
            yield Figure(
                f"bits per parameter, int4 at rho = {rho:g}, outer gradients of a GPT",
                f"{row['wire_bits_per_param']:.2f} at {row['snr_db']:.1f} dB",
                f"{row['shannon_bits_at_snr']:.2f}: Shannon bound of Gaussian data", "measured",
                place,
            )  # fmt: skip
            speed, copied = (
                row[key] / 1e9 for key in ("encode_params_per_s", "memcpy_params_per_s")
            )
            yield Figure(
                f"10⁹ parameters encoded per second and thread, rho = {rho:g}", f"{speed:.2f}",
                f"copying them: {copied:.2f}", "measured", place,
            )  # fmt: skip


def _merge(result: ResultFile) -> Iterator[Figure]:
    rows = result.rows()
    number = max(range(len(rows)), key=lambda i: (rows[i]["params"], rows[i]["learners"]))
    row = rows[number]
    yield Figure(
        f"memory of a merge, {row['params'] / 1e6:.0f} M parameters, {row['learners']} learners",
        f"{format_bytes(row['peak_bytes'])}, {row['params_per_s'] / 1e6:.0f} M parameters/s",
        f"by formula: {format_bytes(row['formula_bytes'])}", "measured",
        f"{result.file} rows[{number}]",
    )  # fmt: skip


def _loop(result: ResultFile) -> Iterator[Figure]:
    found = result.find()
    if found:
        place, row = found
        rates = f"{row['rounds_per_s']:.1f} rounds/s, {row['params_merged_per_s'] / 1e6:.0f} M/s"
        yield Figure(
            f"whole exchange on loopback, {row['learners']} learners", rates, "", "measured", place
        )


def _journal(result: ResultFile) -> Iterator[Figure]:
    off, full = result.find(journal="off"), result.find(journal="full")
    if off and full:
        yield Figure(
            "rounds per second with the full journal", f"{full[1]['rounds_per_s']:.1f}",
            f"without: {off[1]['rounds_per_s']:.1f}", "measured", full[0],
        )  # fmt: skip


def _demo(result: ResultFile) -> Iterator[Figure]:
    row = result.data
    parallel, alone = row.get("loss_data_parallel"), f"one learner alone: {row['loss_alone']:.4f}"
    beside = alone if parallel is None else f"data parallel: {parallel:.4f}; {alone}"
    # Results of earlier versions do not say it: they always had a kill.
    what = "demo: validation loss" + (", one learner killed" if row.get("killed", True) else "")
    yield Figure(what, f"{row['loss_global']:.4f}", beside, "measured", result.file)
    sent = format_bytes(row["up_bytes"] + row["down_bytes"])
    yield Figure(
        "demo: bytes over the wire", f"{sent}, 1/{row['traffic_ratio']:.0f} as much",
        f"data parallel: {format_bytes(row['data_parallel_bytes'])} (computed)", "measured",
        result.file,
    )  # fmt: skip


FIGURES: Final[Mapping[str, Callable[[ResultFile], Iterator[Figure]]]] = {
    "bandwidth": _bandwidth, "goodput": _goodput, "chaos": _chaos, "wan": _wan,
    "wan-budget": _budget, "wan-training": _training, "peers": _peers, "quality": _quality,
    "codec": _codec, "merge": _merge, "loop": _loop, "journal": _journal, "demo": _demo,
}  # fmt: skip
