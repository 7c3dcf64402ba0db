"""Collects the chunks of one fragment: publications and states on their way. [pure]"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from narrows.learner.session import events as ev
from narrows.proto import messages as msg
from narrows.proto.errors import ErrorCode, RemoteProtocolError
from narrows.proto.flow import Arrival, Assembly
from narrows.proto.fragments import Fragment
from narrows.proto.terms import Ranges

Key: TypeAlias = tuple[msg.DataKind, int]
"""Kind and version."""

AHEAD_MAX = 64
"""Publications kept while the state below them is still on its way. Without a limit a broker that
never sends the state would fill the learner's memory."""


@dataclass
class _Transfer:
    """One publication or state; parts of it may be missing."""

    assembly: Assembly
    digest: int
    push_id: int
    """Newest push of ours that the version holds, as its chunks say; 0: none."""


class Arriving:
    """The transfers of a fragment that are not applied yet, by kind and version."""

    def __init__(self, fragment: Fragment) -> None:
        self._fragment = fragment
        self._transfers: dict[Key, _Transfer] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._transfers

    def add(self, header: msg.Header, handle: int) -> tuple[list[ev.Effect], bool]:
        """Takes a decoded chunk in; True if it is new. A chunk that is not new is dropped."""
        drop: list[ev.Effect] = [ev.Drop((handle,))]
        key = (header.kind, header.version)
        transfer = self._transfers.get(key)
        effects: list[ev.Effect] = []
        # Another digest is another history of the broker: chunks of the two must never mix.
        if transfer is None or transfer.digest != header.result_digest:
            effects += [ev.Drop(transfer.assembly.handles)] if transfer else []
            oldest = header.version - AHEAD_MAX
            effects += self.forget(lambda kind, v: kind is msg.DataKind.PUBLICATION and v < oldest)
            assembly = Assembly(self._fragment.elements)
            transfer = _Transfer(assembly, header.result_digest, header.push_id)
            self._transfers[key] = transfer
        chunk = header.offset, header.count, header.payload_digest, handle
        try:
            arrival = transfer.assembly.add(*chunk)
        except RemoteProtocolError as error:
            is_anew = error.code is ErrorCode.CHUNK_CONFLICT and key[0] is msg.DataKind.STATE
            if not is_anew:
                note = ev.Note("warning", f"fragment {self._fragment.index}: {error}")
                return [*effects, *drop, note], False
            # The broker has cut the state anew, for messages of another size.
            effects.append(ev.Drop(transfer.assembly.handles))
            transfer.assembly = Assembly(self._fragment.elements)
            arrival = transfer.assembly.add(*chunk)
        transfer.push_id = max(transfer.push_id, header.push_id)
        if arrival is Arrival.DUPLICATE:
            return effects + drop, False
        return effects, True

    def next_complete(self, held: int) -> Key | None:
        """The transfer that can follow version `held` (-1: none): the newest state, or the next
        publication. None if neither is complete."""
        complete = [key for key, t in self._transfers.items() if t.assembly.complete]
        states = [v for kind, v in complete if kind is msg.DataKind.STATE and v > held]
        # A state replaces all below it, so publications that it holds are not applied first.
        if states:
            return msg.DataKind.STATE, max(states)
        following = (msg.DataKind.PUBLICATION, held + 1)
        return following if held >= 0 and following in complete else None

    def content(self, key: Key) -> tuple[tuple[int, ...], int]:
        """The handles of a complete transfer's chunks, and the digest of its result."""
        transfer = self._transfers[key]
        assert transfer.assembly.complete, key
        return transfer.assembly.handles, transfer.digest

    def merged_push(self, version: int) -> int:
        """Id of the newest push of ours that a version says it holds; 0 for none."""
        push_ids = (t.push_id for (_, v), t in self._transfers.items() if v == version)
        return max(push_ids, default=0)

    def missing(self, held: int) -> tuple[Key, Ranges] | None:
        """The transfer that has begun and would follow version `held`, with the ranges that it
        lacks; None if there is no such transfer."""
        for (kind, version), transfer in sorted(self._transfers.items()):
            assert version > held, "what is not newer was dropped when `held` was applied"
            # Only the next publication can be applied: to ask for later ones would delay it.
            if kind is msg.DataKind.STATE or version == held + 1:
                return (kind, version), transfer.assembly.missing()
        return None

    def handles(self) -> list[int]:
        """Handles of the payloads that have arrived and are not applied."""
        return [h for transfer in self._transfers.values() for h in transfer.assembly.handles]

    def forget(self, unwanted: Callable[[msg.DataKind, int], bool]) -> list[ev.Effect]:
        """Drops the transfers whose kind and version are unwanted."""
        effects: list[ev.Effect] = []
        # In order, so that the same events always give the same effects.
        for key in sorted(self._transfers):
            if unwanted(*key):
                effects.append(ev.Drop(self._transfers.pop(key).assembly.handles))
        assert not any(unwanted(*key) for key in self._transfers), sorted(self._transfers)
        return effects
