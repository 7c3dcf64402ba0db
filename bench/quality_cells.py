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
EIGHT: Final = "1:1:1:1:1:1:1:1"

MIXES: Final = (
    (FOUR, "nobody"),
    (FOUR, "one"),
    (FOUR, "each"),
    ("4:1", "nobody"),
    ("10:1", "nobody"),
    ("10:1:1", "nobody"),
)
"""Speeds and the dead. The equal learners stand beside the unequal ones."""
MIXED_BATCHES: Final = 2400
"""Batches of all learners together, in each of these cells."""

SEARCH_FIRST_SEED: Final = 101
"""Cells that choose a setting have seeds from here on, and none that is reported."""
REPORT_FIRST_SEED: Final = 201
"""Cells that are reported have seeds from here on."""

SEARCHED_BETA1: Final = (0.6, 0.7, 0.8, 0.9, 0.95)
SEARCHED_PEAKS: Final = (0.75, 1.0, 1.5)
LENGTHS: Final = (1000, 3000)
"""Steps of the runs that were searched."""
RIVAL_BETA1: Final = 0.7
"""Data parallel's best beta1 at both lengths, as its search found it. The best peak was the
preset's."""
HANDOVER: Final = 0.5
"""The hand-over that is measured beside none."""


@dataclass(frozen=True)
class QualityCell:
    """A setting, run once for each seed."""

    speeds: str
    """Steps of each learner in the same time: "10:1:1" are three, the first ten times as fast."""
    keep: float = 0.5
    dead: str = "nobody"
    """Learners that are killed again and again, and dead half of the time: nobody, one, or each in
    turn. "late" is one that joins after a quarter of the run."""
    steps: int = 1000
    """Steps of all learners together, each of a batch from everybody: what data parallel makes."""
    seeds: int = 8
    preset: str = "nano"
    peak: float = 1.0
    """Peak learning rate, in units of the preset's."""
    beta1: float = 0.8
    """Adam's decay of the first moment."""
    beta2: float = 0.95
    """Adam's decay of the second moment."""
    outer_lr: float = 0.4
    """`merge.outer_lr`."""
    outer_momentum: float = 0.6
    """`merge.outer_momentum`."""
    handover: float = 0.0
    """`fragments.handover`: share of Adam's first moment that an adoption rebuilds."""
    first_seed: int = REPORT_FIRST_SEED
    """Seeds that choose a setting are not those that judge it."""

    @property
    def seed_numbers(self) -> range:
        return range(self.first_seed, self.first_seed + self.seeds)

    @property
    def learners(self) -> int:
        return self.speeds.count(":") + 1


def rival(cell: QualityCell) -> QualityCell:
    """Data parallel beside a cell, with the best settings of its search."""
    return QualityCell(
        ":".join("1" * cell.learners),
        steps=cell.steps,
        seeds=cell.seeds,
        preset=cell.preset,
        beta1=RIVAL_BETA1,
        beta2=cell.beta2,
        first_seed=cell.first_seed,
    )


def searched_cells(seeds: int) -> list[QualityCell]:
    """The search of data parallel's own settings, at two lengths."""
    settings = product(LENGTHS, SEARCHED_BETA1, SEARCHED_PEAKS)
    return [
        QualityCell(
            FOUR, steps=steps, seeds=seeds, peak=peak, beta1=beta1, first_seed=SEARCH_FIRST_SEED
        )
        for steps, beta1, peak in settings
    ]


def site_cells(seeds: int) -> list[QualityCell]:
    """Two, four and eight equal sites, at two lengths; with the hand-over, without, and with
    the settings that suit short runs."""
    cells = []
    for steps, speeds in product(LENGTHS, (TWO, FOUR, EIGHT)):
        plain = QualityCell(speeds, steps=steps, seeds=seeds)
        quick = replace(plain, beta1=0.7, outer_lr=0.5, outer_momentum=0.7)
        cells += [plain, replace(plain, handover=HANDOVER), quick]
    return cells


def mixed_cells(seeds: int) -> list[QualityCell]:
    """MIXES and newcomers; with the hand-over, and without."""
    cells = [
        QualityCell(speeds, dead=dead, steps=MIXED_BATCHES // (speeds.count(":") + 1), seeds=seeds)
        for speeds, dead in MIXES
    ]
    cells += [QualityCell(FOUR, dead="late", beta2=beta2, seeds=seeds) for beta2 in (0.95, 0.999)]
    return [each for cell in cells for each in (cell, replace(cell, handover=HANDOVER))]
