"""Counters of a run that operators and benches read. [pure]"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Tally:
    """What happened since the broker started. Times in seconds on the caller's clock."""

    started_at: float
    merges: int = 0
    contributions_merged: int = 0
    refused: dict[str, int] = field(default_factory=dict[str, int])
    norms_clipped: int = 0
    longest_gap_s: float = 0.0
    last_merge_at: float | None = None

    def merged(self, contributors: int, clipped: int, now: float) -> None:
        if self.last_merge_at is not None:
            self.longest_gap_s = max(self.longest_gap_s, now - self.last_merge_at)
        self.last_merge_at = now
        self.merges += 1
        self.contributions_merged += contributors
        self.norms_clipped += clipped

    def refuse(self, code: str) -> None:
        self.refused[code] = self.refused.get(code, 0) + 1

    @property
    def mean_contributors(self) -> float:
        return self.contributions_merged / self.merges if self.merges else 0.0
