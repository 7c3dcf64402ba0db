"""When each fragment is due in the lockstep modes: the same rule on both sides."""

from __future__ import annotations

from collections.abc import Sequence

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


def next_snapshot(settings: RunSettings, versions: Sequence[int]) -> int:
    """Inner step of the first snapshot that is due against `versions`, by fragment."""
    return min(snapshot_step(settings, index, version) for index, version in enumerate(versions))


def first_step(settings: RunSettings, versions: Sequence[int]) -> int:
    """Inner step at which a learner stands that has just adopted `versions`.

    One spacing of the fragments before the next snapshot, so that there is work to contribute.
    """
    spacing = max(1, settings.sync_period_steps // settings.fragment_count)
    return max(0, next_snapshot(settings, versions) - spacing)
