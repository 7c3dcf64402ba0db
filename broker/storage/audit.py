"""The audit of a journal: epochs rise, versions follow, no push is merged twice, tokens add up.

It knows only the records, nothing of the code that wrote them, so that it finds that code's errors.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from narrows.broker.storage.manifest import Start
from narrows.broker.storage.records import FateRecord, Head, LifeRecord, RoundRecord
from narrows.proto.limits import TOKENS_MAX


@dataclass
class Audit:
    """The counts and problems that `narrows journal audit` prints."""

    rounds: int = 0
    contributions: int = 0
    epochs: list[Start] = field(default_factory=list[Start])
    tokens: dict[tuple[str, str, int], int] = field(default_factory=dict[tuple[str, str, int], int])
    """Tokens merged, by learner, incarnation and fragment, those before the journal began too."""
    fates: dict[str, int] = field(default_factory=dict[str, int])
    problems: list[str] = field(default_factory=list[str])
    _forgotten: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    """(learner, incarnation) whose tokens are counted from 0 again if they return."""
    _pushes: set[tuple[str, str, int]] = field(default_factory=set[tuple[str, str, int]])
    _versions: dict[int, int] = field(default_factory=dict[int, int])

    def take(self, number: int, head: Head) -> None:
        """Checks the next record against those before it."""
        if isinstance(head, LifeRecord):
            if self.epochs and head.epoch <= self.epochs[-1]:
                self.problems.append(f"record {number}: epoch {head.epoch} after {self.epochs[-1]}")
            self.epochs.append(head.epoch)
            self._versions.update(enumerate(head.versions))
        elif isinstance(head, FateRecord):
            self.fates[head.what] = self.fates.get(head.what, 0) + 1
            if head.what == "forgotten":
                self._forgotten.add((head.learner, head.incarnation))
        elif isinstance(head, RoundRecord):
            self._round(number, head)

    def _round(self, number: int, head: RoundRecord) -> None:
        self.rounds += 1
        before = self._versions.get(head.fragment, head.version - 1)
        if head.version != before + 1:
            text = f"record {number}: version {head.version} of fragment {head.fragment}"
            gap = "; those between were never written" if head.version > before else ""
            self.problems.append(f"{text} after {before}{gap}")
        self._versions[head.fragment] = head.version
        # A weight is a float: a sum of a thousand of them may miss 1 by its rounding.
        if abs(sum(each.weight for each in head.contributors) - 1) > 1e-9:
            self.problems.append(f"record {number}: weights do not sum to 1")
        for each in head.contributors:
            self.contributions += 1
            push = each.learner, each.incarnation, each.push_id
            if push in self._pushes:
                self.problems.append(f"record {number}: push {push} is merged a second time")
            self._pushes.add(push)
            account = each.learner, each.incarnation, head.fragment
            # None where the journal was cut back: then the first record says what came before.
            known = self.tokens.get(account)
            if account[:2] in self._forgotten and each.merged_tokens == each.tokens:
                known = 0
            if known is not None and each.merged_tokens != min(known + each.tokens, TOKENS_MAX):
                self.problems.append(
                    f"record {number}: {each.merged_tokens} tokens of {account} after {known}"
                    f" and {each.tokens} more"
                )
            self.tokens[account] = each.merged_tokens
