"""stub"""

from __future__ import annotations

from typing import NamedTuple

from narrows.proto.messages import Status


class Verdict(NamedTuple):
    level: str
    text: str
    remedy: str


def verdict(status: Status) -> Verdict:
    return Verdict("ok", f"All is well: {status.quorum.training} learners train.", "")
