"""Weights of contributions: by tokens or equal, no share above a limit. [pure]

Source: Decoupled DiLoCo (arXiv 2604.21428), Sec. 3.2. The largest share is an addition.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Literal

from narrows.proto.errors import ErrorCode, LocalProtocolError

CLIP_CONTRIBUTORS_MIN: Final = 3
"""Contributors from which on shares are limited and norms are compared within one round: of two
that differ, nobody can say which is the outlier."""


def token_weights(
    tokens_steps: Sequence[tuple[int, int]],
    *,
    rule: Literal["tokens", "equal"],
    share_max: float = 0.5,
) -> list[float]:
    """Weights of contributions with these (tokens, inner steps); they sum to 1.

    Rule "tokens" gives tokens * tokens / steps, "quantity times quality" (Sec. 3.2). With three or
    more contributors no share exceeds `share_max`: the excess goes to the others in proportion. A
    `share_max` below 1 / M cannot hold, and then all shares are equal. Raises LocalProtocolError
    MISUSE for an empty list and for counts that are not positive.
    """
    if not tokens_steps or min(map(min, tokens_steps)) < 1:
        raise LocalProtocolError(
            ErrorCode.MISUSE, "token weights", expected="counts above 0", got=str(tokens_steps)
        )
    if rule == "equal":
        return [1.0 / len(tokens_steps)] * len(tokens_steps)
    raw = [tokens * tokens / steps for tokens, steps in tokens_steps]
    total = math.fsum(raw)
    weights = [value / total for value in raw]
    weights = weights if len(weights) < CLIP_CONTRIBUTORS_MIN else _limited(weights, share_max)
    assert min(weights) > -1e-9 and abs(math.fsum(weights) - 1.0) < 1e-9, "shares sum to 1"
    return weights


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
