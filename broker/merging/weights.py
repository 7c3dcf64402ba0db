"""Weights of contributions: by tokens or equal, no share above a limit. [pure]

Source: Decoupled DiLoCo (arXiv 2604.21428), Sec. 3.2. The limits are additions: tokens and steps
are what a learner says of itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median_low
from typing import Final, Literal

from narrows.proto.errors import ErrorCode, LocalProtocolError

CLIP_CONTRIBUTORS_MIN: Final = 3
"""Contributors from which on shares are limited and norms are compared within one round: of two
that differ, nobody can say which is the outlier."""

WORK_RATIO_MAX: Final = 2.0
"""Tokens, and tokens per step, count up to this multiple of their lower median in the round."""

SHARE_RATIO_MAX: Final = 2.0
"""The largest share, in units of an equal one."""

SHARE_MAX: Final = 1.0 / 3.0
"""The largest share of any. So a liar at a norm bound of 1.5 has at most what one of three equal
ones has: a half against the two thirds of the others."""


def token_weights(
    tokens_steps: Sequence[tuple[int, int]],
    *,
    rule: Literal["tokens", "equal"],
    share_max: float = 0.0,
) -> list[float]:
    """Weights of contributions with these (tokens, inner steps); they sum to 1.

    Rule "tokens" gives tokens * (tokens / steps), "quantity times quality" (Sec. 3.2). Each of the
    two factors is limited to WORK_RATIO_MAX times its lower median in the round. With three or more
    contributors no share exceeds `share_max`, or where that is 0 the least of SHARE_MAX and
    SHARE_RATIO_MAX / M: the excess goes to the others in proportion. A limit of 1 / M or less
    cannot hold, and then all shares are equal.

    Raises LocalProtocolError MISUSE for an empty list and for counts that are not positive.
    """
    if not tokens_steps or min(map(min, tokens_steps)) < 1:
        raise LocalProtocolError(
            ErrorCode.MISUSE, "token weights", expected="counts above 0", got=str(tokens_steps)
        )
    count = len(tokens_steps)
    if rule == "equal":
        return [1.0 / count] * count
    quantity = _near_the_median([float(tokens) for tokens, _ in tokens_steps])
    quality = _near_the_median([tokens / steps for tokens, steps in tokens_steps])
    raw = [much * good for much, good in zip(quantity, quality, strict=True)]
    total = math.fsum(raw)
    weights = [value / total for value in raw]
    if count >= CLIP_CONTRIBUTORS_MIN:
        weights = _limited(weights, share_max or min(SHARE_MAX, SHARE_RATIO_MAX / count))
    assert min(weights) > -1e-9 and abs(math.fsum(weights) - 1.0) < 1e-9, "shares sum to 1"
    return weights


def _near_the_median(values: list[float]) -> list[float]:
    """The values, no one above WORK_RATIO_MAX times their lower median: a minority that claims
    much cannot raise it."""
    limit = WORK_RATIO_MAX * median_low(values)
    return [min(value, limit) for value in values]


def _limited(weights: list[float], share_max: float) -> list[float]:
    """Brings every share down to `share_max`; the others grow in proportion."""
    if share_max * len(weights) <= 1.0:
        return [1.0 / len(weights)] * len(weights)
    full: set[int] = set()
    # Every pass that changes something adds to `full`, and not all of them fit into it.
    while over := {i for i, weight in enumerate(weights) if weight > share_max} - full:
        full |= over
        rest = math.fsum(weight for i, weight in enumerate(weights) if i not in full)
        growth = (1.0 - share_max * len(full)) / rest
        weights = [share_max if i in full else w * growth for i, w in enumerate(weights)]
    return weights
