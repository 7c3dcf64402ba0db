"""When a round is due, and how fast the run goes: pure functions of numbers.

A round waits for its quorum without a limit. After that it waits for learners that may still come,
at most for a window: the time that the learners' overlap hides from them (Decoupled DiLoCo, Eq. 3),
or one launch spacing where that is longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from narrows.proto.messages import RunSettings

GAMMA: Final = 0.9
"""Share of the hidden time that a window may use, so that the merge itself is hidden too."""


def pace_s(steps_s: Sequence[float]) -> float:
    """xi: the harmonic mean of the learners' step times, in seconds per inner step.

    With period H * xi all n learners together make n * H inner steps per version, whatever their
    speeds. A slow or hung learner stretches it by n / (n - 1) at most.
    """
    assert steps_s and min(steps_s) > 0, steps_s
    return len(steps_s) / sum(1 / each for each in steps_s)


def period_s(settings: RunSettings, xi_s: float) -> float:
    """Seconds between two rounds of a fragment; 0: not known yet."""
    return settings.sync_period_steps * xi_s


def spacing_s(settings: RunSettings, xi_s: float) -> float:
    """Seconds between two launches, whatever their fragments."""
    return period_s(settings, xi_s) / settings.fragments


def window_s(settings: RunSettings, xi_s: float, *, quorum_after_s: float, sync_s: float) -> float:
    """Seconds that a round waits after its quorum.

    quorum_after_s: from its launch to its quorum. sync_s: usual time from due to durable.
    """
    hidden_s = settings.overlap_steps * xi_s - quorum_after_s - sync_s
    return max(GAMMA * hidden_s, spacing_s(settings, xi_s))


class Census(NamedTuple):
    """Counts of who has pushed to a round."""

    here: int
    """Complete pushes."""
    awaited: int
    """Learners that are ready, heard and not paused."""
    absent: int
    """Those of them without a complete push here, and in the first round who is joining still."""
    missing: int
    """Learners that a window waits for: the absent ones whose step is shorter than the window, and
    everybody whose push is announced and not here yet."""
    decoding: bool
    """All bytes of some push are here and only its decoding is not finished."""


def has_quorum(quorum: int, census: Census) -> bool:
    """True if enough pushes are here. `quorum` 0: those of all awaited learners.

    Who is gone cannot be waited for: two rounds that nobody can fill would hold both slots for
    ever.
    """
    if census.here == 0:
        return False
    if quorum == 0:
        return census.absent == 0
    return census.here >= min(quorum, census.awaited)


def due(quorum: int, census: Census, *, since_quorum_s: float, window_s: float) -> str:
    """Why a round is merged now, "everybody" or "window"; "" if it is not due."""
    if not has_quorum(quorum, census):
        return ""
    if census.missing == 0:
        return "everybody"
    # Decoding takes a few ms of our own time; no learner should pay a version for it.
    return "window" if since_quorum_s >= window_s and not census.decoding else ""
