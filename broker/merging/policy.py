"""Rules by which contributions become the next version; a round's record keeps its own. [pure]"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct, field

from narrows.broker.config import BrokerConfig
from narrows.broker.merging.merge import Robust


class Policy(Struct, frozen=True, forbid_unknown_fields=True):
    """How contributions become the next version; names as in the configuration."""

    weights: Literal["tokens", "equal"]
    merge_rule: Literal["layout", "mean"] = field(name="law")
    """Called `law` in records."""
    clip_ratio: float
    share_max: float
    optimizer: str
    outer_lr: float = field(name="rate")
    """Called `rate` in records."""
    momentum: float
    is_rounded: bool
    """The merged outer gradient is rounded to bfloat16 before the outer step."""
    norm_limit: float = 0.0
    """0 in records of releases that knew no history."""
    robust: Robust = "off"


def policy_of(config: BrokerConfig, *, organisations: int = 1) -> Policy:
    """Returns the policy that a configuration asks for in a run of so many organisations.

    Tokens are what a learner says of itself. So several organisations weigh alike by default. The
    trimmed mean knows no weights.
    """
    merge, outer = config.merge, config.outer
    weights: Literal["tokens", "equal"] = "tokens" if merge.weights == "tokens" else "equal"
    if merge.weights == "auto" and organisations == 1:
        weights = "tokens"
    if merge.robust == "trimmed":
        weights = "equal"
    # Copied into every record, so that a later change of the configuration changes no history.
    return Policy(
        weights=weights,
        merge_rule=merge.rule,
        clip_ratio=merge.clip_ratio,
        share_max=merge.share_max,
        optimizer=outer.optimizer,
        outer_lr=outer.lr,
        momentum=outer.momentum,
        is_rounded=config.broker.journal == "merged",
        norm_limit=merge.norm_limit,
        robust=merge.robust,
    )
