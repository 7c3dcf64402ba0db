"""Keys for the demo, as `narrows keys` would make them: the broker's, and one for each learner."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from narrows.proto.key_holder import KeyHolder, KeyRole
from narrows.proto.keys import (
    KeyPair,
    SiteKey,
    edit_ring,
    new_broker_key,
    new_pair,
    new_ring,
    write_site_key,
)

WATCHER = "demo"
"""Holder of the key with which the demo asks for the status."""


@dataclass
class DemoKeys:
    """The keys of one run, in its folder."""

    folder: Path
    server: str = ""
    pairs: dict[str, KeyPair] = field(default_factory=dict[str, KeyPair])

    @property
    def directory(self) -> Path:
        """The broker's directory of keys."""
        return self.folder / "keys"

    def make(self, learners: Sequence[str]) -> None:
        """Makes the broker's key, and admits the learners and the demo itself."""
        self.server = new_broker_key(self.directory).current.public
        new_ring(self.directory)
        holders = [KeyHolder(name) for name in learners]
        with edit_ring(self.directory) as rings:
            for holder in [*holders, KeyHolder(WATCHER, KeyRole.OPERATOR)]:
                pair = self.pairs[holder.name] = new_pair()
                rings[0] = rings[0].allow(holder, pair.public, now=time.time())

    def write(self, address: str) -> SiteKey:
        """Writes the key files, once the broker's address is known; returns the demo's own key."""
        keys = {
            name: SiteKey(name, pair, address, (self.server,)) for name, pair in self.pairs.items()
        }
        for name, key in keys.items():
            write_site_key(self.file(name), key)
        return keys[WATCHER]

    def file(self, name: str) -> Path:
        """The key file of a learner."""
        return self.folder / f"{name}.key"
