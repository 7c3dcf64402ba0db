"""Keys of a broker and its learners, made for one run of a bench."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from narrows.proto.key_holder import KeyHolder
from narrows.proto.keys import (
    KeyPair,
    Keyring,
    SiteKey,
    new_broker_key,
    new_pair,
    write_ring,
    write_site_key,
)


@dataclass(frozen=True)
class SiteKeys:
    """A broker's directory of keys, and the key pairs of all whom its ring admits."""

    directory: Path
    server: str
    """The broker's public key."""
    pairs: Mapping[str, KeyPair]

    @classmethod
    def make(cls, directory: Path, names: Iterable[str]) -> SiteKeys:
        """Makes the broker's key and a ring with one learner per name."""
        server = new_broker_key(directory).current.public
        pairs = {name: new_pair() for name in names}
        ring = Keyring()
        for name, pair in pairs.items():
            ring = ring.allow(KeyHolder(name), pair.public, now=time.time())
        write_ring(directory, ring)
        return cls(directory, server, pairs)

    def write(self, name: str, broker: str) -> Path:
        """Writes the key file of one learner, once the broker's address is known."""
        path = self.directory.parent / f"{name}.key"
        write_site_key(path, SiteKey(name, self.pairs[name], broker, (self.server,)))
        return path
