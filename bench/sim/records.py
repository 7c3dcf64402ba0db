"""Records that the learners of a simulated run leave in its trace."""

from __future__ import annotations

from dataclasses import dataclass

from narrows.proto import messages as msg
from narrows.proto.errors import NarrowsError


@dataclass(frozen=True)
class Installed:
    """A learner's published copy of a fragment is `version` now."""

    at_s: float
    learner: str
    incarnation: str
    epoch: msg.Epoch
    fragment: int
    version: int
    digest: int


@dataclass(frozen=True)
class AdoptionRecord:
    """The learner's parameters hold this version now."""

    at_s: float
    learner: str
    incarnation: str
    epoch: msg.Epoch
    fragment: int
    version: int
    digest: int


@dataclass(frozen=True)
class Failed:
    """A learner was refused for good."""

    at_s: float
    learner: str
    incarnation: str
    error: NarrowsError
