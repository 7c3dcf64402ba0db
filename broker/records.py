"""The facts of a run and of its rounds, as syncer, merge and store hand them on: plain data.

Arrays are float32 (n,) of one fragment, and are never written to after they are made: a worker or
a snapshot may still read the old ones while the next version is made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from narrows.proto.messages import CodecName, Layout, Phase

if TYPE_CHECKING:  # The codec compiles with numba, and `narrows broker --help` must be quick.
    from narrows.proto.codec import F32, EncodedChunk


class Digests(NamedTuple):
    """Two-level digests of a fragment's three arrays."""

    global_: int
    momentum: int
    published: int

    def __str__(self) -> str:
        return " ".join(f"{each:016x}" for each in self)


@dataclass(frozen=True, eq=False)
class FragmentState:
    """One fragment at one version."""

    fragment: int
    version: int
    global_: F32
    """The model that users evaluate and export."""
    momentum: F32
    published: F32
    """The copy that every learner holds, bit for bit."""
    digests: Digests

    @classmethod
    def of(
        cls, fragment: int, version: int, global_: F32, momentum: F32, published: F32
    ) -> FragmentState:
        """Digests the arrays; on a worker, because a large fragment takes long."""
        from narrows.proto.codec import digest_of

        digests = Digests(digest_of(global_), digest_of(momentum), digest_of(published))
        return cls(fragment, version, global_, momentum, published, digests)


@dataclass(frozen=True)
class Policy:
    """The rules by which a round is merged; they stand in its row, so that it can be replayed."""

    weights: str = "tokens"
    """"tokens": tokens**2 / steps. "equal": every push the same."""
    rule: str = "layout"
    """"layout": per piece as the layout says (mean or RDA). "mean": the mean everywhere."""
    outer_lr: float = 0.4
    momentum: float = 0.6
    codec: CodecName = "int4-zstd"
    """Codec of the publication."""
    rho: float = 0.5
    chunk_elements: int = 1 << 18
    """Elements of a chunk of the publication."""

    def of_last_round(self) -> Policy:
        """The plain mean of what the learners have. Momentum and the radial length pay off in later
        rounds, and there are none: without them a final model has 0.2% less loss."""
        return replace(self, rule="mean", outer_lr=1.0, momentum=0.0)


def finite(loss: float | None) -> float | None:
    """A loss that JSON and a database can hold; None: it is NaN or infinite, or was not told."""
    return loss if loss is not None and math.isfinite(loss) else None


@dataclass(frozen=True)
class Contribution:
    """A complete push."""

    learner: str
    incarnation: str
    push_id: int
    base: int
    tokens: int
    steps: int
    codec: CodecName
    chunk_elements: int
    """Elements of its chunks: those of the epoch in which it was pushed."""
    chunks: tuple[bytes, ...] = ()
    """Its payloads as they travelled; none where only the facts of the push are needed."""
    loss: float | None = None
    """Mean training loss of its steps; None: its learner told none."""

    @property
    def order(self) -> tuple[str, str]:
        """Sums run in this order, and so do rows and payloads: a round is sorted once, when it is
        made."""
        return self.learner, self.incarnation


class NotFinite(FloatingPointError):
    """The merge of a round would make a value infinite or NaN."""

    def __init__(self, text: str, longest: Contribution) -> None:
        super().__init__(text)
        self.longest = replace(longest, chunks=())
        """The facts of the push that is to blame, as far as arithmetic can tell."""


@dataclass(frozen=True)
class Round:
    """One outer step of one fragment, as it was decided: the input of a merge."""

    fragment: int
    version: int
    """The version that it makes."""
    contributions: tuple[Contribution, ...]
    policy: Policy
    period_s: float = 0.0
    """Seconds between two rounds of a fragment; a start has a pace at once."""
    reason: str = ""
    """Why it was merged now: "everybody", "window", "last"."""


@dataclass(frozen=True, eq=False)
class Version:
    """The result of a merge; it exists once its round is durable."""

    round_: Round
    state: FragmentState
    weights: tuple[float, ...]
    """Normalised weight of each contribution."""
    publication: tuple[EncodedChunk, ...] = field(repr=False, default=())
    """`global - published before`, coded; decoded it is the step to the next published copy."""
    norms: tuple[float, ...] = ()
    """Norm of each contribution, for the alarm."""


@dataclass(frozen=True)
class RunRow:
    """Facts of a whole run."""

    run_id: str
    phase: Phase
    clock: int
    """Tokens of all merged pushes, summed over fragments."""
    fragments: int
    """P; 0 before version 0."""
    layout: Layout | None
    """None before version 0."""


@dataclass(frozen=True)
class Recovered(RunRow):
    """All that a life of the broker begins with."""

    life: int
    heads: tuple[int, ...]
    """Newest durable version of each fragment; empty before version 0."""
    period_s: float
    """Period of the newest round; 0: none."""
    merged: Mapping[tuple[str, int], int]
    """(incarnation, fragment) -> newest merged push id; what was merged last stands last."""
    merged_tokens: Mapping[str, int]
    """Incarnation -> tokens of its merged pushes, summed over fragments."""
    states: tuple[FragmentState, ...] = ()
    """Newest whole snapshot of each fragment, empty before version 0: `Store.replay` goes on."""
    notes: tuple[str, ...] = ()
    """Lines that an operator should read: each tells of damage that was got over."""
