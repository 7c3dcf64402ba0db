"""The numbers of a round: quorum, the window that it waits, the spacing of launches, the pace.

A round waits for its quorum without a limit. After that it waits for learners that may still come,
at most for a window: the time that the learners' overlap hides from them (Decoupled DiLoCo, Eq. 3),
or one launch spacing where that is longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

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


def spacing_s(settings: RunSettings, xi_s: float) -> float:
    """Seconds between two launches, whatever their fragments."""
    return settings.sync_period_steps * xi_s / settings.fragments


def window_s(settings: RunSettings, xi_s: float, *, quorum_after_s: float, sync_s: float) -> float:
    """Seconds that a round waits after its quorum.

    quorum_after_s: from its launch to its quorum. sync_s: usual time from due to durable.
    """
    hidden_s = settings.overlap_steps * xi_s - quorum_after_s - sync_s
    return max(GAMMA * hidden_s, spacing_s(settings, xi_s))


def has_quorum(quorum: int, *, here: int, awaited: int, absent: int) -> bool:
    """True if enough complete pushes are `here`. `quorum` 0: those of all awaited learners.

    Awaited learners are ready, heard and not paused: two rounds that nobody can fill would hold
    both slots for ever. Absent are those of them without a complete push here, and in the first
    round who is joining still.
    """
    if here == 0:
        return False
    return absent == 0 if quorum == 0 else here >= min(quorum, awaited)
