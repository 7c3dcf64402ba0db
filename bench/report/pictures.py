"""The pictures of the report, drawn from the rows of the files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from narrows.bench.kit import plots
from narrows.bench.report.files import ResultFile, Row

SUFFIXES: Final = (".svg", ".png")

Draw = Callable[[Sequence[Row], Path], None]


def _without_sweep(row: Row) -> bool:
    return str(row["method"]) != "sweep"


def _has(key: str) -> Callable[[Row], bool]:
    return lambda row: row.get(key) is not None


PICTURES: Final[Mapping[str, tuple[Draw, Callable[[Row], bool]]]] = {
    "bandwidth": (plots.bandwidth, _has("gbps")),
    "goodput": (plots.goodput_by_chips, _without_sweep),
    "chaos": (plots.contributors, _has("merges_by_contributors")),
    "wan": (plots.exchange_seconds, _has("exchange_s_median")),
    "wan-training": (plots.training_rates, _has("tokens_per_s")),
    "peers": (plots.loss_against_bytes, _has("loss")),
    "quality": (plots.loss_against_bits, _has("excess_percent")),
    "codec": (plots.rate_distortion, _has("wire_bits_per_param")),
    "merge": (plots.merge_cost, _has("params_per_s")),
}
"""The picture of a bench, and the filter of its rows. Benches without an entry have no picture."""


def draw(result: ResultFile, folder: Path) -> Path | None:
    """Writes the picture as SVG and PNG; returns the SVG, None if there are no rows to draw.

    Raises ConfigError without matplotlib.
    """
    if result.bench not in PICTURES:
        return None
    picture, keep = PICTURES[result.bench]
    rows = [row for row in result.rows() if keep(row)]
    if not rows:
        return None
    path = folder / Path(result.file).with_suffix(".svg").name
    for suffix in SUFFIXES:
        picture(rows, path.with_suffix(suffix))
    return path
