"""Forgetting of learners that do not return, so that memory stays bounded. [pure]

A name leaves behind the member, its accounts in the run's clock and pace, and its last merged push
in each fragment. From that push it would learn on its return whether the push's residual counts. A
name that comes back after it was forgotten is new. An open push of it is refused as stale or
collected anew, but never merged twice, since a merge makes its base version old.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from narrows.broker.syncer import events as ev
from narrows.broker.syncer.member import Member
from narrows.broker.syncer.run import RunState
from narrows.proto.limits import LEARNERS_MAX

GONE_MAX = LEARNERS_MAX
"""Most names of learners that are gone; beyond it the longest gone is forgotten early."""

MERGED_PUSHES_MAX = 1 << 17
"""Most merged pushes that are remembered, one per name and fragment, if forgetting learners that
are gone suffices. Each takes 200 bytes of a checkpoint's manifest."""


def forget_at(state: RunState) -> list[float]:
    """Time at which the next name is due, as a list of one or none."""
    first = islice(state.roster.gone.values(), 1)
    return [heard_at + state.config.liveness.forget for heard_at in first]


def forget_gone(state: RunState, now: float) -> list[ev.Effect]:
    """Forgets the names that are due, and the names beyond the limit."""
    names = _due(state, now)
    if not names:
        return []
    for name in names:
        state.roster.forget(name)
        state.clock.forget(name)
        state.pace.forget(name)
        state.suspects.pop(name, None)
    assert not any(name in state.roster.gone for name in names)
    erased: list[ev.Effect] = [ev.Erase(name) for name in names]
    return erased + _forget_pushes(state, lambda name, _: name in names)


def forget_older(state: RunState, member: Member) -> list[ev.Effect]:
    """Forgets older processes of a name: they are refused as superseded."""
    return _forget_pushes(
        state, lambda name, process: name == member.name and process != member.incarnation
    )


def _forget_pushes(state: RunState, is_over: Callable[[str, str], bool]) -> list[ev.Effect]:
    """Forgets the merged pushes of some names and incarnations, and logs it.

    The audit of the journal has to know: a later merge begins to count their tokens again.
    """
    over = {key[:2] for key in state.merged_pushes if is_over(*key[:2])}
    if over:
        pushes = state.merged_pushes.items()
        state.merged_pushes = {key: push for key, push in pushes if key[:2] not in over}
    return [ev.LogFate("forgotten", name, process) for name, process in sorted(over)]


def _due(state: RunState, now: float) -> list[str]:
    gone = state.roster.gone
    # The limit assumes that each name has a push in every fragment: counting them would take too
    # long, since this runs with every event.
    held_max = max(1, MERGED_PUSHES_MAX // max(1, len(state.heads)))
    too_many = len(gone) - min(GONE_MAX, held_max)
    names: list[str] = []
    for name, heard_at in gone.items():
        # The same sum as in forget_at, so that no rounding makes it come too early.
        if now < heard_at + state.config.liveness.forget and len(names) >= too_many:
            break
        names.append(name)
    assert len(gone) - len(names) <= GONE_MAX
    return names
