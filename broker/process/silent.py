"""Connections that have never sent a message: whose they may be, and which of them go first.

A handshake's question (ZAP) tells the address of the other end and not its port, so its answer
belongs to no connection that we know. But all names that have proved a key at an address are known.
So the silent connections of an address belong to these names together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Set
from typing import Final

CUT_PART: Final = 1 / 16
"""Part of the silent connections beyond what their holders may have that goes each second: who
opens n of them each second keeps 16 n. Cutting all at once would cost more than they do, because
each dials again after a tenth of a second."""

LOOK_S: Final = 1.0
"""Time between two such cuts."""

CUT_AT_ONCE_MAX: Final = 64
"""Connections that are cut together to make room: fewer than the descriptors in reserve, since a
connection that is cut keeps its own for a moment."""


class SilentConnections:
    """Which names have proved a key at which address."""

    def __init__(self) -> None:
        self._look_at = 0.0
        self._names: dict[str, dict[str, int]] = {}
        """By address: each name, and the number of connections that it may have."""

    def admitted(self, address: str, name: str, most: int) -> None:
        """A handshake from `address` has proved a key of `name`, which may have `most`
        connections."""
        # The kernel's word for the same address has no zone.
        self._names.setdefault(address.partition("%")[0], {})[name] = most

    def has(self, address: str, names: Set[str]) -> bool:
        """True if one of the names has proved a key at an address."""
        return not names.isdisjoint(self._names.get(address, {}))

    def keep(self, addresses: Set[str]) -> None:
        """Forgets all other addresses: they have no connection any more."""
        for address in self._names.keys() - addresses:
            del self._names[address]

    def due(self, silent: Iterable[tuple[str, int]], now: float) -> list[int]:
        """Those that go now, once a second, while there is room; arguments as for `too_many`."""
        if now < self._look_at:
            return []
        self._look_at = now + LOOK_S
        too_many = self.too_many(silent)
        return too_many[: math.ceil(len(too_many) * CUT_PART)]

    def for_room(self, silent: Iterable[tuple[str, int]]) -> list[int]:
        """Those that go when there is no room; arguments as for `too_many`."""
        return self.too_many(silent)[:CUT_AT_ONCE_MAX]

    def too_many(self, silent: Iterable[tuple[str, int]]) -> list[int]:
        """The silent connections of those who have most beyond what they may have, as many as are
        too many, the oldest first; empty if nobody has too many. `silent`: address and descriptor,
        the oldest first. Where nobody has proved a key, every connection is too many."""
        groups: dict[frozenset[str], list[int]] = {}
        most: dict[frozenset[str], int] = {}
        of_address: dict[str, frozenset[str]] = {}
        for address, descriptor in silent:
            if address not in of_address:
                known = self._names.get(address, {})
                names = of_address[address] = frozenset(known)
                most[names] = sum(known.values())
            groups.setdefault(of_address[address], []).append(descriptor)
        if not groups:
            return []
        worst = max(groups, key=lambda names: len(groups[names]) - most[names])
        return groups[worst][: max(len(groups[worst]) - most[worst], 0)]
