"""Learners that do not return: what is known of them is forgotten, and when. [pure]

What a name leaves behind is the member, its account in the run's clock, and for each fragment its
last merged push, by which it would learn on its return whether the residual of that push counts.
A name that comes back after it was forgotten is new: an open push of it is refused as stale or
collected anew, but never merged twice, since a merge makes its base version old.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from narrows.broker.syncer import events as ev
from narrows.broker.syncer.members import Member
from narrows.broker.syncer.run import RunState
from narrows.proto.limits import LEARNERS_MAX

GONE_MAX = LEARNERS_MAX
"""Names of learners that are gone: more are forgotten sooner, the longest gone first."""

MERGED_PUSHES_MAX = 1 << 17
"""Merged pushes that are remembered, a name and a fragment each, if forgetting those that are gone
suffices: 200 bytes of a checkpoint's manifest, which is read up to 64 MiB."""


def forget_at(state: RunState) -> list[float]:
    """When the next name is due: one time, or none."""
    first = islice(state.roster.gone.values(), 1)
    return [heard_at + state.config.liveness.forget for heard_at in first]


def forget_gone(state: RunState, now: float) -> list[ev.Effect]:
    """Forgets the names that are due, and those that are too many."""
    names = _due(state, now)
    if not names:
        return []
    for name in names:
        state.roster.forget(name)
    state.clock.keep({member.incarnation for member in state.roster})
    erased: list[ev.Effect] = [ev.Erase(name) for name in names]
    return erased + _forget_pushes(state, lambda name, _: name in names)


def forget_older(state: RunState, member: Member) -> list[ev.Effect]:
    """Forgets older processes of a name: they are refused as superseded."""
    return _forget_pushes(
        state, lambda name, process: name == member.name and process != member.incarnation
    )


def _forget_pushes(state: RunState, is_over: Callable[[str, str], bool]) -> list[ev.Effect]:
    """Forgets the merged pushes of these names and incarnations. The audit of the journal has to
    know: one that is merged all the same begins to count its tokens again."""
    over = {key[:2] for key in state.merged_pushes if is_over(*key[:2])}
    if over:
        pushes = state.merged_pushes.items()
        state.merged_pushes = {key: push for key, push in pushes if key[:2] not in over}
    return [ev.LogFate("forgotten", name, process) for name, process in sorted(over)]


def _due(state: RunState, now: float) -> list[str]:
    gone = state.roster.gone
    # By the most that they can hold, not by a count: this runs with every event.
    held_max = max(1, MERGED_PUSHES_MAX // max(1, len(state.heads)))
    too_many = len(gone) - min(GONE_MAX, held_max)
    names: list[str] = []
    for name, heard_at in gone.items():
        # The same sum as in forget_at, so that no rounding makes it come too early.
        if now < heard_at + state.config.liveness.forget and len(names) >= too_many:
            break
        names.append(name)
    return names
