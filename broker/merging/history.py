"""The norms that the newest rounds of a fragment applied: the measure for the next round. [pure]

An entry is a round: its version, its contributors, and per piece the norm of each contribution
after clipping. A norm that was claimed and cut off never enters. The history is part of the merge's
state. It is stored with the fragment, and a replay makes it again bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from narrows.proto.codec import F32, F64

NORM_MIN: Final = 2.0**-100
"""A piece with a smaller norm counts as zero: dividing by it would overflow float32."""

VERSIONS_KEPT: Final = 8
"""Versions that the history looks back: short enough that norms which fall with the learning rate
do not leave a bound far above them."""

NAMES_KEPT: Final = 64
"""Contributors of one round that enter the history. So it takes 2 KiB per piece at most."""

NORMS_MIN: Final = 4
"""Norms of a piece without which its history is young."""

Process: TypeAlias = tuple[str, str]
"""Name and incarnation of a learner."""


@dataclass(frozen=True, eq=False)
class RoundNorms:
    """The applied norms of one round."""

    version: int
    """Version that the round made."""
    processes: tuple[Process, ...]
    """In name order."""
    norms: F32
    """(m, k) norms per contributor and piece."""

    def __post_init__(self) -> None:
        assert len(self.processes) == self.norms.shape[0], f"{self.norms.shape} norms"


@dataclass(frozen=True, eq=False)
class NormHistory:
    """The newest rounds of one fragment, oldest first; never changed in place."""

    rounds: tuple[RoundNorms, ...] = ()

    def medians(self, learners: Sequence[str], pieces: int) -> F64:
        """Running medians (k,) for a round of `learners`.

        Each is the lower median over names of the name's own lower median, so that a name counts
        once, however often it contributes. NaN where a piece's history is young, and everywhere for
        a learner that is alone: nobody else has contributed, so there is no measure for it. Norms
        that count as zero are left out.
        """
        by_name: dict[str, list[F32]] = {}
        for each in self.rounds:
            for (name, _), norms in zip(each.processes, each.norms, strict=True):
                by_name.setdefault(name, []).append(norms)
        medians = np.full(pieces, np.nan)
        if len(by_name.keys() | set(learners)) > 1 and by_name:
            found = [_lower_medians(np.array(by_name[name])) for name in sorted(by_name)]
            counts = sum(count for _, count in found)
            medians = _lower_medians(np.array([median for median, _ in found]))[0]
            medians[counts < NORMS_MIN] = np.nan
        assert medians.shape == (pieces,)
        return medians

    def after(self, version: int, processes: Sequence[Process], applied: F32) -> NormHistory:
        """The history with one more round, `applied` (M, k), in name order.

        A name that comes with a new process begins anew: its older norms go. Rounds of versions
        that are VERSIONS_KEPT old go too.
        """
        kept = _sample(len(processes))
        entry = RoundNorms(version, tuple(processes[i] for i in kept), _frozen(applied[kept]))
        current = dict(processes)
        rounds = (
            _without_older(each, current)
            for each in self.rounds
            if version - VERSIONS_KEPT < each.version < version
        )
        return NormHistory((*(each for each in rounds if each.processes), entry))


EMPTY: Final = NormHistory()
"""The history of a fragment of which nothing is known."""


def _lower_medians(norms: F64 | F32) -> tuple[F64, F64]:
    """Lower medians (k,) of the columns of (r, k) and their counts; NaN for an empty column."""
    positive = np.where(norms >= NORM_MIN, norms, np.nan).astype(np.float64)
    counts = np.count_nonzero(~np.isnan(positive), axis=0)
    ordered = np.sort(positive, axis=0)  # NaN comes last.
    middle = np.maximum(counts - 1, 0) // 2
    return ordered[middle, np.arange(norms.shape[1])], counts.astype(np.float64)


def _sample(count: int) -> list[int]:
    """Places of at most NAMES_KEPT contributors, spread evenly over all."""
    step = max(1.0, count / NAMES_KEPT)
    return [int(i * step) for i in range(min(count, NAMES_KEPT))]


def _without_older(entry: RoundNorms, current: dict[str, str]) -> RoundNorms:
    """The entry without names that have another process now."""
    kept = [
        i
        for i, (name, process) in enumerate(entry.processes)
        if current.get(name, process) == process
    ]
    if len(kept) == len(entry.processes):
        return entry
    processes = tuple(entry.processes[i] for i in kept)
    return RoundNorms(entry.version, processes, _frozen(entry.norms[kept]))


def _frozen(norms: F32) -> F32:
    norms.setflags(write=False)
    return norms
