"""The identity of one learner process, and the Hello that tells it. [pure]"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from narrows.proto.codec import codec_names
from narrows.proto.layout import fingerprint
from narrows.proto.limits import PROTOCOL
from narrows.proto.messages import Epoch, Hello, LayoutEntry


@dataclass(frozen=True)
class Identity:
    """One process of a learner; fixed for the life of that process."""

    name: str
    incarnation: str
    layout: tuple[LayoutEntry, ...]
    frozen_digest: int

    @cached_property
    def fingerprint(self) -> str:
        """Equal for two learners whose models may be merged."""
        return fingerprint(self.layout, self.frozen_digest)

    def hello(
        self,
        run_id: str,
        epoch: Epoch,
        epoch_proof: str,
        steps: int,
        tokens: int,
        versions: tuple[int, ...] = (),
    ) -> Hello:
        """The message that asks for a session; `versions` are empty before all are adopted."""
        assert steps >= 0 and tokens >= 0, (steps, tokens)
        assert all(version >= 0 for version in versions), versions
        return Hello(
            protocol=PROTOCOL,
            name=self.name,
            incarnation=self.incarnation,
            run_id=run_id,
            epoch=epoch,
            fingerprint=self.fingerprint,
            codecs=codec_names(),
            step=steps,
            tokens=tokens,
            versions=versions,
            epoch_proof=epoch_proof,
        )
