"""The run's clock: tokens of merged pushes, bounded per learner by a rate. [pure]

A push of one fragment counts a P-th of its tokens, for P fragments. The clock counts whole units of
a P-th token, so that nothing is lost by rounding. What learners claim in Reports does not count.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import Final, NamedTuple

from narrows.proto.limits import TOKENS_MAX
from narrows.proto.timing import CLOCK_FIRST_S, CLOCK_RESTS_S

OWN_RATIO_MAX: Final = 8.0
"""A learner's tokens count at up to this multiple of its own usual rate."""

MEDIAN_RATIO_MAX: Final = 4.0
"""With other learners they count at up to this multiple of the lower median of all rates."""

FIRST_TOKENS_PER_S_MAX: Final = 1 << 24
"""Tokens per second that count in the first minute of a learner without others: nothing is known
to compare them with."""

SAMPLES: Final = 16
"""A usual rate is the median of so many contributions, so that one which had to wait does not move
it; so many merges give the speed of the clock."""

KNOWN_SAMPLES: Final = 8
"""Contributions after which a learner's own rate is known. The first ones may hold a part."""

SECONDS_MIN: Final = 1e-3
"""Shortest time of a contribution, for rates."""

TOLD_SHARE: Final = 0.5
"""The operator hears of a learner of whose tokens less than this share counts."""

RESTS_RATIO: Final = 2.0
"""Without a merge for so many usual distances the clock rests: learners must not overtake it."""

TOKENS_PER_S_MAX: Final = 1e18
"""The largest Rate that a message can carry."""


class Claim(NamedTuple):
    """A contribution to one round, as its learner announced it."""

    learner: str
    tokens: int
    seconds: float
    """Time from the adoption of its base to its announcement, as the broker saw them."""


@dataclass
class _Rate:
    """Tokens per second over the last contributions."""

    samples: deque[tuple[int, float]] = field(
        default_factory=lambda: deque[tuple[int, float]](maxlen=SAMPLES)
    )

    def add(self, tokens: int, seconds: float) -> None:
        assert 0 <= tokens <= TOKENS_MAX
        self.samples.append((tokens, max(seconds, SECONDS_MIN)))

    @property
    def usual(self) -> float:
        return median_low([n / seconds for n, seconds in self.samples]) if self.samples else 0.0


@dataclass
class _Account:
    """Account of one name: all of its incarnations share it."""

    since: float
    """Time at which the name was met first."""
    claimed: _Rate = field(default_factory=_Rate)
    counted: _Rate = field(default_factory=_Rate)
    first_at: float = math.inf
    """Time of its first contribution."""
    first_tokens: int = 0
    """Tokens of the first minute from there on, as far as FIRST_TOKENS_PER_S_MAX allows them."""
    first_s: float = 0.0
    is_told: bool = False
    """The operator knows that most of its tokens do not count."""

    def claim(self, tokens: int, seconds: float, now: float) -> None:
        """Learns what a rate may be from an announcement."""
        assert seconds >= 0.0
        self.claimed.add(tokens, seconds)
        self.first_at = min(self.first_at, now)
        if now <= self.first_at + CLOCK_FIRST_S:
            seconds = max(seconds, SECONDS_MIN)
            self.first_tokens += min(tokens, int(FIRST_TOKENS_PER_S_MAX * seconds))
            self.first_s += seconds

    def alone(self, now: float) -> float:
        """Limit in tokens per second of a learner without others: its first minute's rate."""
        if now <= self.first_at + CLOCK_FIRST_S:
            return FIRST_TOKENS_PER_S_MAX
        return OWN_RATIO_MAX * self.first_tokens / self.first_s


def _no_limit(_: str) -> float:
    return 0.0


@dataclass
class RunClock:
    """Counted tokens of the run, and their rate.

    For each round, a name's tokens count at most at its limit times the time since the base of the
    round was published. These times do not overlap, so no name can count more than its limit times
    the time of the run, whatever it claims and however often it joins.
    """

    limit: float = 0.0
    """Limit for every name, in tokens per second; 0: from what is usual."""
    limit_of: Callable[[str], float] = _no_limit
    """Limit of one name, which comes before all others; 0: it has none of its own."""
    units: int = 0
    """Counted tokens times the number of fragments."""
    _since: list[float] = field(default_factory=lambda: [0.0])
    """Time at which each fragment's newest version was published."""
    _accounts: dict[str, _Account] = field(default_factory=dict[str, _Account])
    _marks: deque[tuple[float, int]] = field(
        default_factory=lambda: deque[tuple[float, int]]([(0.0, 0)], maxlen=SAMPLES)
    )
    """Time and units after each of the last merges; the first one may be the start."""

    @property
    def fragments(self) -> int:
        return len(self._since)

    @property
    def run_tokens(self) -> int:
        return self.units // self.fragments

    def begin(self, fragments: int, now: float, units: int = 0) -> None:
        """The run begins, or goes on after a restart with `units` counted: no learner's work is
        older than that."""
        assert fragments >= 1 and units >= self.units
        self.units = min(units, TOKENS_MAX * fragments)
        self._since = [now] * fragments
        self._marks.clear()
        self._marks.append((now, self.units))

    def expect(self, name: str, now: float) -> None:
        """A learner of this name may contribute."""
        self._accounts.setdefault(name, _Account(now))

    def forget(self, name: str) -> None:
        """Forgets a name; its counted tokens stay."""
        self._accounts.pop(name, None)

    def age(self, fragment: int, now: float) -> float:
        """Seconds since the newest version of a fragment was published."""
        assert now >= self._since[fragment], "time does not run backwards"
        return now - self._since[fragment]

    def count(
        self,
        fragment: int,
        claims: Sequence[Claim],
        live: Collection[str],
        now: float,
        suspects: Collection[str] = (),
    ) -> list[int]:
        """Tokens of each contribution that count, in the order of `claims`.

        `live` names the learners that can contribute. Those of `suspects` count no faster than the
        median: whoever poisons the model may lie about its work as well. The clock goes on with
        `merged`.
        """
        age_s = self.age(fragment, now)
        for claim in claims:
            self.expect(claim.learner, now)
            seconds = min(claim.seconds, age_s)
            self._accounts[claim.learner].claim(min(claim.tokens, TOKENS_MAX), seconds, now)
        common = self._common_limit({*live, *(claim.learner for claim in claims)}, now)
        limits = {claim.learner: common for claim in claims}
        limits |= {name: common / MEDIAN_RATIO_MAX for name in limits.keys() & set(suspects)}
        counted = [
            min(c.tokens, int(self._limit(c.learner, limits[c.learner], now) * age_s), TOKENS_MAX)
            for c in claims
        ]
        assert all(0 <= n <= c.tokens for n, c in zip(counted, claims, strict=True))
        # A learner that was held back by others says nothing about its own rate.
        if common > 0.0:
            for claim, tokens in zip(claims, counted, strict=True):
                self._accounts[claim.learner].counted.add(tokens, min(claim.seconds, age_s))
        return counted

    def held_back(self, names: Collection[str]) -> dict[str, float]:
        """Tokens per second claimed by those of these names of which most does not count.

        Each is told once, and again after its tokens counted in full.
        """
        told: dict[str, float] = {}
        for name in sorted(names):
            account = self._accounts[name]
            # Few samples may still hold the wait for a broker that was away.
            if len(account.counted.samples) < SAMPLES:
                continue
            share = account.counted.usual / max(account.claimed.usual, 1.0)
            if share < TOLD_SHARE and not account.is_told:
                told[name] = account.claimed.usual
            account.is_told = share < (1.0 if account.is_told else TOLD_SHARE)
        return told

    def _common_limit(self, names: Collection[str], now: float) -> float:
        """Tokens per second that any of these names may count; infinite for one without others.

        It is 0 while the first of several is alone: a run must not jump to its goal by what one
        learner claims before another one could be heard.
        """
        accounts = [self._accounts[name] for name in sorted(names) if name in self._accounts]
        known = [account for account in accounts if account.claimed.samples]
        if len(known) >= 2:
            return MEDIAN_RATIO_MAX * median_low(account.claimed.usual for account in known)
        began_at = min((account.first_at for account in known), default=now)
        is_awaited = any(
            not account.claimed.samples
            and account.since < began_at
            and now < account.since + CLOCK_FIRST_S
            for account in self._accounts.values()
        )
        return 0.0 if is_awaited else math.inf

    def _limit(self, name: str, common: float, now: float) -> float:
        """Tokens per second that this name may count."""
        if limit := self.limit_of(name) or self.limit:
            return min(limit, TOKENS_PER_S_MAX)
        account = self._accounts[name]
        limit = account.alone(now) if common == math.inf else common
        if len(account.counted.samples) >= KNOWN_SAMPLES:
            limit = min(limit, OWN_RATIO_MAX * account.counted.usual)
        return min(limit, TOKENS_PER_S_MAX)

    def merged(self, fragment: int, counted: Sequence[int], now: float) -> None:
        """A round is durable: these tokens count from now on."""
        before = self.units
        self.units = min(self.units + sum(counted), TOKENS_MAX * self.fragments)
        self._since[fragment] = now
        self._marks.append((now, self.units))
        assert 0 <= before <= self.units, "the tokens of the run never fall"

    def tokens_per_s(self, now: float) -> float:
        """Speed of the clock over the last merges; 0 before the first one, and while none come."""
        (first_at, first_units), (last_at, last_units) = self._marks[0], self._marks[-1]
        if last_at <= first_at:
            return 0.0
        usual_s = (last_at - first_at) / (len(self._marks) - 1)
        if now - last_at > max(CLOCK_RESTS_S, RESTS_RATIO * usual_s):
            return 0.0
        # In the first second the time says more about the network than about the rate.
        rate = (last_units - first_units) / self.fragments / max(last_at - first_at, 1.0)
        return min(rate, TOKENS_PER_S_MAX)
