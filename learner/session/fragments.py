"""All fragments of a learner: what to fetch, which rounds to answer, what is still open. [pure]"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from narrows.learner.session import events as ev
from narrows.learner.session.fragment import Link
from narrows.learner.session.ledger import FragmentAccount, Ledger
from narrows.proto import messages as msg
from narrows.proto.errors import ErrorCode
from narrows.proto.fragments import Fragment
from narrows.proto.terms import Ranges
from narrows.proto.timing import ANSWER_AGAIN_S

FETCHES_MAX = 4
"""Whole fragments that a joiner fetches at the same time, so that each gets done."""


class Links:
    """The links of one learner by fragment, and the ledger over them."""

    def __init__(self, table: Sequence[Fragment] = ()) -> None:
        self._links = tuple(Link(fragment, FragmentAccount()) for fragment in table)
        self.ledger = Ledger(tuple(link.account for link in self._links))
        self._push_id = 0
        #: What of version 0 the broker waits for: ranges by fragment, () for all elements.
        self.to_found: dict[int, Ranges] = {}
        self._founded_in: msg.Epoch | None = None
        #: What goes wrong at a fragment, by kind, until a push of it is merged again.
        self._ails: dict[int, str] = {}
        #: When rounds to which a push has failed are answered anew.
        self.retry_at = math.inf

    def __iter__(self) -> Iterator[Link]:
        return iter(self._links)

    def __len__(self) -> int:
        return len(self._links)

    def __getitem__(self, index: int) -> Link:
        return self._links[index]

    @property
    def table(self) -> tuple[Fragment, ...]:
        return tuple(link.fragment for link in self._links)

    @property
    def ready(self) -> bool:
        """Every fragment has been adopted at least once."""
        return bool(self._links) and all(link.adopted >= 0 for link in self._links)

    @property
    def adopted(self) -> tuple[int, ...]:
        return tuple(link.adopted for link in self._links)

    @property
    def held(self) -> tuple[int, ...]:
        """Newest version per fragment; none before there is one of each."""
        return tuple(max(link.held, 0) for link in self._links) if self.ready else ()

    @property
    def unfinished(self) -> list[Link]:
        """Of these the parameters are not the newest version that the broker has told, or hold
        more than that."""
        return [
            link
            for link in self._links
            if link.behind or link.fresh or link.applying or link.account.steps
        ]

    @property
    def wants_boundary(self) -> bool:
        """A copy waits to be adopted, a round to be answered, or the broker for version 0."""
        return bool(self.to_found) or any(link.fresh or link.unanswered for link in self._links)

    @property
    def pushing(self) -> list[Link]:
        """Of these the outcome of a push is not known yet."""
        return [link for link in self._links if link.push and link.push.merged is None]

    def fetching(self) -> list[Link]:
        """Links that are behind; of those that hold nothing only the first few."""
        behind = [link for link in self._links if link.behind and link.applying is None]
        gaps = [link for link in behind if link.held >= 0]
        return gaps + [link for link in behind if link.held < 0][:FETCHES_MAX]

    def tell(self, rounds: Sequence[msg.OpenRound], versions: Sequence[int], now: float) -> None:
        """The broker's open rounds and newest versions (none while it founds)."""
        by_fragment = {round_.fragment: round_ for round_ in rounds}
        for link in self._links:
            link.round = by_fragment.get(link.index)
        for link, version in zip(self._links, versions, strict=False):
            link.tell(version, now)

    def welcomed(
        self, heads: Sequence[msg.FragmentHead], *, restarted: bool, now: float
    ) -> list[ev.Effect]:
        """The broker admits this learner (again). It has no heads before version 0 stands: if it
        `restarted`, what is held here is not of its history."""
        if restarted and not heads:
            heads = [msg.FragmentHead(-1, 0)] * len(self)
        effects: list[ev.Effect] = []
        for link, head in zip(self._links, heads, strict=False):
            effects += link.welcomed(head, restarted=restarted, now=now)
        back = [link.known for link in self._links if restarted and link.fallen_back]
        if back:
            text = (
                f"{len(back)} of {len(self)} fragments go back to the broker's versions "
                f"{min(back)}..{max(back)}; what was merged after them is lost"
            )
            effects.append(ev.Note("warning", text))
        return effects

    def found_all(self, epoch: msg.Epoch) -> None:
        """Sends version 0, once per epoch: what is lost then is asked for by range."""
        if self._founded_in != epoch:
            self._founded_in = epoch
            self.to_found = dict.fromkeys(range(len(self)), ())

    def found(self) -> list[ev.Effect]:
        """Reads what the broker waits for; the training thread stands at a boundary."""
        asked, self.to_found = self.to_found, {}
        return [ev.SendFounding(fragment, ranges) for fragment, ranges in asked.items()]

    def adopt(self, *, final: bool) -> list[ev.Effect]:
        """Adopts every fresh copy; the training thread stands at a boundary.

        `final`: no round will take what was learned since the last adoption, a step that was
        under way when the run ended; only what is published is the run's model.
        """
        for link in self._links:
            if final and link.account.steps and link.held >= 0 and not link.behind:
                link.fresh = True
        return [effect for link in self._links if link.fresh for effect in link.adopt()]

    def snapshot(self, step: int, *, any_step: bool) -> list[ev.Effect]:
        """Answers the open rounds that are due at this boundary."""
        effects: list[ev.Effect] = []
        for link in self._links:
            if link.wants_snapshot(step, any_step=any_step):
                self._push_id += 1
                effects += link.snapshot(self._push_id)
        return effects

    def decline(self, reason: str, *, stopped: bool) -> list[ev.Effect]:
        """Declines rounds that will get nothing: all if there is a `reason`; when training has
        stopped, those of fragments without a step since they were adopted."""
        effects: list[ev.Effect] = []
        for link in self._links:
            if reason or (stopped and link.account.steps == 0 and not link.fresh):
                effects += link.decline(reason or "no step since it adopted")
        return effects

    def applied(self, fragment: int, version: int, digest: int) -> list[ev.Effect]:
        """See Link.applied."""
        effects = self._links[fragment].applied(version, digest)
        if any(isinstance(effect, ev.SettlePush) and effect.merged for effect in effects):
            self._ails.pop(fragment, None)
        return effects

    def apply_failed(self, event: ev.ApplyFailed) -> list[ev.Effect]:
        """See Link.apply_failed."""
        link = self._links[event.fragment]
        effects = link.apply_failed(event.version, event.digest, event.reason)
        if event.reason:
            effects.append(self._note(link.index, "cannot be applied now", event.reason))
        return effects

    def encode_failed(self, push_id: int, reason: str, now: float) -> list[ev.Effect]:
        """The push cannot be sent."""
        link = self.pushed(push_id)
        self.retry_at = min(self.retry_at, now + ANSWER_AGAIN_S)
        if link is None:
            return []
        return [self._note(link.index, "is not sent", reason), *link.encode_failed(reason)]

    def copy_failed(self, copy: ev.Copy, reason: str, now: float) -> list[ev.Effect]:
        """Nothing is taken to be done that was not: what was to be copied is due again."""
        match copy:
            case ev.Snapshot(_, _, push_id):
                return self.encode_failed(push_id, reason, now)
            case ev.Adopt(fragment):
                note = self._note(fragment, "is not adopted, again at the next boundary", reason)
                return [note, *self._links[fragment].adopt_failed(reason)]
            case ev.SendFounding(fragment, ranges):
                self.to_found.setdefault(fragment, ranges)
                return [self._note(fragment, "is not founded, again at the next boundary", reason)]

    def _note(self, fragment: int, what: str, reason: str) -> ev.Note:
        """Loud for the first of its kind: a lack of memory would else be told with every round."""
        kind = reason.partition(":")[0]
        level = "debug" if kind in self._ails.values() else "error"
        self._ails[fragment] = kind
        return ev.Note(level, f"fragment {fragment} {what}: {reason}")

    def answer_again(self) -> None:
        """Rounds that were declined, or to which the push has failed, may be answered after all."""
        for link in self._links:
            if link.push is None or link.push.merged is False:
                link.answered = (-1, -1)

    def refused(self, refuse: msg.Refuse, now: float) -> list[ev.Effect]:
        """The broker does not take a push."""
        link = self.pushed(refuse.push_id)
        if refuse.code != ErrorCode.PUSH_CONFLICT:  # That stays so until there is a version.
            self.retry_at = min(self.retry_at, now + ANSWER_AGAIN_S)
        return link.refused(refuse) if link else []

    def retry(self, now: float) -> None:
        """The broker does not ask again while a round is open: what failed is tried again here."""
        if now >= self.retry_at:
            self.retry_at = math.inf
            self.answer_again()

    def pushed(self, push_id: int) -> Link | None:
        """The link whose newest push this is."""
        for link in self._links:
            if link.push is not None and link.push.announced.push_id == push_id:
                return link
        return None

    def close(self) -> list[ev.Effect]:
        """The learner leaves."""
        return [effect for link in self._links for effect in link.close()]

    def check(self) -> None:
        self.ledger.total()
        for link in self._links:
            link.check()
