"""Goodput as Decoupled DiLoCo publishes it (arXiv 2604.21428, Table 1 and the text around it).

Only the two rows of data parallel calibrate our model; one cell of the decoupled rows is known
and is a check. The other cells have never been seen by whoever wrote the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

CHIPS: Final = (150_000, 300_000, 600_000, 1_200_000, 2_400_000)
LEARNERS: Final = (2, 4, 8, 16)

CHIP_FAILURE_S: Final = 365.25 * 86_400
"""Mean time between two interruptions of one chip: one year, "aggressive"."""

DATA_PARALLEL_PERCENT: Final = (72, 57, 38, 27, 18)
ELASTIC_PERCENT: Final = (88, 80, 69, 58, 40)
"""Goodput by `CHIPS`, with the global batch stopped by every failure, and reconfiguring."""

TOLERANCE_POINTS: Final = 2.0
"""How far the calibrated model may be from any cell of these two rows."""


class Place(NamedTuple):
    """One cell of the table."""

    method: str
    learners: int
    chips: int


def published_percent() -> Mapping[Place, float]:
    """Goodput of every cell that is known."""
    known = {
        Place(method, 1, chips): float(percent)
        for method, row in (("data_parallel", DATA_PARALLEL_PERCENT), ("elastic", ELASTIC_PERCENT))
        for chips, percent in zip(CHIPS, row, strict=True)
    }
    return known | {Place("decoupled", 8, 1_200_000): 88.0}


SCAVENGING_TIMES: Final[Mapping[int, float]] = {0: 1.0, 25: 0.9, 50: 0.83, 100: 0.75, 300: 0.62}
"""Training time relative to four learners by percent of compute added part of the time (one
derivative source; how long it is there is not known)."""
