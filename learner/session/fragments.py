"""Exchanges all fragments: chooses what to fetch, which rounds to answer, what to repeat. [pure]"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from narrows.learner.session import events as ev
from narrows.learner.session.fragment import FragmentSession
from narrows.learner.session.ledger import FragmentAccount, Ledger
from narrows.proto import messages as msg
from narrows.proto.errors import ErrorCode
from narrows.proto.fragments import Fragment
from narrows.proto.terms import Ranges
from narrows.proto.timing import ANSWER_AGAIN_S

FETCHES_MAX = 4
"""Whole fragments that a joiner fetches at the same time. With all at once a slow line would
complete none of them for long."""


class FragmentSessions:
    """The sessions of all fragments of one learner, by index, and the ledger over them."""

    def __init__(self, table: Sequence[Fragment] = ()) -> None:
        assert [fragment.index for fragment in table] == [*range(len(table))], table
        self.table = tuple(table)
        self._sessions = tuple(FragmentSession(fragment, FragmentAccount()) for fragment in table)
        self.ledger = Ledger(tuple(each.account for each in self._sessions))
        #: Version in the parameters by fragment; -1 before the first adoption. Kept, not computed:
        #: it is shown to other threads after every event, and changes only when they adopt.
        self.adopted = (-1,) * len(self._sessions)
        self._push_id = 0
        #: Parts of version 0 that the broker waits for: ranges by fragment, () for all elements.
        self.to_found: dict[int, Ranges] = {}
        self._founded_in: msg.Epoch | None = None
        #: Kinds of failures by fragment, until a push of it is merged again.
        self._ails: dict[int, str] = {}
        #: Time at which rounds whose push has failed are answered anew.
        self.retry_at = math.inf

    def __iter__(self) -> Iterator[FragmentSession]:
        return iter(self._sessions)

    def __len__(self) -> int:
        return len(self._sessions)

    def __getitem__(self, index: int) -> FragmentSession:
        assert 0 <= index < len(self._sessions), "indices of peers are checked where they come in"
        return self._sessions[index]

    @property
    def ready(self) -> bool:
        """Every fragment has been adopted at least once."""
        return bool(self.adopted) and min(self.adopted) >= 0

    @property
    def held(self) -> tuple[int, ...]:
        """Newest version by fragment; empty before there is one of each."""
        # A copy that is fetched anew is held as -1; version 0 claims nothing of any history.
        return tuple(max(each.held, 0) for each in self._sessions) if self.ready else ()

    @property
    def unfinished(self) -> list[FragmentSession]:
        """Fragments whose parameters are not exactly the broker's newest version: a newer one is
        on its way, or a step has changed them since."""
        return [
            each
            for each in self._sessions
            if each.behind or each.fresh or each.applying or each.account.steps
        ]

    @property
    def wants_boundary(self) -> bool:
        """A copy waits to be adopted, a round to be answered, or the broker for version 0."""
        return bool(self.to_found) or any(each.fresh or each.unanswered for each in self._sessions)

    @property
    def pushing(self) -> list[FragmentSession]:
        """Fragments whose push has no outcome yet."""
        return [each for each in self._sessions if each.push is not None and each.push.is_open]

    def fetching(self) -> list[FragmentSession]:
        """Fragments that are behind; of those that hold nothing only the first FETCHES_MAX."""
        behind = [each for each in self._sessions if each.behind and each.applying is None]
        gaps = [each for each in behind if each.held >= 0]
        return gaps + [each for each in behind if each.held < 0][:FETCHES_MAX]

    def note_newest(
        self, rounds: Sequence[msg.OpenRound], versions: Sequence[int], now: float
    ) -> None:
        """The broker's open rounds and newest versions (none while the run is founded)."""
        # The broker names all open rounds: a round that it leaves out is over.
        by_fragment = {round_.fragment: round_ for round_ in rounds}
        for session in self._sessions:
            session.round = by_fragment.get(session.index)
        for session, version in zip(self._sessions, versions, strict=False):
            session.note_newest(version, now)

    def welcomed(
        self, heads: Sequence[msg.FragmentHead], *, restarted: bool, now: float
    ) -> list[ev.Effect]:
        """The broker admits this learner (again), and tells its version and digest by fragment.

        `restarted`: it may have another history than we know.
        """
        if restarted and not heads:
            # It has no heads before version 0 stands: all that is held here is of another history.
            heads = [msg.FragmentHead(-1, 0)] * len(self)
        effects: list[ev.Effect] = []
        for session, head in zip(self._sessions, heads, strict=False):
            effects += session.welcomed(head, restarted=restarted, now=now)
        back = [each.known for each in self._sessions if restarted and each.fallen_back]
        if back:
            text = (
                f"{len(back)} of {len(self)} fragments go back to the broker's versions "
                f"{min(back)}..{max(back)}; what was merged after them is lost"
            )
            effects.append(ev.Note("warning", text))
        return effects

    def found_all(self, epoch: msg.Epoch) -> None:
        """The broker wants version 0. It is read once per epoch; gaps are asked for by range."""
        # A Welcome that is repeated must not have the founder send everything twice.
        if self._founded_in != epoch:
            self._founded_in = epoch
            self.to_found = dict.fromkeys(range(len(self)), ())

    def found_again(self, fragment: int, ranges: Ranges) -> None:
        """The broker lacks these ranges of version 0; () for all elements."""
        assert 0 <= fragment < len(self), fragment
        self.to_found.setdefault(fragment, ranges)

    def send_founding(self) -> list[ev.Effect]:
        """Reads the parts of version 0 that are due; the training thread is at a boundary."""
        asked, self.to_found = self.to_found, {}
        assert all(0 <= fragment < len(self) for fragment in asked), asked
        return [ev.SendFounding(fragment, ranges) for fragment, ranges in asked.items()]

    def adopt(self, *, final: bool) -> list[ev.Effect]:
        """Adopts every fresh copy; the training thread is at a boundary.

        `final`: the run has ended. No round will take a step that was under way then, and only the
        published copies are the run's model: they replace the parameters once more.
        """
        for session in self._sessions:
            if final and session.account.steps and session.held >= 0 and not session.behind:
                # The same version once more: it undoes the step that came too late.
                session.fresh = True
        effects = [effect for each in self._sessions if each.fresh for effect in each.adopt()]
        if effects:
            self.adopted = tuple(each.adopted for each in self._sessions)
        return effects

    def snapshot(self, step: int, *, any_step: bool) -> list[ev.Effect]:
        """Answers the open rounds that are due at this boundary."""
        effects: list[ev.Effect] = []
        for session in self._sessions:
            if session.wants_snapshot(step, any_step=any_step):
                # Ids rise over all fragments: an outcome names its push by the id alone.
                self._push_id += 1
                effects += session.snapshot(self._push_id)
        return effects

    def decline(
        self, reason: str, *, stopped: bool, stuck_at: int | None = None
    ) -> list[ev.Effect]:
        """Declines rounds that will get no push, so that nobody waits for this learner.

        With a `reason` these are all rounds. Otherwise they are those of fragments without a step
        since their adoption, if no step will come: training has stopped, or lockstep lets this
        learner not go beyond step `stuck_at`, and the round wants a snapshot at that step or an
        earlier one (after a broker's older state).
        """
        effects: list[ev.Effect] = []
        for session in self._sessions:
            round_ = session.round
            passed = stuck_at is not None and round_ is not None and 0 <= round_.at_step <= stuck_at
            without_step = session.account.steps == 0 and not session.fresh
            if reason or ((stopped or passed) and without_step):
                effects += session.decline(reason or "no step since it adopted")
        return effects

    def applied(self, fragment: int, version: int, digest: int) -> list[ev.Effect]:
        """See FragmentSession.applied."""
        effects = self._sessions[fragment].applied(version, digest)
        # After a push that was merged the next failure is news again.
        if any(isinstance(effect, ev.SettlePush) and effect.merged for effect in effects):
            self._ails.pop(fragment, None)
        return effects

    def apply_failed(self, event: ev.ApplyFailed) -> list[ev.Effect]:
        """See FragmentSession.apply_failed."""
        session = self._sessions[event.fragment]
        effects = session.apply_failed(event.version, event.digest, event.reason)
        if event.reason:
            effects.append(self._note(session.index, "cannot be applied now", event.reason))
        return effects

    def encode_failed(self, push_id: int, reason: str, now: float) -> list[ev.Effect]:
        """The push cannot be sent."""
        session = self.pushed(push_id)
        self.retry_at = min(self.retry_at, now + ANSWER_AGAIN_S)
        if session is None:
            return []
        return [self._note(session.index, "is not sent", reason), *session.encode_failed(reason)]

    def copy_failed(self, copy: ev.Copy, reason: str, now: float) -> list[ev.Effect]:
        """The session took the copy as made when it asked for it: the copy is due again."""
        match copy:
            case ev.Snapshot(_, _, push_id):
                return self.encode_failed(push_id, reason, now)
            case ev.Adopt(fragment):
                note = self._note(fragment, "is not adopted, again at the next boundary", reason)
                return [note, *self._sessions[fragment].adopt_failed(reason)]
            case ev.SendFounding(fragment, ranges):
                self.found_again(fragment, ranges)
                return [self._note(fragment, "is not founded, again at the next boundary", reason)]

    def _note(self, fragment: int, what: str, reason: str) -> ev.Note:
        """A line for the user: loud for the first failure of its kind only. A lack of memory would
        otherwise be logged with every round."""
        assert 0 <= fragment < len(self), fragment
        kind = reason.partition(":")[0]
        level = "debug" if kind in self._ails.values() else "error"
        self._ails[fragment] = kind
        return ev.Note(level, f"fragment {fragment} {what}: {reason}")

    def answer_again(self) -> None:
        """Rounds that were declined, or whose push has failed, may be answered after all."""
        for session in self._sessions:
            if session.push is None or session.push.merged is False:
                session.answered = (-1, -1)

    def refused(self, refuse: msg.Refuse, now: float) -> list[ev.Effect]:
        """The broker does not take a push."""
        session = self.pushed(refuse.push_id)
        # A conflict stays one until there is a new version: to push again would not help.
        if refuse.code != ErrorCode.PUSH_CONFLICT:
            self.retry_at = min(self.retry_at, now + ANSWER_AGAIN_S)
        return session.refused(refuse) if session else []

    def retry(self, now: float) -> None:
        """Tries again after a push that failed: the broker does not ask twice in one round."""
        if now >= self.retry_at:
            self.retry_at = math.inf
            self.answer_again()

    def pushed(self, push_id: int) -> FragmentSession | None:
        """The fragment whose newest push this is; None for one that is over, or never was."""
        for session in self._sessions:
            if session.push is not None and session.push.announced.push_id == push_id:
                return session
        return None

    def missing(self, missing: msg.Missing) -> list[ev.Effect]:
        """The broker asks again for what it lacks of a push, or of version 0."""
        if missing.kind is msg.DataKind.FOUND and missing.fragment < len(self):
            self.found_again(missing.fragment, missing.ranges)
            return []
        fragment = self.pushed(missing.push_id)
        if fragment is None or fragment.push is None:
            return []
        # The announcement may be what is missing: with all chunks there, no range is.
        return [ev.Send(fragment.push.announced), ev.Resend(missing.push_id, missing.ranges)]

    def close(self) -> list[ev.Effect]:
        """The learner leaves."""
        effects = [effect for each in self._sessions for effect in each.close()]
        assert not self.pushing, "every push has its outcome when the learner leaves"
        return effects

    def check(self) -> None:
        """Asserts the invariants that hold between any two events."""
        self.ledger.total()
        assert self.adopted == tuple(each.adopted for each in self._sessions), self.adopted
        push_ids = [each.push.announced.push_id for each in self._sessions if each.push is not None]
        assert len(set(push_ids)) == len(push_ids), "every push has an id of its own"
        assert max(push_ids, default=0) <= self._push_id, (push_ids, self._push_id)
        for session in self._sessions:
            session.check()
