"""The run's secret: it proves that a learner has met an epoch of this run. [pure]"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field
from typing import Final

from narrows.proto.messages import Epoch

SECRET_BYTES: Final = 32


@dataclass(frozen=True)
class RunSecret:
    """A key of 32 bytes that only brokers of this run know.

    Each Welcome carries a proof of its epoch. A Hello that names a higher term stops a broker, so
    it has to show the proof of the broker of that term.
    """

    key: bytes = field(repr=False)

    def __post_init__(self) -> None:
        assert len(self.key) == SECRET_BYTES, len(self.key)

    def proof(self, run_id: str, epoch: Epoch) -> str:
        """The proof of an epoch, 64 hex digits."""
        term, life, nonce = epoch
        told = f"narrows epoch {run_id} {term} {life} {nonce}".encode()
        return hashlib.blake2b(told, key=self.key, digest_size=32).hexdigest()

    def proves(self, run_id: str, epoch: Epoch, proof: str) -> bool:
        """True if a broker that knows the secret has issued this proof."""
        return hmac.compare_digest(self.proof(run_id, epoch), proof)
