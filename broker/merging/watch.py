"""The watch over the learners of a run: who is clipped, or points away, again and again. [pure]

Every merged round is evidence about its contributors. The state is part of the run's: it stands in
checkpoints, and a replay makes it again from the records. It changes no version.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Final

from msgspec import Struct

from narrows.broker.merging.evidence import PushEvidence
from narrows.proto.limits import LEARNERS_MAX

ROUNDS_WATCHED: Final = 10
"""Newest rounds of a name that are judged."""

ROUNDS_BAD: Final = 8
"""Bad rounds among them that make a suspect."""

ROUNDS_FORGIVEN: Final = 4
"""Bad rounds among them with which a suspect is none any more."""

COSINES_KEPT: Final = 64
"""Newest cosines of the run that the bound is learned from."""

AWAY_SHARE: Final = -0.25
"""The bound in units of what is usual. It lies on the other side of zero: a learner with other data
may well have nothing in common with the others."""

AGREEMENT_MIN: Final = 0.15
"""Usual cosine below which there is no bound: where learners have so little in common, one that
points away from the others has other data, for all that anybody can know."""

RECENT_ROUNDS: Final = 50
"""A name that has not contributed in so many rounds of the run is not counted as one of it."""


class Watched(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One name: its newest rounds."""

    learner: str
    bad: tuple[str, ...]
    """Per round, oldest first: why it was bad, or ""."""
    last: int
    """Number of the newest one in the run."""

    @property
    def bad_rounds(self) -> int:
        """Bad rounds among the newest."""
        return sum(map(bool, self.bad))


class Watch(Struct, frozen=True, forbid_unknown_fields=True):
    """The state of the watch; `after` gives the next one."""

    rounds: int = 0
    names: tuple[Watched, ...] = ()
    """The name that has not contributed for longest comes first."""
    cosines: tuple[float, ...] = ()
    """The newest ones, oldest first."""

    def bound(self, others: Sequence[float]) -> float:
        """Cosine below which a contribution is bad, beside the cosines of the others of its round.

        Usual is the median of the run's newest cosines, or that of the round if it is smaller. -1
        where the learners agree too little.
        """
        if not (self.cosines and others):
            return -1.0
        usual = min(median(self.cosines), median(others))
        return AWAY_SHARE * usual if usual >= AGREEMENT_MIN else -1.0

    def after(self, evidence: Sequence[PushEvidence]) -> Watch:
        """The watch with one more round, whose evidence is in name order."""
        if not evidence:
            return self
        rounds, known = self.rounds + 1, {each.learner: each for each in self.names}
        recent = {each.learner for each in self.names if rounds - each.last <= RECENT_ROUNDS} | {
            each.learner for each in evidence
        }
        bad = _bad(evidence, self._away(evidence), names=len(recent))
        for each in evidence:
            before = known.pop(each.learner, None)
            past = (before.bad if before else ())[1 - ROUNDS_WATCHED :]
            known[each.learner] = Watched(each.learner, (*past, bad.get(each.learner, "")), rounds)
        cosines = tuple(each.cosine for each in evidence if each.cosine is not None)
        names = tuple(known.values())[-LEARNERS_MAX:]
        return Watch(rounds, names, (*self.cosines, *cosines)[-COSINES_KEPT:])

    def _away(self, evidence: Sequence[PushEvidence]) -> list[str]:
        """Contributors that point away, or nowhere: those with the least cosines first."""
        found: list[tuple[float, str]] = []
        for each in evidence:
            if each.cosine is None:
                continue
            others = [o.cosine for o in evidence if o is not each and o.cosine is not None]
            if each.cosine < self.bound(others) or each.is_noise:
                found.append((each.cosine, each.learner))
        return [learner for _, learner in sorted(found)]

    def suspects(self, evidence: Sequence[PushEvidence]) -> dict[str, str]:
        """Why a contributor of the newest round is a suspect, by name."""
        found: dict[str, str] = {}
        contributed = {each.learner for each in evidence}
        for each in self.names:
            if each.learner in contributed and each.bad[-1] and each.bad_rounds >= ROUNDS_BAD:
                count = f"{each.bad_rounds} of its last {len(each.bad)} rounds"
                found[each.learner] = f"{_commonest(each.bad)} in {count}"
        return found

    def forgiven(self, evidence: Sequence[PushEvidence]) -> frozenset[str]:
        """Contributors of the newest round that are no suspects, whatever they were before."""
        contributed = {each.learner for each in evidence}
        return frozenset(
            each.learner
            for each in self.names
            if each.learner in contributed and each.bad_rounds <= ROUNDS_FORGIVEN
        )


UNWATCHED: Final = Watch()
"""The watch of a run that has no round yet."""

CLIPPED: Final = "clipped by the norm bound"
AWAY: Final = "pointing away from the others"


def _bad(evidence: Sequence[PushEvidence], away: Sequence[str], *, names: int) -> dict[str, str]:
    """Why a contribution is bad, by name; `names` learners take part in the run.

    Of the contributions that point away only a minority is blamed, those with the least cosines:
    one that points away turns the mean that the others are compared with. In a run of two nobody
    can say which of both is wrong, so both are blamed. In a round of two of a larger run a
    cosine says nothing.
    """
    bad: dict[str, str] = {}
    if len(evidence) > 2:
        bad = dict.fromkeys(away[: (len(evidence) - 1) // 2], AWAY)
    elif names == 2:
        bad = dict.fromkeys(away, AWAY)
    bad |= {each.learner: CLIPPED for each in evidence if each.is_clipped}
    if len(evidence) == names == 2 and bad:
        reason = CLIPPED if CLIPPED in bad.values() else AWAY
        bad = {each.learner: reason for each in evidence}
    return bad


def _commonest(bad: Sequence[str]) -> str:
    reasons = [reason for reason in bad if reason]
    return max(sorted(set(reasons)), key=reasons.count)
