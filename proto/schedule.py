"""When each fragment is due in the lockstep modes: the same rule on both sides."""

from __future__ import annotations

from narrows.proto.messages import Mode, RunSettings


def is_lockstep(settings: RunSettings) -> bool:
    """True in the modes in which every live learner contributes at a named step."""
    return settings.mode is not Mode.DECOUPLED


def snapshot_step(settings: RunSettings, fragment: int, version: int) -> int:
    """Inner step at which every learner takes its snapshot against `version`.

    The fragments are spread evenly over the sync period: fragment p is due at
    version * H + (p + 1) * H / P, as in Streaming DiLoCo (arXiv 2501.18512, Sec. 2).
    """
    period = settings.sync_period_steps
    return version * period + (fragment + 1) * period // settings.fragment_count
