"""Names everything with which one process of a learner joins a run."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from narrows.learner.session import Identity
from narrows.proto.codec import F32
from narrows.proto.fragments import Fragment
from narrows.proto.keys import SiteKey
from narrows.proto.messages import LayoutEntry


class ParameterHost(Protocol):
    """The model's parameters. Only the training thread calls it."""

    def snapshot(self, fragment: Fragment, out: F32) -> None:
        """Copies the fragment's parameters into `out`, float32, shape (elements,)."""

    def adopt(self, fragment: Fragment, values: F32) -> None:
        """Sets the fragment's parameters, cast to their dtype."""


def _new_incarnation() -> str:
    return secrets.token_hex(16)


@dataclass(frozen=True, kw_only=True)
class ClientOptions:
    """Settings of one Client; made once and handed down whole, so that no layer repeats the list.

    One struct stands for one life of a learner's process: a second Client needs new options.
    """

    broker: str
    """Control address, such as tcp://127.0.0.1:7070."""
    name: str
    layout: tuple[LayoutEntry, ...]
    frozen_digest: int
    """Digest of the parameters that do not train; see `learner.module.digest`."""
    host: ParameterHost
    key: SiteKey | None = None
    """Key with which the broker knows this learner; None: neither side has keys."""
    key_file: Path | None = None
    """File of the key, which is read again when the broker does not admit it any more."""
    join_timeout_s: float = 60.0
    """Seconds without a broker, or without progress on due data, after which `start` raises."""
    contribute_after_steps: int = 0
    """No contribution before so many own steps (the ramp of a newcomer)."""
    events: Path | None = None
    """File that gets one JSON line per event; None: no file."""
    incarnation: str = field(default_factory=_new_incarnation)
    """Tells this life of the process from the ones before: 32 hex digits."""

    @property
    def identity(self) -> Identity:
        """The part of it that the broker is told."""
        return Identity(self.name, self.incarnation, self.layout, self.frozen_digest)
