"""Goodput as Decoupled DiLoCo publishes it (arXiv 2604.21428, Table 1 and the text around it)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

CHIPS: Final = (150_000, 300_000, 600_000, 1_200_000, 2_400_000)

CHIP_FAILURE_S: Final = 365.25 * 86_400
"""Mean time between two interruptions of one chip: one year, "aggressive"."""

DATA_PARALLEL_PERCENT: Final = (72, 57, 38, 27, 18)
ELASTIC_PERCENT: Final = (88, 80, 69, 58, 40)
"""Goodput by `CHIPS`, with the global batch stopped by every failure, and reconfiguring."""

DECOUPLED_PERCENT: Final[Mapping[int, Sequence[int]]] = {
    2: (94, 88, 80, 70, 54),
    4: (96, 93, 89, 82, 73),
    8: (98, 96, 94, 88, 80),
    16: (99, 98, 96, 93, 86),
}
"""Goodput by `CHIPS` of as many equal learners as the key says, elastic inside."""

LEARNERS: Final = tuple(DECOUPLED_PERCENT)

PREDICTED: Final = 2
"""The learners of the row that no constant is fitted to."""


class Place(NamedTuple):
    """One cell of the table."""

    method: str
    learners: int
    chips: int


def published_percent() -> Mapping[Place, float]:
    """Goodput of every cell of the table."""
    rows: list[tuple[str, int, Sequence[int]]] = [
        ("data_parallel", 1, DATA_PARALLEL_PERCENT),
        ("elastic", 1, ELASTIC_PERCENT),
        *(("decoupled", learners, row) for learners, row in DECOUPLED_PERCENT.items()),
    ]
    return {
        Place(method, learners, chips): float(percent)
        for method, learners, row in rows
        for chips, percent in zip(CHIPS, row, strict=True)
    }


SCAVENGING_TIMES: Final[Mapping[int, float]] = {0: 1.0, 25: 0.9, 50: 0.83, 100: 0.75, 300: 0.62}
"""Training time relative to four learners by percent of compute added part of the time (one
derivative source; how long it is there is not known)."""
