"""Evidence about each contribution: what the bound took off, and where it points. [pure]

It changes no version. It is journalled with the round, and `watch` judges names by it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from narrows.broker.merging.sums import DecodedVector, dots, weighted_sums
from narrows.proto.codec import F32, F64, digest_of, float_square_sums
from narrows.proto.fragments import Fragment

KEPT_MIN: Final = 0.5
"""Share of its length that a contribution keeps. Below, it counts as clipped: chance takes a few
percent off a few pieces, the more pieces there are the more often."""

CHUNKS_SAMPLED: Final = 4
"""Chunks that cosines are measured on, at least: all of them would double the time of a merge."""

NOISE_DEVIATIONS: Final = 2.0
"""A cosine of no more than so many times 1 / sqrt(elements) is that of noise."""

OTHERS_MIN: Final = 1e-6
"""Least square sum of the others, in units of one's own: below, it is mostly rounding."""


@dataclass(frozen=True)
class PushEvidence:
    """Evidence about one contribution in one round."""

    learner: str
    is_clipped: bool = False
    """The bound took more than 1 - KEPT_MIN of its length."""
    cosine: float | None = None
    """Cosine to the sum of the others, as they were applied, from three contributors on without the
    one that disagrees most. None: there are no others, or one of both has no direction."""
    is_noise: bool = False
    """The cosine is no larger than that of a random direction."""


def evidence_of(
    fragment: Fragment,
    contributions: Sequence[DecodedVector],
    total: F32,
    factors: F64,
    norms: F64,
    applied: F64,
) -> tuple[PushEvidence, ...]:
    """Evidence per contribution, in name order.

    `total` (n,) is the sum of the contributions v times `factors` (k, M). `norms` (k, M) are
    claimed, `applied` (k, M) are left after clipping.
    """
    kept = np.sqrt((applied * applied).sum(axis=0))
    claimed = np.sqrt((norms * norms).sum(axis=0))
    is_clipped = kept < KEPT_MIN * claimed
    cosines: list[float | None] = [None] * len(contributions)
    noise = 0.0
    if len(contributions) > 1:
        sample = _sample(contributions, total)
        cosines = _cosines(fragment, sample, total, factors)
        noise = NOISE_DEVIATIONS / math.sqrt(sum(chunk.count for _, chunk in sample[0].chunks))
    return tuple(
        PushEvidence(each.learner, bool(flag), cosine, cosine is not None and abs(cosine) < noise)
        for each, flag, cosine in zip(contributions, is_clipped, cosines, strict=True)
    )


def _sample(contributions: Sequence[DecodedVector], total: F32) -> list[DecodedVector]:
    """The contributions with some of their chunks, the same ones of all; all if they differ.

    Which ones follows from the bits of the sum, so that nobody knows before all pushes are in.
    """
    cuts = [[(offset, chunk.count) for offset, chunk in each.chunks] for each in contributions]
    step = len(cuts[0]) // CHUNKS_SAMPLED
    if step < 2 or any(cut != cuts[0] for cut in cuts):
        return list(contributions)
    first = digest_of(total[: cuts[0][0][1]]) % step
    return [DecodedVector(each.learner, each.chunks[first::step]) for each in contributions]


def _cosines(
    fragment: Fragment, contributions: Sequence[DecodedVector], total: F32, factors: F64
) -> list[float | None]:
    """Cosine of each contribution s to the sum of the others, total - s.

    From three on, the one that disagrees most is left out of the others' sums: it would turn them.
    """
    own, whole = _square_sums(fragment, contributions, total, factors)
    products = (factors * dots(fragment, contributions, total)).sum(axis=0)
    cosines = [
        _cosine(product - square, square, whole - 2.0 * product + square)
        for product, square in zip(products.tolist(), own.tolist(), strict=True)
    ]
    if len(cosines) == 2:  # One angle; a contribution that outweighs the other measures it badly.
        return [next((each for each in cosines if each is not None), None)] * 2
    known = [(cosine, place) for place, cosine in enumerate(cosines) if cosine is not None]
    if not known:
        return cosines
    worst = min(known)[1]
    alone = _alone(fragment, contributions[worst], factors[:, worst : worst + 1])
    common = (factors * dots(fragment, contributions, alone)).sum(axis=0)
    for i in set(range(len(cosines))) - {worst}:
        others = whole - 2.0 * (products[i] + products[worst] - common[i]) + own[i] + own[worst]
        cosines[i] = _cosine(float(products[i] - own[i] - common[i]), float(own[i]), float(others))
    return cosines


def _square_sums(
    fragment: Fragment, contributions: Sequence[DecodedVector], total: F32, factors: F64
) -> tuple[F64, float]:
    """Square sums (M,) of the contributions times `factors` (k, M), and that of `total`."""
    own, whole = np.zeros(len(contributions)), 0.0
    for column, each in enumerate(contributions):
        for offset, chunk in each.chunks:
            touched = fragment.pieces_of(offset, chunk.count)
            factor = factors[touched.start : touched.stop, column]
            own[column] += float((factor * factor * chunk.square_sums()).sum())
    for offset, chunk in contributions[0].chunks:
        part = total[offset : offset + chunk.count]
        whole += float(float_square_sums(part, fragment.spans(offset, chunk.count)).sum())
    return own, whole


def _alone(fragment: Fragment, contribution: DecodedVector, factors: F64) -> F32:
    """One contribution times its factors (k, 1), (n,)."""
    return weighted_sums(fragment, [contribution], factors, np.zeros_like(factors))[0]


def _cosine(product: float, square: float, others: float) -> float | None:
    """Cosine from a product and two square sums; None if one of both has no direction."""
    if not (square > 0.0 and others > OTHERS_MIN * square):
        return None
    cosine = product / math.sqrt(others * square)
    return max(-1.0, min(1.0, cosine)) if math.isfinite(cosine) else None
