"""The model in memory: the newest durable state of each fragment, and its last publications."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from narrows.broker.records import FragmentState, Version
from narrows.proto.layout import Fragment
from narrows.proto.messages import PUBLICATIONS_KEPT


class Model:
    """The only authoritative parameters. A merge on a worker reads them and makes a `Version`;
    `install` makes that the current one, once it is durable.

    States are replaced, never changed in place: a snapshot, a transfer or a merge may hold the old
    one while the next is made.
    """

    def __init__(self, table: Sequence[Fragment], states: Sequence[FragmentState]) -> None:
        self.table = tuple(table)
        self.states = list(states)
        """One for each fragment."""
        self._publications: list[dict[int, Version]] = [{} for _ in self.table]
        sizes = [(state.fragment, state.published.size) for state in self.states]
        assert sizes == [(fragment.index, fragment.elements) for fragment in self.table], sizes

    @property
    def heads(self) -> tuple[int, ...]:
        """Newest version per fragment."""
        return tuple(state.version for state in self.states)

    def install(self, version: Version) -> None:
        """Makes a durable version the current one, and keeps its publication for learners that
        missed it or a few before it."""
        state = version.state
        assert state.version == self.states[state.fragment].version + 1, "versions rise by one"
        # One assignment: a worker reads the old state or the new one, never a mixture.
        self.states[state.fragment] = state
        # A kept version loses what is large and never sent: eight of them would hold eight models.
        pushes = tuple(replace(each, chunks=()) for each in version.round_.contributions)
        empty = np.zeros(0, np.float32)
        state = replace(state, global_=empty, momentum=empty, published=empty)
        kept = self._publications[state.fragment]
        kept[state.version] = replace(
            version, round_=replace(version.round_, contributions=pushes), state=state
        )
        kept.pop(state.version - PUBLICATIONS_KEPT, None)
        assert len(kept) <= PUBLICATIONS_KEPT, list(kept)

    def publication(self, fragment: int, version: int) -> Version | None:
        """A version with its publication, but without arrays of state and payloads of pushes; None
        if it is not kept."""
        return self._publications[fragment].get(version)
