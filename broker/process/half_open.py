"""Connections within their handshake, by address: more than a few hundred are a flood."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class HalfOpen:
    """Descriptors by address, the oldest first."""

    _by_address: dict[str, dict[int, None]] = field(default_factory=dict[str, dict[int, None]])
    _count: int = 0

    def __len__(self) -> int:
        return self._count

    def add(self, address: str, descriptor: int) -> None:
        self._by_address.setdefault(address, {})[descriptor] = None
        self._count += 1

    def remove(self, address: str, descriptor: int) -> None:
        those = self._by_address[address]
        del those[descriptor]
        if not those:
            del self._by_address[address]
        self._count -= 1

    def of_worst(self) -> list[int]:
        """Descriptors of the address that has most, the oldest first."""
        address = max(self._by_address, key=lambda each: len(self._by_address[each]))
        return list(self._by_address[address])
