"""The run's clock: tokens of all learners, monotone, robust against wild reports. [pure]"""

from __future__ import annotations

from dataclasses import dataclass, field

from narrows.proto.limits import TOKENS_MAX
from narrows.proto.timing import CLOCK_BURST_S, CLOCK_RESTS_S

RATE_RATIO_MAX = 8.0
"""A learner's tokens are accepted at up to this multiple of its own average."""

FIRST_REPORTS = 8
"""So many reports with tokens make an average: a single one may hold a part of a step's tokens."""

FIRST_TOKENS_MAX = 1 << 24
"""Accepted from the first report with tokens, and from the FIRST_REPORTS after it together: more
than any learner makes in the second before a report."""


@dataclass
class _Account:
    reported: int
    accepted: int
    heard_at: float
    since: float | None = None
    """When the first tokens came, later by all pauses since: the average begins there. What came
    with that report took nobody knows how long: a wait for other learners, a compilation."""
    grown_at: float = 0.0
    """When the last tokens came."""
    made: int = 0
    """Tokens after `since`, as far as they were plausible when they came."""
    growths: int = 0
    """Reports that brought them."""
    allowance: float = 0.0

    @property
    def rate(self) -> float:
        """Average tokens per second; 0 before the second report with tokens."""
        seconds = self.grown_at - self.since if self.since is not None else 0.0
        return self.made / seconds if seconds > 0 else 0.0

    def plausible(self, now: float) -> float:
        """Most that a report may bring now: 8 times an average one, or 8 times what the average
        rate makes of the time since the last one.

        The first lets a learner go on where it was after an evaluation or a slow step; the second
        accepts what was made while reports were lost.
        """
        if not self.growths:
            return FIRST_TOKENS_MAX
        waited_s = min(now - self.grown_at, CLOCK_BURST_S)
        usual = RATE_RATIO_MAX * max(self.made / self.growths, self.rate * waited_s)
        is_known = self.growths >= FIRST_REPORTS
        return usual if is_known else max(usual, FIRST_TOKENS_MAX - self.made)

    def grow(self, tokens: int, now: float) -> None:
        """A report has brought so many new tokens: learns the average."""
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

    def rests(self, now: float) -> bool:
        """It makes no tokens now: it evaluates, waits, or is cut off."""
        if self.since is None or not self.growths:
            return True
        usual_s = (self.grown_at - self.since) / self.growths
        return now - self.grown_at > max(CLOCK_RESTS_S, RATE_RATIO_MAX * usual_s)


@dataclass
class RunClock:
    """Accepted tokens of the run and their rate.

    Reports are cumulative per incarnation, so a lost or repeated one changes nothing. What one
    claims beyond 8 times the learner's average is not lost: it is accepted as time passes.
    """

    run_tokens: int = 0
    _accounts: dict[str, _Account] = field(default_factory=dict[str, _Account])

    def join(self, incarnation: str, tokens: int, now: float) -> None:
        """Starts to count an incarnation that has already reported `tokens` (0 at first)."""
        if incarnation not in self._accounts:
            self._accounts[incarnation] = _Account(tokens, tokens, now)

    def keep(self, incarnations: set[str]) -> None:
        """Forgets all others; their accepted tokens stay."""
        self._accounts = {i: a for i, a in self._accounts.items() if i in incarnations}

    def report(self, incarnation: str, tokens: int, now: float) -> None:
        """Takes a cumulative token count in."""
        account = self._accounts[incarnation]
        rate, waited_s = account.rate, now - account.heard_at
        grown = account.allowance + RATE_RATIO_MAX * rate * waited_s
        account.allowance = min(grown, RATE_RATIO_MAX * rate * CLOCK_BURST_S)
        account.heard_at = now
        known = max(account.reported, account.accepted)
        if is_growth := tokens > known:
            account.grow(tokens - known, now)
        account.reported = tokens  # The last word: a wild count that was a mistake is taken back.
        granted = min(max(tokens - account.accepted, 0), int(account.allowance))
        account.accepted += granted
        # What was not needed does not pile up, or a wild report would get it all.
        account.allowance = 0.0 if is_growth else account.allowance - granted
        self.run_tokens = min(self.run_tokens + granted, TOKENS_MAX)

    def tokens_per_s(self, incarnations: list[str], now: float) -> float:
        """Sum of the average rates of the incarnations named, of those that make tokens now."""
        rate = 0.0
        for incarnation in incarnations:
            account = self._accounts.get(incarnation)
            if account and account.since is not None and not account.rests(now):
                # In the first second the time says more about the network than about the rate.
                rate += account.made / max(account.grown_at - account.since, 1.0)
        return rate
