"""The settings of a merge: when rounds are merged, how, and whom the broker suspects. [pure]"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from narrows.proto.config import Range, Section
from narrows.proto.errors import ConfigError
from narrows.proto.limits import LEARNERS_MAX
from narrows.proto.units import Amount, Duration


@dataclass(frozen=True)
class MergeSection(Section):
    """[merge] When a round is merged and how."""

    quorum: Annotated[int, Range(1, LEARNERS_MAX)] = 1
    """K, contributions without which a round is not merged. 1 keeps the run going whatever
    happens, and with the waits below it merges one learner alone only if nobody else is near."""
    grace_fraction: Annotated[float, Range(0, 1)] = 0.9
    """gamma, share of the slack that the overlap leaves which is spent waiting after quorum."""
    grace_max: Duration = 30.0
    """Longest grace window, a duration."""
    wait_fraction: Annotated[float, Range(0, 1)] = 0.25
    """Longest wait after quorum for pushes that are predicted to arrive, in units of H inner steps.
    Nobody is blocked by it; 0 merges slow learners rarely, 1 delays every adoption."""
    weights: Literal["auto", "tokens", "equal"] = "auto"
    """tokens: tokens^2 / steps (Decoupled DiLoCo, arXiv 2604.21428, Sec. 3.2), up to twice what is
    usual in the round. equal: 1 / M. auto: tokens without keys, and with keys while all learners'
    keys name one organisation; else equal."""
    tokens_per_s_max: Annotated[Amount, Range(0, 10**18)] = 0
    """Tokens/s of a learner that count, in the clock and its weight. 0: from what is usual."""
    rule: Literal["layout", "mean"] = "layout"
    """layout: radial-directional or mean, as the layout says per tensor. mean: always mean."""
    norm_limit: Annotated[float, Range(0, 1000)] = 1.5
    """Norms are clipped to this multiple of their running median, per tensor piece, and what was
    clipped weighs less. At least 1; 0: never."""
    clip_ratio: Annotated[float, Range(0, 1000)] = 3.0
    """The bound while that history is young: from three contributors on, norms are clipped to this
    multiple of their median in the round. At least 1; 0: never."""
    robust: Literal["off", "trimmed", "centered"] = "off"
    """Average from three contributors on. off: by `rule`. trimmed: mean per element without largest
    and smallest values, unweighted. centered: mean clipped around the outer momentum (Karimireddy,
    He, Jaggi 2021)."""
    quarantine: Literal["alert", "exclude"] = "alert"
    """For a learner that is clipped, or points away from the others, in 8 of its last 10 rounds.
    alert: it is named. exclude: its pushes are refused until the broker restarts."""
    share_max: Annotated[float, Range(0, 1)] = 0.0
    """Largest weight of one contribution among M, three or more: 0.34 to 1. 1: no limit. 0:
    2 / M and at most 1 / 3, so that one liar at the norm bound cannot outweigh the others."""
    rounds_in_flight: Annotated[int, Range(1, 64)] = 2
    """Rounds that may be open at the same time, on different fragments."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("norm_limit", "clip_ratio"):
            if 0 < (ratio := getattr(self, name)) < 1:
                raise ConfigError(
                    f"{name}: below the median", expected="0 or at least 1", got=str(ratio)
                )
        if 0 < self.share_max < 0.34:
            raise ConfigError(
                "share_max: three shares cannot keep to it",
                expected="0 or at least 0.34",
                got=str(self.share_max),
            )
