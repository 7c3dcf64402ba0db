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
from narrows.proto.codec import F32, F64, float_square_sums
from narrows.proto.fragments import Fragment

KEPT_MIN: Final = 0.5
"""Share of its length that a contribution keeps. Below, it counts as clipped: chance takes a few
percent off a few pieces, the more pieces there are the more often."""

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
    if len(contributions) > 1:
        cosines = _cosines(fragment, contributions, total, factors, norms)
    return tuple(
        PushEvidence(each.learner, bool(flag), cosine)
        for each, flag, cosine in zip(contributions, is_clipped, cosines, strict=True)
    )


def _cosines(
    fragment: Fragment,
    contributions: Sequence[DecodedVector],
    total: F32,
    factors: F64,
    norms: F64,
) -> list[float | None]:
    """Cosine of each contribution s to the sum of the others, total - s.

    From three on, the one that disagrees most is left out of the others' sums: it would turn them.
    """
    own = ((factors * norms) ** 2).sum(axis=0)
    products = (factors * dots(fragment, contributions, total)).sum(axis=0)
    whole = float(float_square_sums(total, fragment.bounds).sum())
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


def _alone(fragment: Fragment, contribution: DecodedVector, factors: F64) -> F32:
    """One contribution times its factors (k, 1), (n,)."""
    return weighted_sums(fragment, [contribution], factors, np.zeros_like(factors))[0]


def _cosine(product: float, square: float, others: float) -> float | None:
    """Cosine from a product and two square sums; None if one of both has no direction."""
    if not (square > 0.0 and others > OTHERS_MIN * square):
        return None
    cosine = product / math.sqrt(others * square)
    return max(-1.0, min(1.0, cosine)) if math.isfinite(cosine) else None
