"""The learners' copies of the model: adopted versions, fetches, and repair of publications. [pure]

This module alone writes `Member.copies`.
"""

from __future__ import annotations

from collections.abc import Sequence

from narrows.broker.syncer import events as ev
from narrows.broker.syncer.member import Member
from narrows.broker.syncer.run import RunState
from narrows.proto import messages as msg
from narrows.proto.limits import PUBLICATIONS_KEPT


def begin_adoption(member: Member, now: float) -> None:
    """A learner is asked to adopt every fragment; the first request starts its time."""
    if not member.ready and member.copies.adopting_since is None:
        member.copies.adopting_since = now
        member.copies.flow.expect(now)


def acknowledge(member: Member, positions: Sequence[int], sent: Sequence[int], now: float) -> None:
    """The learner claims to have received these positions of the downlink's streams.

    One beyond what was sent is ignored, and so is one below an earlier one.
    """
    received, moved_bytes = member.copies.received, 0
    for stream, (position, most) in enumerate(zip(positions, sent, strict=False)):
        before = received.get(stream, 0)
        if before < position <= most:
            received[stream] = position
            # The first one only shows where the stream starts: it may go on from an older session.
            moved_bytes += position - before if before else 0
    member.copies.flow.add(moved_bytes, now)


def adopt(state: RunState, member: Member, fragment: int, version: int, now: float) -> bool:
    """Notes an adopted version; False: the message says nothing new."""
    if fragment >= len(state.heads) or version > state.heads[fragment].version:
        return False
    # A learner repeats its versions after each Welcome.
    held = member.copies.held[fragment]
    is_news = version > held
    if is_news:
        # A process of an earlier session repeats what it has; it adopted that at another time.
        member.copies.adopted_at[fragment] = now if held >= 0 or member.copies.is_new else None
        member.copies.newest_adopted += version == state.heads[fragment].version
    member.copies.held[fragment] = version
    return is_news


def expect_adoptions(state: RunState, fragment: int, now: float) -> None:
    """A new version of a fragment is published: every learner will acknowledge its bytes."""
    before = tuple(head.version - (i == fragment) for i, head in enumerate(state.heads))
    for member in state.roster.connected():
        # A learner that held all older versions awaited nothing: its time begins now.
        member.copies.flow.expect(now, anew=tuple(member.copies.held) == before)


def fetch(state: RunState, member: Member, fragment: int, have_version: int) -> list[ev.Effect]:
    """Fills a small gap with the publications that are kept, a large one with the State."""
    if fragment >= len(state.visible_heads()):
        return []
    head = state.heads[fragment].version
    # A learner that is ahead comes from another copy of the run; its Welcome sends it back.
    if have_version >= head:
        return []
    push_id = member.participation.last_merged[fragment]
    # Publications are a few bits per parameter, the State is all of them.
    if have_version + 1 >= _oldest_kept(state, fragment):
        return [
            ev.Publish(member.name, fragment, version, push_id)
            for version in range(have_version + 1, head + 1)
        ]
    return [ev.Publish(member.name, fragment, head, push_id, (), msg.DataKind.STATE)]


def resend(state: RunState, member: Member, missing: msg.Missing) -> list[ev.Effect]:
    """Sends the missing ranges of a publication or State, or what replaces it by now."""
    down = (msg.DataKind.PUBLICATION, msg.DataKind.STATE)
    if missing.fragment >= len(state.visible_heads()) or missing.kind not in down:
        return []
    elements = state.table[missing.fragment].elements
    # Clipped, not refused: a range beyond the end is harmless and the rest is needed.
    ranges = tuple((o, min(c, elements - o)) for o, c in missing.ranges if c and o < elements)
    assert all(offset + count <= elements for offset, count in ranges)
    head = state.heads[missing.fragment].version
    kept = _oldest_kept(state, missing.fragment) <= missing.version <= head
    if missing.kind is msg.DataKind.PUBLICATION and not kept:
        return fetch(state, member, missing.fragment, missing.version - 1)
    push_id = member.participation.last_merged[missing.fragment]
    kind = missing.kind
    return [ev.Publish(member.name, missing.fragment, missing.version, push_id, ranges, kind)]


def _oldest_kept(state: RunState, fragment: int) -> int:
    """Oldest version whose publication can still be sent."""
    head = state.heads[fragment].version
    oldest = max(state.first_kept[fragment], head - PUBLICATIONS_KEPT + 1)
    # Publications are kept without a gap, so one more than the head means that none is.
    assert head - PUBLICATIONS_KEPT < oldest <= head + 1
    return oldest
