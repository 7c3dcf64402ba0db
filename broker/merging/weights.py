"""Weights of contributions: tokens times tokens per step, or equal.

Source: Decoupled DiLoCo (arXiv 2604.21428), Sec. 3.2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def token_weights(work: Sequence[tuple[int, int]], rule: str) -> tuple[float, ...]:
    """Weights of contributions of so many (tokens, inner steps), in their order; they sum to 1.

    Rule "tokens" gives tokens * (tokens / steps), "quantity times quality", and "equal" the same to
    each. No weight is limited: a limit would take from the larger site what it has trained. A
    learner that logs no tokens weighs nothing beside one that does, and among themselves such
    learners weigh the same.
    """
    assert work, "a round has contributions"
    assert all(tokens >= 0 and steps >= 1 for tokens, steps in work), work
    raw = [float(tokens) * (tokens / steps) for tokens, steps in work]
    total = math.fsum(raw)
    if rule == "equal" or total == 0.0:
        return (1.0 / len(work),) * len(work)
    assert rule == "tokens", rule
    return tuple(value / total for value in raw)
