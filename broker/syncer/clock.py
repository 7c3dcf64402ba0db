"""Counting of the run's tokens: sum over all learners, monotone, robust to wild reports. [pure]"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from narrows.proto.limits import TOKENS_MAX
from narrows.proto.timing import CLOCK_BURST_S, CLOCK_RESTS_S

RATE_RATIO_MAX = 8.0
"""A learner's tokens are accepted at up to this multiple of its own average."""

FIRST_REPORTS = 8
"""Reports with tokens that make an average: a single one may hold a part of a step's tokens."""

FIRST_TOKENS_MAX = 1 << 24
"""Tokens accepted from the first report with tokens, and from the FIRST_REPORTS after it together:
more than any learner makes in the second before a report."""

TOKENS_PER_S_MAX: Final = 1e18
"""The largest Rate that a message can carry. Wild reports of one learner must not make the Beats of
all others undecodable."""


@dataclass
class _Account:
    """Tokens of one incarnation: as reported, and as accepted."""

    reported: int
    accepted: int
    heard_at: float
    since: float | None = None
    """Start of the average: the time of the first tokens, later by all pauses since. The tokens of
    that report are left out: a wait or a compilation may have come before them."""
    grown_at: float = 0.0
    """Time of the last report that brought tokens."""
    made: int = 0
    """Tokens after `since`, as far as they were plausible when they came."""
    growths: int = 0
    """Reports that brought them."""
    allowance: float = 0.0
    """Tokens that may still be accepted now."""

    @property
    def rate(self) -> float:
        """Average tokens per second; 0 before the second report with tokens."""
        seconds = self.grown_at - self.since if self.since is not None else 0.0
        return self.made / seconds if seconds > 0 else 0.0

    def plausible(self, now: float) -> float:
        """Most tokens that a report may bring now.

        It is 8 times an average report, or 8 times the average rate times the time since the last
        one. The first lets a learner go on where it was after an evaluation or a slow step. The
        second accepts the tokens that it made while reports were lost.
        """
        if not self.growths:
            return FIRST_TOKENS_MAX
        waited_s = min(now - self.grown_at, CLOCK_BURST_S)
        usual = RATE_RATIO_MAX * max(self.made / self.growths, self.rate * waited_s)
        is_known = self.growths >= FIRST_REPORTS
        return usual if is_known else max(usual, FIRST_TOKENS_MAX - self.made)

    def grow(self, tokens: int, now: float) -> None:
        """Learns the average from a report that brought this many new tokens."""
        assert tokens > 0
        plausible = self.plausible(now)
        if self.since is None:
            self.since = self.grown_at = now
        else:
            fair = min(tokens, int(plausible))
            if self.rate > 0:
                # A pause is no slowness: a distance counts as at most 8 times what it should be.
                usual_s = RATE_RATIO_MAX * fair / self.rate
                self.since += max(0.0, now - self.grown_at - usual_s)
            self.made, self.growths, self.grown_at = self.made + fair, self.growths + 1, now
        self.allowance = max(self.allowance, plausible)
        assert self.made >= 0 and self.allowance >= 0.0

    def rests(self, now: float) -> bool:
        """True for a learner that makes no tokens now: it evaluates, waits, or is cut off."""
        if self.since is None or not self.growths:
            return True
        usual_s = (self.grown_at - self.since) / self.growths
        return now - self.grown_at > max(CLOCK_RESTS_S, RATE_RATIO_MAX * usual_s)


@dataclass
class RunClock:
    """Accepted tokens of the run and their rate.

    Reports are cumulative per incarnation, so a lost or repeated one changes nothing. Tokens beyond
    8 times the learner's average are not lost: they are accepted as time passes.
    """

    run_tokens: int = 0
    _accounts: dict[str, _Account] = field(default_factory=dict[str, _Account])

    def join(self, incarnation: str, tokens: int, now: float) -> None:
        """Starts to count an incarnation that has already reported `tokens` (0 at first)."""
        assert tokens >= 0
        if incarnation not in self._accounts:
            self._accounts[incarnation] = _Account(tokens, tokens, now)

    def keep(self, incarnations: set[str]) -> None:
        """Forgets all others; their accepted tokens stay."""
        self._accounts = {i: a for i, a in self._accounts.items() if i in incarnations}

    def report(self, incarnation: str, tokens: int, now: float) -> None:
        """Takes a cumulative token count in."""
        account = self._accounts[incarnation]
        assert now >= account.heard_at, "time does not run backwards"
        rate, waited_s = account.rate, now - account.heard_at
        grown = account.allowance + RATE_RATIO_MAX * rate * waited_s
        account.allowance = min(grown, RATE_RATIO_MAX * rate * CLOCK_BURST_S)
        account.heard_at = now
        known = max(account.reported, account.accepted)
        if is_growth := tokens > known:
            account.grow(tokens - known, now)
        account.reported = tokens  # The last word: a wild count was a mistake and is taken back.
        granted = min(max(tokens - account.accepted, 0), int(account.allowance))
        account.accepted += granted
        # What was not needed does not pile up, or a wild report would get it all.
        account.allowance = 0.0 if is_growth else account.allowance - granted
        before, self.run_tokens = self.run_tokens, min(self.run_tokens + granted, TOKENS_MAX)
        assert 0 <= before <= self.run_tokens, "the tokens of the run never fall"
        assert account.allowance >= 0.0

    def tokens_per_s(self, incarnations: list[str], now: float) -> float:
        """Sum of the average rates of the given incarnations, leaving out those that rest."""
        rate = 0.0
        for incarnation in incarnations:
            account = self._accounts.get(incarnation)
            if account and account.since is not None and not account.rests(now):
                # In the first second the time says more about the network than about the rate.
                rate += account.made / max(account.grown_at - account.since, 1.0)
        assert rate >= 0.0
        return min(rate, TOKENS_PER_S_MAX)
