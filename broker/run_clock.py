"""The run's clock: tokens of all learners, monotone, robust against wild reports. [pure]"""

from __future__ import annotations

from dataclasses import dataclass, field

from narrows.proto.limits import TOKENS_MAX

RATE_RATIO_MAX = 8.0
"""A learner's tokens are accepted at up to this multiple of its own average rate."""

FIRST_REPORT_TOKENS_MAX = 1 << 24
"""Accepted from the first report, which has no average to be compared with: more than any
learner makes in the second before it."""

BURST_S = 60.0
"""Allowance that may pile up while a learner's reports are delayed."""


@dataclass
class _Account:
    reported: int
    accepted: int
    first_at: float
    last_at: float
    allowance: float
    first_accepted: int = 0


@dataclass
class RunClock:
    """Accepted tokens of the run and their rate.

    Reports are cumulative per incarnation, so a lost or repeated one changes nothing. What a
    report claims beyond 8x the learner's average is not lost: it is accepted as time passes.
    """

    run_tokens: int = 0
    _accounts: dict[str, _Account] = field(default_factory=dict[str, _Account])

    def join(self, incarnation: str, tokens: int, now: float) -> None:
        """Starts to count an incarnation that has already reported `tokens` (0 at first)."""
        if incarnation not in self._accounts:
            self._accounts[incarnation] = _Account(tokens, tokens, now, now, 0.0, tokens)

    def keep(self, incarnations: set[str]) -> None:
        """Forgets all others; their accepted tokens stay."""
        self._accounts = {i: a for i, a in self._accounts.items() if i in incarnations}

    def report(self, incarnation: str, tokens: int, now: float) -> None:
        """Takes a cumulative token count in."""
        account = self._accounts[incarnation]
        account.reported = max(account.reported, tokens)
        elapsed_s = now - account.first_at
        mean_rate = (account.accepted - account.first_accepted) / elapsed_s if elapsed_s > 0 else 0
        grown = account.allowance + RATE_RATIO_MAX * mean_rate * (now - account.last_at)
        account.allowance = min(grown, RATE_RATIO_MAX * mean_rate * BURST_S)
        account.last_at = now
        wanted = account.reported - account.accepted
        if account.accepted == account.first_accepted:
            granted = min(wanted, FIRST_REPORT_TOKENS_MAX)  # It sets the average.
        else:
            granted = min(wanted, int(account.allowance))
            account.allowance -= granted
        account.accepted += granted
        self.run_tokens = min(self.run_tokens + granted, TOKENS_MAX)

    def tokens_per_s(self, incarnations: list[str], now: float) -> float:
        """Sum of the average rates of the incarnations named."""
        rate = 0.0
        for incarnation in incarnations:
            account = self._accounts.get(incarnation)
            if account:
                # In the first second the time says more about the network than about the rate.
                elapsed_s = max(now - account.first_at, 1.0)
                rate += (account.accepted - account.first_accepted) / elapsed_s
        return rate
