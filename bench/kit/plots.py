"""Pictures of the benches' results; needs matplotlib (extra `bench`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from narrows.proto.errors import ConfigError

SNR_DB_MAX: Final = 60.0
DB_PER_BIT: Final = 6.0206
"""20 log10(2)."""


def _figure() -> tuple[Any, Any]:
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError(
            "a plot needs matplotlib", remedy="pip install '.[bench]' in the checkout"
        ) from error
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "narrows"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    return figure, axes


def rate_distortion(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Bits against SNR of every codec, with the Shannon curve of Gaussian data.

    `rows` are those of the codec bench.
    """
    figure, axes = _figure()
    shown = [r for r in rows if r["threads"] == 1 and r["snr_db"] and r["snr_db"] < SNR_DB_MAX]
    for data in dict.fromkeys(row["data"] for row in shown):
        mine = [row for row in shown if row["data"] == data and row["rho"] is not None]
        points = sorted((row["wire_bits_per_param"], row["snr_db"]) for row in mine)
        axes.plot(*zip(*points, strict=True), "o-", label=f"{data}, ours")
    for row in shown:
        if row["rho"] is None and row["data"] == "recorded":
            place = row["wire_bits_per_param"], row["snr_db"]
            axes.plot(*place, "x", color="black")
            axes.annotate(row["codec"], place, fontsize=7)
    bits = [b / 10 for b in range(90)]
    axes.plot(bits, [DB_PER_BIT * b for b in bits], "--", color="grey", label="Shannon, Gaussian")
    axes.set_xlabel("bits per parameter on the wire")
    axes.set_ylabel("signal over error, dB")
    axes.set_ylim(0, SNR_DB_MAX)
    axes.legend(fontsize=8)
    _save(figure, axes, path)


def merge_cost(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Nanoseconds per parameter of a round against learners, by size; rows of the merge bench."""
    figure, axes = _figure()
    for params in dict.fromkeys(row["params"] for row in rows if row["fragments"] == 1):
        mine = [row for row in rows if row["params"] == params and row["fragments"] == 1]
        cost = [(row["learners"], 1e9 / row["params_per_s"]) for row in mine]
        axes.plot(*zip(*cost, strict=True), "o-", label=f"{params / 1e6:.0f} M parameters")
    axes.set_xlabel("learners")
    axes.set_ylabel("ns per parameter of a round")
    axes.set_xlim(0)
    axes.set_ylim(0)
    axes.legend(fontsize=8)
    _save(figure, axes, path)


EXCESS_SHOWN_PERCENT: Final = (-5.0, 30.0)
"""Limits of the axis. A run that diverges would hide the differences of all others."""


def loss_against_bits(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Excess over data parallel against bits on the way up; a point with its interval per cell.

    `rows` are those of the quality bench; data parallel itself is the zero line. Cells with one or
    two seeds are shown only if there are no others, because their intervals would hide the others.
    """
    figure, axes = _figure()
    cells = [row for row in rows if row["mode"] != "data_parallel"]
    cells = [row for row in cells if len(row["seeds"]) > 2] or cells
    style: dict[str, Any] = {"markersize": 4, "capsize": 2}
    for number, group in enumerate(dict.fromkeys(row["group"] for row in cells)):
        mine = [row for row in cells if row["group"] == group]
        excess = [row["excess_percent"] for row in mine]
        # One seed has no interval.
        below = [e - (row["ci_low_percent"] or e) for e, row in zip(excess, mine, strict=True)]
        above = [(row["ci_high_percent"] or e) - e for e, row in zip(excess, mine, strict=True)]
        bits = [row["up_bits_per_param"] for row in mine]
        axes.errorbar(
            bits, excess, (below, above), fmt="os^"[number // 10 % 3], **style, label=group
        )
    axes.axhline(0, linestyle="--", color="grey")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("bits per parameter on the way up")
    axes.set_ylabel("test loss over data parallel, %")
    axes.set_ylim(*EXCESS_SHOWN_PERCENT)
    axes.legend(fontsize=8, ncols=2)
    _save(figure, axes, path)


def loss_curves(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Validation loss against steps, the mean over the seeds of each name; `rows` are runs."""
    figure, axes = _figure()
    for name in dict.fromkeys(row["name"] for row in rows):
        curves = [row["curve"] for row in rows if row["name"] == name]
        # Merges happen at other steps with every seed; some seeds have one look more than others.
        looks = [*zip(*curves, strict=False)]
        means = [[fmean(values) for values in zip(*look, strict=True)] for look in looks]
        axes.plot(*zip(*means, strict=True), "o-", markersize=3, label=name)
    axes.set_xlabel("step of the run")
    axes.set_ylabel("validation loss, nats per byte")
    axes.legend(fontsize=8)
    _save(figure, axes, path)


def bandwidth(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Gbit/s against compute utilisation, a line per model and method; crosses are published.

    `rows` are those of the bandwidth bench.
    """
    figure, axes = _figure()
    for model in dict.fromkeys(row["model"] for row in rows):
        style = {"1B": ":", "10B": "--"}.get(model, "-")
        for index, method in enumerate(dict.fromkeys(row["method"] for row in rows)):
            mine = [row for row in rows if (row["model"], row["method"]) == (model, method)]
            targets = [row["compute_utilization_percent"] for row in mine]
            gbps = [row["gbps"] for row in mine]
            axes.plot(targets, gbps, style, color=f"C{index}", label=f"{model} {method}")
            published = [row["gbps_published"] for row in mine]
            if None not in published:
                axes.plot(targets, published, "x", color=f"C{index}")
    axes.set_yscale("log")
    axes.set_ylim(0.03, 1500)
    axes.set_xlabel("compute utilisation, %")
    axes.set_ylabel("Gbit/s")
    axes.legend(fontsize=7, ncols=3, loc="lower center")
    _save(figure, axes, path)


def goodput_by_chips(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Goodput against chips, a line per method; crosses are published. Rows of the goodput bench
    without its sweep."""
    figure, axes = _figure()
    for method, learners in dict.fromkeys((row["method"], row["learners"]) for row in rows):
        mine = [row for row in rows if (row["method"], row["learners"]) == (method, learners)]
        chips = [row["chips"] for row in mine]
        label = f"M = {learners}" if method == "decoupled" else method.replace("_", " ")
        (line,) = axes.plot(chips, [row["goodput_percent"] for row in mine], "o-", label=label)
        known = [(row["chips"], row["published_percent"]) for row in mine]
        known = [point for point in known if point[1] is not None]
        if known:
            axes.plot(*zip(*known, strict=True), "x", color=line.get_color(), markersize=10)
    axes.set_xscale("log", base=2)
    shown = sorted({row["chips"] for row in rows})
    axes.set_xticks(shown, [f"{chips // 1000}k" for chips in shown])
    axes.set_xlabel("chips, each interrupted once a year")
    axes.set_ylabel("goodput, %")
    axes.set_ylim(0, 100)
    axes.legend(fontsize=8)
    _save(figure, axes, path)


def time_lines(lines: Mapping[str, Sequence[tuple[float, float]]], path: Path) -> None:
    """Times at which each job trained: its stretches (begin, end) in seconds as bars, the first job
    on top."""
    figure, axes = _figure()
    for place, stretches in enumerate(lines.values()):
        bars = [(begin_s / 60, (end_s - begin_s) / 60) for begin_s, end_s in stretches]
        axes.broken_barh(bars, (place - 0.35, 0.7))
    axes.set_yticks(range(len(lines)), list(lines))
    axes.invert_yaxis()
    axes.set_xlabel("minutes; gaps are stalls")
    _save(figure, axes, path)


def contributors(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Share of the merges by number of contributors; rows of the chaos bench."""
    figure, axes = _figure()
    for row in rows:
        counts = {int(count): merges for count, merges in row["merges_by_contributors"].items()}
        shares = [100 * merges / row["merges"] for merges in counts.values()]
        label = f"{row['learners']} learners, {row['faults']} faults in {row['seconds']:.0f} s"
        axes.bar(list(counts), shares, label=label)
    axes.set_xlabel("learners that contributed to a merge")
    axes.set_ylabel("merges, %")
    axes.legend(fontsize=8)
    _save(figure, axes, path)


def exchange_seconds(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Seconds per exchange, a bar per line and system; rows of the wan bench with figures."""
    _bars(rows, "exchange_s_median", "seconds per exchange", path)


def training_rates(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Tokens per second, a bar per line and system; rows of the training bench with figures."""
    _bars(rows, "tokens_per_s", "tokens per second", path)


def _bars(rows: Sequence[Mapping[str, Any]], key: str, label: str, path: Path) -> None:
    figure, axes = _figure()
    names = [f"{row['line']}: {row['name']}" for row in rows]
    bars = axes.barh(range(len(rows)), [row[key] for row in rows])
    axes.bar_label(bars, fmt="%.3g", fontsize=7, padding=2)
    axes.set_yticks(range(len(rows)), names, fontsize=6)
    axes.invert_yaxis()
    axes.set_xlabel(label)
    _save(figure, axes, path)


def loss_against_bytes(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Loss against bytes of every system that finished, a marker per event; rows of the peers
    bench."""
    figure, axes = _figure()
    finished = [row for row in rows if row.get("loss") is not None]
    systems = [*dict.fromkeys(row["system"] for row in finished)]
    markers = {"none": "o", "member_killed": "^", "coordinator_killed": "s"}
    for row in finished:
        color, event = f"C{systems.index(row['system'])}", row["event"]
        label = f"{row['system']}, {event.replace('_', ' ')}"
        axes.plot(row["bytes"] / 1e6, row["loss"], markers[event], color=color, label=label)
    axes.set_xscale("log")
    axes.set_xlabel("MB on the wire, all members")
    axes.set_ylabel("validation loss, nats per byte")
    axes.legend(fontsize=7)
    _save(figure, axes, path)


def _save(figure: Any, axes: Any, path: Path) -> None:
    from matplotlib import pyplot

    axes.grid(alpha=0.3)
    figure.tight_layout()
    # Without the date, the same figures give the same file.
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)
