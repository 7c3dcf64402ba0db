"""Pictures of what the benches measured; needs matplotlib (extra `bench`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
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
            "a plot needs matplotlib", remedy="pip install 'narrows[bench]'"
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))  # pyright: ignore[reportUnknownMemberType]
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


def _save(figure: Any, axes: Any, path: Path) -> None:
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)
