"""Joins a run, answers rounds, adopts versions, survives outages, leaves in order. [pure]

Events come in with `now`, effects go out in order. Nothing else changes a session, and other
threads see no more of it than its view.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from narrows.learner.session import events as ev
from narrows.learner.session.dialer import WAITS_FOR, Connection, Dialer
from narrows.learner.session.fragments import FragmentSessions
from narrows.learner.session.identity import Identity
from narrows.learner.session.layouts import Layouts
from narrows.learner.session.leaving import Leaving, is_ending
from narrows.learner.session.pace import Pace
from narrows.learner.session.run_time import RunTime
from narrows.learner.session.view import SessionView
from narrows.proto import messages as msg
from narrows.proto.errors import OF_ONE_MESSAGE, RETRYABLE, Refused
from narrows.proto.fragments import build_table
from narrows.proto.schedule import is_lockstep
from narrows.proto.timing import QUIET_S


class Session:
    """The state machine of one learner; lives as long as its process (one incarnation)."""

    def __init__(
        self, identity: Identity, *, jitter: Callable[[], float], contribute_after_steps: int = 0
    ) -> None:
        """`jitter` returns numbers in [0, 1). A newcomer contributes after so many own steps."""
        self.identity = identity
        self.run_id = ""
        self.epoch: msg.Epoch = (0, 0, 0)
        self.settings: msg.RunSettings | None = None
        self.phase = msg.Phase.FOUNDING
        self.fragments = FragmentSessions()
        self.leaving = Leaving()
        self.waits_for = "an answer from the broker"
        self._dialer = Dialer(jitter)
        self._layouts = Layouts(identity)
        self._pace = Pace(contribute_after_steps)
        self._run_time = RunTime()
        self._jitter = jitter
        self._paused = ""

    def handle(self, event: ev.Event, *, now: float) -> list[ev.Effect]:
        """Takes one event in; returns what is to be done, in order."""
        if self._dialer.closed:
            return [ev.Drop((event.handle,))] if isinstance(event, ev.ChunkDecoded) else []
        effects: list[ev.Effect] = []
        match event:
            case ev.Received(message):
                effects = self._message(message, now)
            case ev.ChunkDecoded(header, handle):
                effects = self._chunk(header, handle, now)
            case ev.Applied(fragment, version, digest):
                effects = self.fragments.applied(fragment, version, digest)
            case ev.ApplyFailed():
                effects = self.fragments.apply_failed(event)
            case ev.EncodeFailed(push_id, reason):
                effects = self.fragments.encode_failed(push_id, reason, now)
            case ev.CopyFailed(copy, reason):
                self.leaving.copying = False
                effects = self.fragments.copy_failed(copy, reason, now)
            case ev.StepTaken(tokens, loss, at_boundary):
                self._pace.step(loss, now)
                self.fragments.ledger.step(tokens)
                if self._pace.steps == self._pace.contribute_after_steps:
                    self.fragments.answer_again()
                effects = self._boundary() if at_boundary else []
            case ev.StepSkipped(tokens):
                self.fragments.ledger.skip(tokens)
            case ev.BoundaryReached():
                effects = self._boundary()
            case ev.Paused(reason):
                self._paused = reason
                self._pace.pause()
            case ev.Continued():
                self._paused = ""
                self.fragments.answer_again()
            case ev.LoopEnded(within_s):
                self.leaving.ask(within_s, now)
            case ev.Connected():
                self._dialer.connected(now)
            case ev.DeadlineReached():
                effects = self._look_for_broker(now)
        effects += self._advance(now)
        self.leaving.note(effects, now)
        at_boundary = isinstance(event, ev.StepTaken | ev.BoundaryReached)
        assert at_boundary or not any(isinstance(effect, ev.Copy) for effect in effects), event
        return effects

    def next_deadline(self) -> float | None:
        """Time at which `handle(DeadlineReached())` is due if nothing else happens."""
        deadline = self._dialer.next_deadline()
        if self._layouts.comparing and deadline is not None:
            return self._layouts.next_deadline()
        if deadline is None or not self.online:
            return deadline
        checks = [each.check_at for each in self.fragments.fetching()]
        return min(deadline, self._pace.report_at(), self.fragments.retry_at, *checks)

    def check(self) -> None:
        """Asserts every invariant; cheap enough for every event of a test."""
        self.fragments.check()
        assert not self.online or self.settings is not None, "a session begins with its settings"
        assert not (self._dialer.closed and self.fragments.pushing), "it is over, a push is open"
        assert not self.leaving.final or self.connection is Connection.LEFT, self.connection

    def view(self) -> SessionView:
        """The session as other threads may see it; make it anew after every event."""
        return SessionView(
            connection=self.connection,
            run_id=self.run_id,
            settings=self.settings,
            phase=self.phase,
            table=self.fragments.table,
            adopted=self.fragments.adopted,
            ready=self.fragments.ready,
            steps=self._pace.steps,
            tokens=self.fragments.ledger.learned,
            run_time=self._run_time,
            waits_from=self._waits_from(),
            waits_for=self._waits_for(),
            wants_boundary=self._wants_boundary(),
            next_deadline=self.next_deadline(),
            not_admitted=self._dialer.not_admitted,
            final=self.leaving.final,
            lacks=self.leaving.lacks,
        )

    @property
    def connection(self) -> Connection:
        return self._dialer.connection

    @property
    def online(self) -> bool:
        """The broker has admitted the learner and was heard lately."""
        return self.connection is Connection.JOINED

    @property
    def should_stop(self) -> bool:
        """The goal is reached: no further inner step counts."""
        return is_ending(self.phase)

    def _wants_boundary(self) -> bool:
        lockstep = self.settings is not None and is_lockstep(self.settings)
        return lockstep or self._dialer.closed or self.fragments.wants_boundary

    def _waits_from(self) -> float:
        """Time from which the training loop must wait; -inf: in any case, inf: never."""
        settings = self.settings
        if settings is None or not self.fragments.ready or self.should_stop or self._dialer.closed:
            return math.inf
        if is_lockstep(settings):
            return -math.inf if self._pace.is_ahead(settings, self.fragments.adopted) else math.inf
        return self._dialer.offline_from(settings.max_offline_s)

    def _waits_for(self) -> str:
        if self.leaving.asked and self.online:
            return self.leaving.waits_for(self.phase, self.fragments)
        return self.waits_for

    # Messages.

    def _message(self, message: msg.ControlMessage, now: float) -> list[ev.Effect]:
        if isinstance(message, msg.Welcome | msg.Beat) and message.epoch != self.epoch:
            # Left over from before, or another life answers at the address: only the Welcome to a
            # new Hello says which. A lower term was replaced.
            if self.online or message.epoch[0] < self.epoch[0]:
                self._rejoin(now)
                return []
        self._dialer.heard(message, now)
        match message:
            case msg.Welcome():
                return self._welcomed(message, now)
            case msg.Refuse():
                return self._refused(message, now)
            case msg.Probe(nonce):
                return [ev.Send(msg.Alive(nonce))]
            case msg.AskLayout() | msg.LayoutPart():
                return self._layouts.heard(message, now)
            case _ if not self.online:
                return []
            case msg.Beat():
                acknowledge = ev.Acknowledge(message.received)
                return [acknowledge, *self._run_state(message, message.versions, now)]
            case msg.Progress(received):
                return [ev.Acknowledge(received)]
            case msg.Missing():
                return self.fragments.missing(message)
            case msg.Bye(reason):
                self._rejoin(now)
                note = f"the broker said Bye ({reason}); joining again"
            case _:
                note = f"unexpected {type(message).__name__} from the broker"
        return [ev.Note("warning", note)]

    def _welcomed(self, welcome: msg.Welcome, now: float) -> list[ev.Effect]:
        first = self.settings is None
        if first:
            self.fragments = FragmentSessions(
                build_table(self.identity.layout, welcome.settings.fragment_count)
            )
        elif self.settings and welcome.settings.fragment_count != self.settings.fragment_count:
            counts = welcome.settings.fragment_count, self.settings.fragment_count
            return self._fail(self._dialer.other_count(*counts))
        restarted = welcome.epoch != self.epoch
        effects: list[ev.Effect] = []
        if not self.online:
            self._pace.expect(welcome.settings.streams)
            if not first:
                epoch = "{}.{}".format(*welcome.epoch)
                effects.append(ev.Note("info", f"back with the broker, epoch {epoch}"))
        self.run_id, self.epoch, self.settings = welcome.run_id, welcome.epoch, welcome.settings
        self._dialer.joined(welcome, now)
        ports = (welcome.uplink_port, welcome.downlink_port)
        effects.append(ev.Identify(self.run_id, self.epoch))
        effects.append(ev.OpenStreams(welcome.settings, self.fragments.table, *ports))
        effects += self.fragments.welcomed(welcome.fragments, restarted=restarted, now=now)
        self.waits_for = WAITS_FOR[welcome.role]
        if welcome.role is msg.Role.FOUND:
            self.fragments.found_all(self.epoch)
        if restarted:
            self._run_time = RunTime()
        assert self.online and self.epoch == welcome.epoch, (self.connection, self.epoch)
        return effects + self._run_state(welcome, [h.version for h in welcome.fragments], now)

    def _run_state(
        self, news: msg.Welcome | msg.Beat, versions: Sequence[int], now: float
    ) -> list[ev.Effect]:
        """Takes over the state of the run that a Welcome and a Beat both carry."""
        self.phase = news.phase
        self._run_time = self._run_time.updated(news.run_tokens, news.tokens_per_s, now)
        self.fragments.note_newest(news.rounds, versions, now)
        changed = self._pace.keep_rate(news.up_bits_per_s)
        return [ev.SetRate(news.up_bits_per_s)] if changed else []

    def _refused(self, refuse: msg.Refuse, now: float) -> list[ev.Effect]:
        if refuse.push_id:
            return self.fragments.refused(refuse, now)
        if refuse.code in OF_ONE_MESSAGE and self.settings is not None:
            return [ev.Note("warning", f"a message of ours was refused: {refuse.message}")]
        if refuse.code in RETRYABLE:
            self._rejoin(now)
            line = self._dialer.not_yet(refuse)
            return [ev.Note("warning", line)] if line else []
        if self._layouts.refused(refuse, now):
            self._rejoin(now)
            return []
        return self._fail(self._dialer.refused(refuse))

    def _fail(self, error: Refused) -> list[ev.Effect]:
        self._dialer.close(Connection.REFUSED)
        return [*self.fragments.close(), ev.Fail(error)]

    def _chunk(self, header: msg.Header, handle: int, now: float) -> list[ev.Effect]:
        told = header.run_id, header.epoch, header.incarnation
        known = told == (self.run_id, self.epoch, self.identity.incarnation)
        known &= header.kind in (msg.DataKind.PUBLICATION, msg.DataKind.STATE)
        if not (known and self.online and header.fragment < len(self.fragments)):
            return [ev.Drop((handle,))]
        self._dialer.heard_data(now)
        self._pace.note_position(header.stream, header.position)
        return self.fragments[header.fragment].take(header, handle)

    # The training loop.

    def _boundary(self) -> list[ev.Effect]:
        """The parameters may be touched: adopt what is new, then answer the open rounds."""
        rolled_back = any(each.fallen_back and each.fresh for each in self.fragments)
        was_ready = self.fragments.ready
        effects = self.fragments.adopt(final=self.leaving.asked and self.phase is msg.Phase.ENDED)
        # A training thread that is at a boundary again has made all the copies of the last one.
        self.leaving.copying = bool(effects)
        if self.fragments.ready and not was_ready and not any(self.fragments.adopted):
            # Everybody starts here: nobody warms up, whatever was declined while it was unknown.
            self._pace.contribute_after_steps = 0
            self.fragments.answer_again()
        if effects and self.fragments.ready and self.settings is not None:
            self._pace.realign(self.settings, self.fragments.adopted, rolled_back=rolled_back)
        effects += self.fragments.send_founding()
        if self._pace.warming(self.settings) or not self.online or self._paused:
            return effects
        last = self.leaving.asked or self.should_stop
        return effects + self.fragments.snapshot(self._pace.run_step, any_step=last)

    def _look_for_broker(self, now: float) -> list[ev.Effect]:
        """Looks whether the broker is gone. Only at a deadline: before any other event its messages
        may lie unread in a socket."""
        if not self._dialer.is_quiet(now):
            return []
        self._rejoin(now)
        quiet = f"nothing heard from the broker for {QUIET_S:.0f} s"
        return [ev.Note("warning", f"{quiet}; joining again")]

    # After every event.

    def _advance(self, now: float) -> list[ev.Effect]:
        """Does all that the event, or the time, has made possible."""
        effects: list[ev.Effect] = []
        silent_s = None if self.online else self._dialer.silent_s(now)
        if self._dialer.closed or self.leaving.may_go(self.phase, self.fragments, silent_s, now):
            return effects + self._bye(now)
        if self._layouts.comparing:
            found = self._layouts.advance(now)
            return effects + (self._fail(found) if isinstance(found, Refused) else found)
        if self._dialer.hello_due(now):
            effects += self._dialer.redial(now)
            told = self.run_id, self.epoch, self._dialer.epoch_proof, self._pace.steps
            hello = self.identity.hello(*told, self.fragments.ledger.learned, self.fragments.held)
            effects.append(ev.Send(hello))
        if not self.online:
            return effects
        self.fragments.retry(now)
        for fragment in self.fragments.fetching():
            effects += fragment.ask(now, self._jitter())
        stopped = self.leaving.asked or self.should_stop
        reason = self._pace.warming(self.settings) or self._paused
        stuck_at = self._pace.run_step if self._waits_from() == -math.inf else None
        effects += self.fragments.decline(reason, stopped=stopped, stuck_at=stuck_at)
        if now >= self._pace.report_at():
            effects.append(self._report(now))
        return effects

    def _report(self, now: float) -> ev.Effect:
        ledger = self.fragments.ledger
        return ev.Send(self._pace.report(ledger.learned, ledger.total(), now))

    def _rejoin(self, now: float) -> None:
        """The session is gone; training goes on, and so do the Hellos."""
        if self.online:
            self._dialer.lose(now)
            self.waits_for = "the broker to come back"
        assert not self.online

    def _bye(self, now: float) -> list[ev.Effect]:
        if self._dialer.closed:
            return []
        effects = [*self.leaving.go(self.phase, self.fragments), *self.fragments.close()]
        if self.online:
            effects += [self._report(now), ev.Send(msg.Bye(self.leaving.reason(self.phase)))]
        self._dialer.close(Connection.LEFT)
        return [*effects, ev.Left()]
