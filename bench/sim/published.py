"""The versions that the simulated broker has published, by digest instead of by value."""

from __future__ import annotations

from collections.abc import Sequence

from narrows.broker.merging import EncodedVersion
from narrows.proto.limits import PUBLICATIONS_KEPT


class SimulatedModel:
    """The newest versions, and the publications that are still kept."""

    def __init__(self, heads: Sequence[tuple[int, int]]) -> None:
        self.heads = list(heads)
        """(version, digest) by fragment."""
        self._publications: dict[tuple[int, int], EncodedVersion] = {}

    def publish(self, fragment: int, encoded: EncodedVersion) -> None:
        """The next version exists."""
        self.heads[fragment] = (encoded.version, encoded.digest)
        self._publications[fragment, encoded.version] = encoded
        self._publications.pop((fragment, encoded.version - PUBLICATIONS_KEPT), None)

    def publication(self, fragment: int, version: int) -> EncodedVersion | None:
        """A publication that is still kept."""
        return self._publications.get((fragment, version))

    def newest_version(self, fragment: int) -> int:
        """Version of the published copy."""
        return self.heads[fragment][0]
