"""The cells of `narrows bench quality`.

They have a module of their own because the bench, which does without PyTorch, and `trained`, which
loads it, both need them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Final

TWO: Final = "1:1"
FOUR: Final = "1:1:1:1"

UNEQUAL: Final = (
    (FOUR, "nobody"),
    (FOUR, "one"),
    ("4:1", "nobody"),
    ("10:1", "nobody"),
    ("10:1:1", "nobody"),
    ("1", "nobody"),
)
"""Speeds and the dead. The equal learners stand beside the unequal ones; the lone fast learner is
last."""
UNEQUAL_BATCHES: Final = 2400
"""Batches of all learners together, in each of these cells."""


SEARCH_FIRST_SEED: Final = 101
"""Cells that choose a setting have seeds from here on, and none that is reported."""


@dataclass(frozen=True)
class QualityCell:
    """A setting, run once for each seed."""

    speeds: str
    """Steps of each learner in the same time: "10:1:1" are three, the first ten times as fast."""
    keep: float = 0.5
    dead: str = "nobody"
    """Learners that are killed again and again, and dead half of the time: nobody, one, or each in
    turn."""
    steps: int = 1000
    """Steps of all learners together, each of a batch from everybody: what data parallel makes."""
    seeds: int = 6
    preset: str = "nano"
    peak: float = 1.0
    """Peak learning rate, in units of the preset's."""
    beta1: float = 0.9
    """Adam's decay of the first moment."""
    handover: float = 0.0
    """Share of the first moments that an adoption replaces by the published movement."""
    first_seed: int = 1
    """Seeds that choose a setting are not those that judge it."""

    @property
    def seed_numbers(self) -> range:
        return range(self.first_seed, self.first_seed + self.seeds)

    @property
    def learners(self) -> int:
        return self.speeds.count(":") + 1


def equal_cells(seeds: int) -> list[QualityCell]:
    """Learners of one speed: two or four, calm or each dead half of the time, and longer runs."""
    cells = [
        QualityCell(speeds, keep, dead, seeds=seeds)
        for speeds in (TWO, FOUR)
        for dead in ("nobody", "each")
        for keep in (0.5, 0.7)
    ]
    cells += [QualityCell(FOUR, keep, steps=3000, seeds=seeds) for keep in (0.5, 0.7)]
    return [*cells, QualityCell(FOUR, dead="one", seeds=seeds)]


def searched_cells(seeds: int) -> list[QualityCell]:
    """The search of data parallel's own settings: beta1 by peak, at two lengths."""
    settings = product((1000, 3000), (0.8, 0.9, 0.95), (0.75, 1.0, 1.5))
    return [
        QualityCell(
            FOUR, steps=steps, seeds=seeds, peak=peak, beta1=beta1, first_seed=SEARCH_FIRST_SEED
        )
        for steps, beta1, peak in settings
    ]


def unequal_cells(seeds: int) -> list[QualityCell]:
    """The mixes of UNEQUAL."""
    mixes = [QualityCell(speeds, dead=dead, seeds=seeds) for speeds, dead in UNEQUAL]
    return [replace(each, steps=UNEQUAL_BATCHES // each.learners) for each in mixes]
