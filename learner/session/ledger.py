"""Accounts for every token: it has one fate per fragment. [pure]"""

from __future__ import annotations

from dataclasses import dataclass, field

from narrows.proto.messages import TokenLedger

MERGED_PUSHES_KEPT = 1024
"""Merged tokens are remembered for so many pushes, in case a broker falls back to before them."""


@dataclass
class FragmentAccount:
    """Tokens and steps since a fragment was adopted, and the fate of those before."""

    tokens: int = 0
    """Tokens since the last adoption (c_tokens)."""
    steps: int = 0
    """Steps since the last adoption (c_steps)."""
    merged: int = 0
    overwritten: int = 0
    refused: int = 0
    rolled_back: int = 0
    _merged_by_push: dict[int, int] = field(default_factory=dict[int, int])

    @property
    def total(self) -> int:
        """Tokens of all fates and of none yet."""
        return self.tokens + self.merged + self.overwritten + self.refused + self.rolled_back

    def step(self, tokens: int) -> None:
        """Counts an inner step, whose tokens are pending from now on."""
        assert tokens >= 0, tokens
        self.tokens += tokens
        self.steps += 1

    def adopt(self, push_id: int, *, merged: int, refused: int, rolled_back: bool) -> None:
        """Settles all tokens since the last adoption, whose parameters are replaced.

        The push `push_id` held some of them: `merged` if it was merged, `refused` if the broker
        refused it.
        """
        rest, before = self.tokens - merged - refused, self.total
        assert rest >= 0 and min(merged, refused) >= 0, (self.tokens, merged, refused)
        assert not (merged and refused), "a push has one outcome"
        self.merged += merged
        self.refused += refused
        # Steps after the push, or of a push that was not merged, are not in the adopted copy.
        if rolled_back:
            self.rolled_back += rest
        else:
            self.overwritten += rest
        if merged:
            assert push_id not in self._merged_by_push, f"push {push_id} is merged twice"
            self._merged_by_push[push_id] = merged
            if len(self._merged_by_push) > MERGED_PUSHES_KEPT:
                # The oldest goes first: brokers fall back by a few versions only.
                del self._merged_by_push[min(self._merged_by_push)]
        self.tokens = self.steps = 0
        assert self.total == before, (self.total, before)

    def close(self, push_id: int, *, merged: int, refused: int) -> None:
        """Settles a last push whose version is never adopted; the other tokens stay pending."""
        pending, before = self.tokens - merged - refused, self.total
        assert pending >= 0, (self.tokens, merged, refused)
        # Nothing overwrites the rest: the learner keeps its parameters as they are.
        self.tokens = merged + refused
        self.adopt(push_id, merged=merged, refused=refused, rolled_back=False)
        self.tokens = pending
        assert self.total == before, (self.total, before)

    def roll_back(self, push_id: int) -> None:
        """The broker's history holds our pushes up to this one: later merges are undone."""
        before = self.total
        for lost in sorted(each for each in self._merged_by_push if each > push_id):
            tokens = self._merged_by_push.pop(lost)
            self.merged -= tokens
            self.rolled_back += tokens
        assert self.merged >= 0 and self.total == before, (self.merged, self.total, before)


@dataclass
class Ledger:
    """The accounts of one incarnation over all fragments."""

    accounts: tuple[FragmentAccount, ...]
    logged: int = 0
    """Tokens of all steps, and of the steps that never happened."""
    skipped: int = 0
    """Tokens of the steps that never happened."""

    @property
    def learned(self) -> int:
        """Tokens of the steps that happened."""
        assert self.logged >= self.skipped, (self.logged, self.skipped)
        return self.logged - self.skipped

    def step(self, tokens: int) -> None:
        """Counts an inner step for every fragment."""
        self.logged += tokens
        for account in self.accounts:
            account.step(tokens)

    def skip(self, tokens: int) -> None:
        """Counts tokens that no step learned from."""
        assert tokens >= 0, tokens
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
