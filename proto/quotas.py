"""Quotas: how much of each kind one key may ask of a broker, each with its reason.

A quota is a token bucket: `burst` at once, then `per_s`. What honest learners send grows with the
versions that the broker publishes, so some quotas grow with them too: `per_version`. Without keys
there are no quotas: nobody could say whose they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from narrows.proto.limits import PUBLICATIONS_KEPT


class Ask(StrEnum):
    """Kinds of what a key may ask for."""

    JOINS = "joins"
    CONTROL = "control messages"
    STATUS = "status questions"
    STATES = "states"
    REFUSED = "refused messages"
    CHUNKS = "data messages"
    BYTES = "bytes of data"
    ENROLMENTS = "enrolments"


@dataclass(frozen=True)
class Quota:
    """Most of one kind that one learner may ask for."""

    burst: float
    """At once, after a rest."""
    per_s: float
    per_version: float = 0.0
    """Beside `per_s`, with each version that the broker publishes."""


JOINS: Final = Quota(burst=6, per_s=6 / 60)
"""A process that crashes at its start would fill log and journal. A return of the same process to
its session counts RETURN_COST: a line that breaks may need one every QUIET_S."""

RETURN_COST: Final = 0.25
"""Part of a join that a return of the same process counts."""

CONTROL: Final = Quota(burst=1000, per_s=200, per_version=4)
"""A learner sends at most 10 Reports per second. To each version it says Push or Decline, then
Adopted, and where data was lost Fetch or Missing: four messages."""

CONTROL_PER_FRAGMENT: Final = 4.0
"""Added to the burst of control messages for each fragment: a learner that joins or returns sends a
Fetch and an Adopted for each, and again after the next Welcome."""

CONTROL_UNIT_BYTES: Final = 8 << 10
"""A control message counts once for each such part of it that it begins. The longest usual one, a
Missing of 256 ranges, has 5 KB; a long one costs the broker's time by its length."""

STATUS: Final = Quota(burst=10, per_s=1)
"""A person or a monitor looks once per second at most."""

STATES: Final = Quota(burst=4, per_s=2 / 600)
"""Whole models, fragment by fragment: a state is all of the parameters, encoded anew. Four: the
start of a run may need a second one at once, and a machine may fail early."""

STATES_PER_VERSION: Final = 1 / PUBLICATIONS_KEPT
"""A learner that is cut off again and again asks for the state of a fragment at most once in so
many versions of it: it gets the versions themselves if they are fewer."""

REFUSED: Final = Quota(burst=20, per_s=20 / 60, per_version=2)
"""An honest message is refused when it crosses the end of its round: at most once for each version,
with its chunks. The others are mistakes. Each costs a line of the log and of the journal."""

ENROLMENTS: Final = Quota(burst=4, per_s=4 / 86_400)
"""A key is handed over once in weeks, and once more if the answer was lost. Each one is written to
the ring, and the third within a day ends the first key with its connections."""

CHUNKS: Final = Quota(burst=1000, per_s=20)
"""Data messages may be under way to a broker that does not know the model (again) yet."""

CHUNKS_PER_VERSION: Final = 2.0
"""Data messages that one version allows, in units of the largest number of chunks of its fragment:
a push, and the same again for what was lost or superseded."""

BYTES_BURST_S: Final = 20.0
"""Seconds of its rate that a learner's bytes may come late and all at once: UNACKNOWLEDGED_MAX_S,
after which the connection and what was under way are lost."""

TOLD_S: Final = 60.0
"""A quota that is used up is named in the log and to the peer at most this often."""


def quotas(chunks: Sequence[int], fragments: int) -> Mapping[Ask, Quota]:
    """All quotas of a run; `chunks` has the largest number of chunks of each fragment."""
    most, all_of_them = max(chunks, default=0), sum(chunks)
    return {
        Ask.JOINS: JOINS,
        Ask.CONTROL: Quota(
            CONTROL.burst + CONTROL_PER_FRAGMENT * fragments, CONTROL.per_s, CONTROL.per_version
        ),
        Ask.STATUS: STATUS,
        Ask.STATES: Quota(STATES.burst, STATES.per_s, STATES_PER_VERSION / fragments),
        Ask.REFUSED: REFUSED,
        Ask.ENROLMENTS: ENROLMENTS,
        # Version 0 is all of the fragments. A round that ends without a merge has no version.
        Ask.CHUNKS: Quota(
            CHUNKS.burst + CHUNKS_PER_VERSION * all_of_them,
            CHUNKS.per_s + CHUNKS_PER_VERSION * most,
            CHUNKS_PER_VERSION * most,
        ),
    }
