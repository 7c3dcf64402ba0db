"""The norms that the newest rounds of a fragment applied: the measure for the next round. [pure]

An entry is a round: its version, its contributors, and per piece the norm of each contribution
after clipping. A norm that was claimed and cut off never enters. Of a name that is away its newest
norms stay for longer, so that those who are left are not their own only measure. The history is
part of the merge's state. It is stored with the fragment, and a replay makes it again bit for bit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from narrows.proto.codec import F32, F64

NORM_MIN: Final = 2.0**-100
"""A piece with a smaller norm counts as zero: dividing by it would overflow float32."""

VERSIONS_KEPT: Final = 8
"""Versions that the history looks back: short enough that norms which fall with the learning rate
do not leave a bound far above them."""

VERSIONS_REMEMBERED: Final = 64
"""Versions for which the newest norms of a name that is away stay. For ever would be too long: the
norms of one that left in the warm-up would hold a whole run down."""

NAMES_KEPT: Final = 64
"""Contributors of one round that enter the history, and names that are away and remembered."""

ROWS_MAX: Final = (VERSIONS_KEPT + 1) * NAMES_KEPT
"""Most rows of norms in a history. So it takes 2.25 KiB per piece at most."""

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
class Measure:
    """The measure that a history gives to the norms of one round."""

    medians: F64
    """(k,) running medians, NaN where they are unknown."""
    is_alone: bool = False
    """One learner contributes, and nobody else has to the versions that the history looks back."""
    absent: int = 0
    """Names of these versions that do not contribute now."""


@dataclass(frozen=True, eq=False)
class NormHistory:
    """The newest rounds of one fragment, oldest first; never changed in place."""

    rounds: tuple[RoundNorms, ...] = ()

    def measure(self, learners: Sequence[str], pieces: int) -> Measure:
        """The measure for a round of `learners`.

        A running median is the lower median over names of the name's own lower median, so that a
        name counts once, however often it contributes. Names that are away count only while fewer
        than two others are there. Norms that count as zero are left out. A median is unknown where
        a piece has too few norms, and where all are of one name and others contribute now: its word
        is no measure for them.
        """
        newest = self.rounds[-1].version if self.rounds else 0
        recent = _by_name(each for each in self.rounds if newest - each.version < VERSIONS_KEPT)
        names = recent.keys() | set(learners)
        by_name = recent if len(recent) > 1 else _by_name(self.rounds)
        is_alone, is_shared = len(names) == 1, len(by_name) > 1
        medians = np.full(pieces, np.nan)
        if by_name and (is_shared or len(learners) == 1):
            found = [_lower_medians(np.array(by_name[name])) for name in sorted(by_name)]
            counts = sum(count for _, count in found)
            medians = _lower_medians(np.array([median for median, _ in found]))[0]
            # Few norms of one that is away are better than none: a restart forgets one's own.
            medians[counts < (1 if is_alone and is_shared else NORMS_MIN)] = np.nan
        assert medians.shape == (pieces,)
        return Measure(medians, is_alone, len(names) - len(learners))

    def after(self, version: int, processes: Sequence[Process], applied: F32) -> NormHistory:
        """The history with one more round, `applied` (M, k), in name order.

        A name that comes with a new process begins anew: its older norms go. Rounds of versions
        that are VERSIONS_KEPT old go too, but for the newest norms of each name that is away.
        """
        kept = _sample(len(processes))
        entry = RoundNorms(version, tuple(processes[i] for i in kept), _frozen(applied[kept]))
        current, oldest = dict(processes), version - VERSIONS_KEPT + 1
        rounds = [_without_older(e, current) for e in self.rounds if e.version < version]
        recent = [*(each for each in rounds if each.version >= oldest), entry]
        heard = {name for each in recent for name, _ in each.processes}
        remembered = list[RoundNorms]()
        for each in reversed(rounds):
            if version - VERSIONS_REMEMBERED < each.version < oldest:
                remembered.append(_newest_of(each, heard, NAMES_KEPT - _rows(remembered)))
                heard |= {name for name, _ in each.processes}
        return NormHistory(tuple(e for e in (*reversed(remembered), *recent) if e.processes))


EMPTY: Final = NormHistory()
"""The history of a fragment of which nothing is known."""


def _by_name(rounds: Iterable[RoundNorms]) -> dict[str, list[F32]]:
    """Rows of norms (k,) by the name that they are of."""
    found: dict[str, list[F32]] = {}
    for each in rounds:
        for (name, _), norms in zip(each.processes, each.norms, strict=True):
            found.setdefault(name, []).append(norms)
    return found


def _rows(rounds: Sequence[RoundNorms]) -> int:
    return sum(len(each.processes) for each in rounds)


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


def _without_older(entry: RoundNorms, current: Mapping[str, str]) -> RoundNorms:
    """The entry without names that have another process now."""
    kept = [
        i
        for i, (name, process) in enumerate(entry.processes)
        if current.get(name, process) == process
    ]
    return _with(entry, kept)


def _newest_of(entry: RoundNorms, heard: Collection[str], most: int) -> RoundNorms:
    """The entry with names that nothing newer is known of, `most` of them."""
    kept = [i for i, (name, _) in enumerate(entry.processes) if name not in heard]
    return _with(entry, kept[:most])


def _with(entry: RoundNorms, kept: list[int]) -> RoundNorms:
    """The entry with the contributors at these places."""
    if len(kept) == len(entry.processes):
        return entry
    processes = tuple(entry.processes[i] for i in kept)
    return RoundNorms(entry.version, processes, _frozen(entry.norms[kept]))


def _frozen(norms: F32) -> F32:
    norms.setflags(write=False)
    return norms
