"""Every token has one fate per fragment: pending, merged, overwritten, refused, ... [pure]"""

from __future__ import annotations

from dataclasses import dataclass, field

from narrows.proto.messages import TokenLedger

MERGED_PUSHES_KEPT = 1024
"""Merged tokens are remembered by push for so long, in case a broker falls back."""


@dataclass
class FragmentAccount:
    """Tokens and steps since a fragment was adopted, and what became of those before."""

    tokens: int = 0
    """Since the last adoption (c_tokens)."""
    steps: int = 0
    """Since the last adoption (c_steps)."""
    merged: int = 0
    overwritten: int = 0
    refused: int = 0
    rolled_back: int = 0
    _merged_by_push: dict[int, int] = field(default_factory=dict[int, int])

    def step(self, tokens: int) -> None:
        self.tokens += tokens
        self.steps += 1

    def adopt(self, push_id: int, *, merged: int, refused: int, rolled_back: bool) -> None:
        """Settles all tokens since the last adoption, whose parameters are replaced.

        The push `push_id` held some of them: `merged` if it was merged, `refused` if the broker
        refused it.
        """
        rest = self.tokens - merged - refused
        assert rest >= 0 and min(merged, refused) >= 0, (self.tokens, merged, refused)
        self.merged += merged
        self.refused += refused
        if rolled_back:
            self.rolled_back += rest
        else:
            self.overwritten += rest
        if merged:
            self._merged_by_push[push_id] = merged
            if len(self._merged_by_push) > MERGED_PUSHES_KEPT:
                del self._merged_by_push[min(self._merged_by_push)]
        self.tokens = self.steps = 0

    def close(self, push_id: int, *, merged: int, refused: int) -> None:
        """Settles a last push whose version is never adopted; what is left stays pending."""
        pending = self.tokens - merged - refused
        self.tokens = merged + refused
        self.adopt(push_id, merged=merged, refused=refused, rolled_back=False)
        self.tokens = pending

    def roll_back(self, push_id: int) -> None:
        """The broker's history holds our pushes up to this one: what was merged later is undone."""
        for lost in sorted(each for each in self._merged_by_push if each > push_id):
            tokens = self._merged_by_push.pop(lost)
            self.merged -= tokens
            self.rolled_back += tokens


@dataclass
class Ledger:
    """The accounts of one incarnation over all fragments."""

    accounts: tuple[FragmentAccount, ...]
    logged: int = 0
    """Tokens of all steps, and of the steps that never happened."""
    skipped: int = 0

    def step(self, tokens: int) -> None:
        self.logged += tokens
        for account in self.accounts:
            account.step(tokens)

    def skip(self, tokens: int) -> None:
        self.logged += tokens
        self.skipped += tokens

    def total(self) -> TokenLedger:
        """Sums over the fragments; asserts that every token has exactly one fate."""
        accounts = self.accounts
        total = TokenLedger(
            logged=self.logged,
            pending=sum(account.tokens for account in accounts),
            merged=sum(account.merged for account in accounts),
            overwritten=sum(account.overwritten for account in accounts),
            refused=sum(account.refused for account in accounts),
            rolled_back=sum(account.rolled_back for account in accounts),
            skipped=self.skipped * len(accounts),
        )
        fates = (
            total.pending
            + total.merged
            + total.overwritten
            + total.refused
            + total.rolled_back
            + total.skipped
        )
        assert self.logged * len(accounts) == fates, total
        return total
