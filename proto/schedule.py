"""The step at which each fragment is due in the lockstep modes.

Both sides use this one rule: a learner takes its snapshot at the very step that the broker named,
or the broker would wait for a contribution that never comes.
"""

from __future__ import annotations

from collections.abc import Sequence

from narrows.proto.messages import Mode, RunSettings


def is_lockstep(settings: RunSettings) -> bool:
    """True in the modes in which every live learner contributes at a named step."""
    return settings.mode is not Mode.DECOUPLED


def snapshot_step(settings: RunSettings, fragment: int, version: int) -> int:
    """Inner step at which every learner takes its snapshot against `version`.

    The fragments are spread evenly over the sync period: fragment p is due at
    version * H + (p + 1) * H / P, as in Streaming DiLoCo (arXiv 2501.18512, Sec. 2). A learner that
    has adopted nothing asks with version -1: it is one period behind version 0.
    """
    assert 0 <= fragment < settings.fragment_count, f"fragment {fragment}"
    assert version >= -1, f"version {version}"
    period = settings.sync_period_steps
    return version * period + (fragment + 1) * period // settings.fragment_count


def next_snapshot(settings: RunSettings, versions: Sequence[int]) -> int:
    """Inner step of the first snapshot that is due against `versions`, by fragment."""
    assert len(versions) == settings.fragment_count, f"{len(versions)} versions"
    return min(snapshot_step(settings, index, version) for index, version in enumerate(versions))


def first_step(settings: RunSettings, versions: Sequence[int]) -> int:
    """Inner step at which a learner stands that has just adopted `versions`.

    It is one spacing of the fragments before the next snapshot, so that the learner has work to
    contribute.
    """
    spacing = max(1, settings.sync_period_steps // settings.fragment_count)
    due = next_snapshot(settings, versions)
    step = max(0, due - spacing)
    assert step <= due, f"starts at step {step}, after the snapshot at {due}"
    return step
