"""Rules by which contributions become the next version; a round's record keeps its own. [pure]"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct, field

from narrows.broker.config import BrokerConfig


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


def policy_of(config: BrokerConfig) -> Policy:
    """Returns the policy that a configuration asks for."""
    merge, outer = config.merge, config.outer
    # Copied into every record, so that a later change of the configuration changes no history.
    return Policy(
        weights=merge.weights,
        merge_rule=merge.rule,
        clip_ratio=merge.clip_ratio,
        share_max=merge.share_max,
        optimizer=outer.optimizer,
        outer_lr=outer.lr,
        momentum=outer.momentum,
        is_rounded=config.broker.journal == "merged",
    )
