"""What the records of a journal must add up to: epochs, versions, pushes, tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

from narrows.broker.storage.manifest import Start
from narrows.broker.storage.records import FateRecord, Head, LifeRecord, RoundRecord


@dataclass
class Audit:
    """What `narrows journal audit` checks and counts."""

    rounds: int = 0
    contributions: int = 0
    epochs: list[Start] = field(default_factory=list[Start])
    tokens: dict[tuple[str, str, int], int] = field(default_factory=dict[tuple[str, str, int], int])
    """Merged, by learner, incarnation and fragment; those before the journal's beginning too."""
    fates: dict[str, int] = field(default_factory=dict[str, int])
    problems: list[str] = field(default_factory=list[str])
    _forgotten: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    """Learners and incarnations whose tokens are counted from 0 again if they return."""
    _pushes: set[tuple[str, str, int]] = field(default_factory=set[tuple[str, str, int]])
    _versions: dict[int, int] = field(default_factory=dict[int, int])

    def take(self, number: int, head: Head) -> None:
        """Takes a record in."""
        if isinstance(head, LifeRecord):
            if self.epochs and head.epoch <= self.epochs[-1]:
                self.problems.append(f"record {number}: epoch {head.epoch} after {self.epochs[-1]}")
            self.epochs.append(head.epoch)
            self._versions.update(enumerate(head.versions))
        elif isinstance(head, FateRecord):
            self.fates[head.what] = self.fates.get(head.what, 0) + 1
            if head.what == "forgotten":
                self._forgotten.add((head.learner, head.incarnation))
        else:
            self._round(number, head)

    def _round(self, number: int, head: RoundRecord) -> None:
        self.rounds += 1
        before = self._versions.get(head.fragment, head.version - 1)
        if head.version != before + 1:
            text = f"record {number}: version {head.version} of fragment {head.fragment}"
            gap = "; those between were never written" if head.version > before else ""
            self.problems.append(f"{text} after {before}{gap}")
        self._versions[head.fragment] = head.version
        if abs(sum(each.weight for each in head.contributors) - 1) > 1e-9:
            self.problems.append(f"record {number}: weights do not sum to 1")
        for each in head.contributors:
            self.contributions += 1
            push = each.learner, each.incarnation, each.push_id
            if push in self._pushes:
                self.problems.append(f"record {number}: push {push} is merged a second time")
            self._pushes.add(push)
            account = each.learner, each.incarnation, head.fragment
            known = self.tokens.get(account)
            if account[:2] in self._forgotten and each.merged_tokens == each.tokens:
                known = 0
            if known is not None and each.merged_tokens != known + each.tokens:
                self.problems.append(
                    f"record {number}: {each.merged_tokens} tokens of {account} after {known}"
                    f" and {each.tokens} more"
                )
            self.tokens[account] = each.merged_tokens
