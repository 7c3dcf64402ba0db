"""A learner's decisions: joining, what to fetch and adopt, what to push, when to leave.

Pure: it has no clock, no bytes and no parameters. Its events are methods; after each of them the
host calls `tick` and performs the `effects`. It exchanges every fragment by the same rule, at the
boundaries between two inner steps:

- *Adopt, then push*, in this order for everybody. An adoption keeps a share of the steps that no
  push has taken (`_keep`).
- *Push while the round is open*, as far as this learner knows: the fragment is in the newest Beat,
  and the parameters stand on that Beat's head. Answers to closed rounds would be merged a version
  late for ever. A learner whose step takes longer than half a period pushes at every boundary.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import Final

from narrows.learner.effects import Adopt, Effect, Note, Send, SendChunks, Snapshot
from narrows.learner.fragment import FragmentSession, Pushed, Standing
from narrows.proto import messages as msg
from narrows.proto import timing
from narrows.proto.errors import ErrorCode, NarrowsError, Refused
from narrows.proto.layout import build_table, fingerprint
from narrows.proto.messages import PUBLICATIONS_KEPT, DataKind, Mode, Phase, Role

STEP_TIMES: Final = 8
"""Newest step times whose median is the learner's own."""

EXTRAPOLATION_MAX_S: Final = 10.0
"""The run's clock goes on for so long without news from the broker."""

LATE_S: Final = 10.0
"""Copies that stay behind the heads for so long, while Beats come, are told of."""

RETRIED_S: Final[dict[str, float]] = {
    ErrorCode.PROTOCOL_VERSION: 0.0, ErrorCode.LAYOUT_DIFFERS: 0.0, ErrorCode.WRONG_RUN: math.inf,
    ErrorCode.BAD_NAME: 0.0, ErrorCode.KEY_NAME: 0.0, ErrorCode.NOT_FINITE_SEED: 0.0,
    ErrorCode.NAME_IN_USE: timing.NAME_IN_USE_S,
    ErrorCode.OVER_CAPACITY: timing.OVER_CAPACITY_S,
}  # fmt: skip
"""Refusals of the session, and how long the learner says Hello again before it raises; 0: time does
not heal them. Another run is an outage: it is met where the broker's state directory was lost, and
the learner's run is back once that is. Every other code refuses a message."""

FAILED_CODINGS_TOLD: Final = 3
"""So many pushes running that cannot be coded are noted, the last one with the remedy."""

NOT_NOTED_AGAIN: Final = {
    True: f". {FAILED_CODINGS_TOLD} times running: not noted again until a push is coded",
    False: f". {FAILED_CODINGS_TOLD} times running, though the parameters were set back each time:"
    " the optimizer's state is not finite. Load it again, or make the optimizer anew with a lower"
    " learning rate. Not noted again until a push is coded",
}
"""The end of the last of those notes, by whether the parameters were finite."""

NO_NEWS: Final = msg.Beat("", Phase.SEEDING, (), (), 0.0, 0, 0.0, 0.0)
"""The newest Beat before the first."""


class Session:
    """One incarnation of a learner. Times are seconds on the caller's monotonic clock.

    In the first `ramp_steps` steps the optimizer's moments are too young to be trusted: adoptions
    keep nothing of them.
    """

    def __init__(self, name: str, incarnation: str, layout: msg.Layout, now: float) -> None:
        self.name, self.incarnation, self.layout = name, incarnation, layout
        self.ramp_steps = 0
        self.effects: list[Effect] = []
        self.run_id = self.epoch = ""
        self.settings = msg.RunSettings()
        self.parts: tuple[FragmentSession, ...] = ()
        """By fragment; empty before the first Welcome."""
        self.beat = NO_NEWS
        self.ports: tuple[int, int] | None = None
        """Ports of uplink and downlink, as the newest Welcome tells them."""
        self.refused: Refused | None = None
        """The broker refuses this learner for good; the training thread raises it."""
        self.refusal: Refused | None = None
        """The broker has refused this learner, which says Hello again, and not admitted it yet."""
        self.ended = False
        """Bye is said: there is nothing left to wait for."""
        self.heard_ending = False
        """The run was in its end, and no step was made in phase RUNNING since. A broker that has
        started again may say RUNNING for a while: who leaves waits for the final model then."""
        self.steps = self.tokens = 0
        self.loss: float | None = None
        self.paused: str | None = None
        self.connected = False
        """A Welcome has come since the last sign that the connection is gone."""
        self.obstacle: NarrowsError | None = None
        """Why nobody answers; set by the owner of the sockets, as far as handshakes tell."""
        self.blocked = ""
        """The data ports on which nothing moves though it should; set by the owner of the sockets,
        too."""
        self._fingerprint = fingerprint(layout)
        self._told: tuple[msg.PublishedCopy, ...] = ()
        """Copies, as the newest Hello tells them."""
        self._push_id = 0
        self._step_times_s: deque[float] = deque(maxlen=STEP_TIMES)
        self._step_s = 0.0
        self._stepped_at: float | None = None
        self._heard_at = self._data_at = self._beat_at = self._moved_at = now
        self._refused_since = math.inf
        self._abreast_at = math.inf
        """When a Beat last told a head that is here, or came after a silence; infinite: there is
        nothing to be late."""
        self._hello_due = math.inf
        """Before the first connection nobody hears a Hello: it would wait, and be said twice."""
        self._report_at = -math.inf
        self._reported = self._news
        self._leaving_at: float | None = None
        self._warned_offline: set[str] = set()
        """The warnings of the present outage."""
        self._warned_given_up = False
        """The warning that work is given up, until no fragment is far behind any more."""
        self._clock_floor = 0.0

    # What the training thread asks.

    @property
    def joined(self) -> bool:
        """The parameters stand on the run."""
        return bool(self.parts) and all(part.base >= 0 for part in self.parts)

    @property
    def phase(self) -> Phase:
        """Where the run stands, as the broker told last."""
        return self.beat.phase

    @property
    def stopping(self) -> bool:
        """No further inner step counts: the run ends, or this learner leaves."""
        return self._leaving_at is not None or self.phase in (Phase.ENDING, Phase.ENDED)

    @property
    def final(self) -> bool:
        """The parameters are the run's final model, bit for bit."""
        return bool(self.parts) and all(part.standing is Standing.FINAL for part in self.parts)

    def must_wait(self, now: float) -> bool:
        """The next inner step must not begin yet; `join` adopts what comes meanwhile."""
        if self.ended or self.refused or self.stopping:
            return False
        # Version 0 is being made: its fragments are read one by one and must be of one moment, and
        # the steps of nobody who waits for it will count.
        seeding = bool(self.parts) and not self.beat.heads
        return seeding or self._offline_too_long(now) or any(map(self._in_lockstep, self.parts))

    def run_tokens(self, now: float) -> float:
        """The run's clock in tokens. Between two Beats it goes on at the rate that the broker told.
        It never falls: it stands still while a broker of an older state has not caught up."""
        ahead_s = min(max(0.0, now - self._beat_at), EXTRAPOLATION_MAX_S)
        told = self.beat.run_tokens + self.beat.tokens_per_s * ahead_s
        self._clock_floor = max(self._clock_floor, told)
        return self._clock_floor

    def health(self, now: float) -> str:
        """One word: refused, final, ended, offline, joining, waiting, blocked or connected."""
        if self.refused or self.ended:
            return "refused" if self.refused else "final" if self.final else "ended"
        if not self.connected:
            return "offline" if self.joined else "joining"
        if self.joined and self.must_wait(now):
            return "waiting"
        if self.blocked:
            return "blocked"
        return "connected" if self.joined else "joining"

    @property
    def awaits_data(self) -> bool:
        """Chunks that lead to the newest version are not here yet, and the broker is."""
        pulled = [each for part in self.parts for _, each in part.pulled]
        return self.connected and not all(each.complete for each in pulled)

    @property
    def merged_tokens(self) -> int:
        """Logged tokens whose work is in versions; each fragment has its share of a token."""
        return sum(part.merged_tokens for part in self.parts) // max(1, len(self.parts))

    @property
    def lost_tokens(self) -> int:
        """Logged tokens whose work an adoption overwrote. What is neither is on its way."""
        return sum(part.lost_tokens for part in self.parts) // max(1, len(self.parts))

    # Control.

    def control(self, message: msg.ControlMessage, now: float) -> None:
        """A control message of the broker."""
        if self.ended:
            return
        if not isinstance(message, msg.Refuse):  # Who is refused is as alone as without a broker.
            self._heard_at = now
        match message:
            case msg.Welcome():
                self._welcome(message, now)
            case msg.Beat():
                self._take_beat(message, now)
            case msg.Fetch():
                self._serve(message)
            case msg.Refuse():
                self._take_refusal(message, now)
            case msg.Bye():
                self.connected = False  # It does not know us, or stops.
            case _:
                self._note("unexpected", f"{type(message).__name__} is not for learners")

    def lost(self, now: float) -> None:
        """The connection is the first or another one: say Hello at once."""
        self.connected, self._hello_due = False, now

    def _welcome(self, welcome: msg.Welcome, now: float) -> None:
        epoch, settings = welcome.beat.epoch, welcome.settings
        if not self.parts:
            try:
                table = build_table(self.layout.entries, settings.fragments)
            except NarrowsError as error:
                self.refused = refused(error.code, error)
                return
            self.parts = tuple(FragmentSession(each, self.incarnation, settings) for each in table)
        renewed = epoch != self.epoch
        if renewed and self.epoch and self._told != self._copies():
            # A copy was completed after the Hello that this answers: the broker has not compared
            # it with its history yet.
            self._hello(now)
            return
        if self._warned_offline:
            self._warned_offline.clear()
            self._note("online", f"the broker is back, epoch {epoch}", warning=False)
        self.connected, self.run_id, self.epoch = True, welcome.run_id, epoch
        self.settings, self.ports = settings, (welcome.uplink_port, welcome.downlink_port)
        self.refusal, self._refused_since = None, math.inf
        if renewed:
            # The broker could not compare a base whose copy was damaged.
            back = [p.index for p in self.parts if p.index in welcome.go_back or p.tip < p.base]
            for part in self.parts:
                part.new_epoch(settings, go_back=part.index in back)
            if back:
                text = f"fragments {back}: the broker's history is another, taking its versions"
                self._note("went_back", text)
        self._take_beat(welcome.beat, now)
        for part in self.parts:
            part.expect(now, pull=True)
            if part.push and part.pushed is Pushed.WAITING:
                # Whether it is merged is not known; the broker does not answer if it is.
                part.announced_at = now
                self.effects.append(Send(part.push))
                if renewed:
                    self.effects.append(SendChunks(DataKind.PUSH, part.index, part.push_id))
        if welcome.role is Role.SEED and not any(part.tip >= 0 for part in self.parts):
            self.effects.append(SendChunks(DataKind.LAYOUT))
            self.effects += [SendChunks(DataKind.SEED, part.index) for part in self.parts]
        # At once: a new life of the broker knows neither what we hold nor how fast we are.
        self._report(now)

    def _take_beat(self, beat: msg.Beat, now: float) -> None:
        if beat.epoch != self.epoch or len(beat.heads) not in (0, len(self.parts)):
            self.connected = False  # Another life of the broker, which has not met us.
            return
        was_away = now >= self._beat_at + timing.SILENT_S
        self.beat, self._beat_at = beat, now
        self.heard_ending = self.heard_ending or self.phase in (Phase.ENDING, Phase.ENDED)
        for part, head in zip(self.parts, beat.heads, strict=False):  # No heads before version 0.
            part.head = max(part.head, head)
        for part, head, digest in zip(self.parts, beat.heads, beat.digests, strict=False):
            part.told = head, digest
            self._drop_altered(part, now)
        # Of a copy further behind the state is fetched, which takes its time.
        lags = [0 < part.head - part.tip <= PUBLICATIONS_KEPT for part in self.parts]
        if not all(lags) or not self.joined or was_away:
            self._abreast_at = now
        elif now >= self._abreast_at + LATE_S:
            self._abreast_at = math.inf  # Once, until it is abreast again.
            text = "the downlink, or the relay, is late: work counts on the heads alone"
            self._note("late", f"for {LATE_S:g} s all copies have been behind the heads: {text}")

    def _drop_altered(self, part: FragmentSession, now: float) -> None:
        """Beats pass no relay: a copy of another digest than a Beat tells was altered on its way.

        The parameters may stand on it, or on one before it that no Beat named: what they differ
        from the next copy is not this learner's work.
        """
        if not part.altered:
            return
        part.drop_copy(now)
        part.cast_adrift(self.tokens)
        self._note(
            "altered",
            f"fragment {part.index}: the copy of version {part.told[0]} is not the broker's:"
            f" whoever passes publications on, a relay, has altered it. It is dropped, and a state"
            f" is fetched in {part.pause_s:g} s",
        )

    def _serve(self, fetch: msg.Fetch) -> None:
        """The broker lacks chunks. What it asks for may be settled meanwhile: then nothing."""
        if fetch.fragment >= len(self.parts):
            return
        part = self.parts[fetch.fragment]
        has = {
            DataKind.LAYOUT: True,
            DataKind.SEED: part.base < 0,
            DataKind.PUSH: part.pushed is Pushed.WAITING and part.push_id == fetch.push_id,
        }
        if has.get(fetch.kind):
            self.effects.append(SendChunks(fetch.kind, fetch.fragment, fetch.push_id, fetch.chunks))

    def _take_refusal(self, refuse: msg.Refuse, now: float) -> None:
        text = f"{refuse.code}: {refuse.message} {refuse.remedy}".rstrip()
        if refuse.push_id:
            if refuse.fragment < len(self.parts):
                self.parts[refuse.fragment].give_up(refuse.push_id)
                self._note("push_refused", f"fragment {refuse.fragment}: {text}")
        elif refuse.code not in RETRIED_S:
            self._note("refused", text)
        else:
            self.connected, self.refusal = False, refused(ErrorCode(refuse.code), refuse)
            is_first, self._refused_since = now < self._refused_since, min(now, self._refused_since)
            if now - self._refused_since >= RETRIED_S[refuse.code]:
                self.refused = self.refusal
            elif is_first and not self.joined:  # Else the outage is told, with this as its reason.
                self._note("refused", f"{text}; trying again")

    # Data.

    def chunk(self, header: msg.Header, now: float) -> bool:
        """Whether a chunk is wanted: then the host keeps its payload before it performs effects."""
        known = header.epoch == self.epoch and header.fragment < len(self.parts)
        if not known or header.kind not in (DataKind.PUBLICATION, DataKind.STATE):
            return False
        if header.incarnation not in ("", self.incarnation):
            return False  # Its push_id tells the outcome of somebody else's push.
        self._data_at = now
        return self.parts[header.fragment].chunk(header, now)

    def assembled(self, header: msg.Header, now: float, *, agrees: bool, failure: str = "") -> bool:
        """A copy is made; `header` is that of its chunk 0, which tells whose pushes it holds.

        `failure`: this machine could not make it, as for want of memory, and nothing says that it
        is damaged. The text begins with the kind of error and a colon; each kind is noted once.
        True: it is the fragment's newest published copy, and the host keeps it.
        """
        part = self.parts[header.fragment]
        if header.epoch != self.epoch or part.assembling != (header.kind, header.version):
            return False
        if failure:
            part.try_again(now)
            kind = failure.partition(":")[0]
            if kind != part.trouble:
                part.trouble = kind
                self._note(
                    "assembly_failed",
                    f"fragment {part.index}: this machine cannot make the copy of version"
                    f" {header.version}: {failure}. It is tried again, with pauses of"
                    f" {timing.COPY_AGAIN_S:g} to {timing.COPY_AGAIN_MAX_S:g} s",
                )
            return False
        if not agrees:
            part.drop_copy(now)
            text = (
                f"version {header.version} is damaged, the state is fetched in {part.pause_s:g} s"
            )
            self._note("digest_differs", f"fragment {part.index}: {text}")
            return False
        part.assembled(header)
        if part.pushed is Pushed.MERGED:
            self._moved_at = now
        self._drop_altered(part, now)
        return part.tip == header.version

    # The training thread.

    def boundary(self, tokens: int, loss: float | None, now: float) -> None:
        """After an inner step of `tokens` tokens: adopt what is here, then push what is due."""
        self.steps, self.tokens, self.loss = self.steps + 1, self.tokens + tokens, loss
        if self._stepped_at is not None:
            self._step_times_s.append(now - self._stepped_at)
            self._step_s = median(self._step_times_s)
        self._stepped_at = now
        if self.phase is Phase.RUNNING:  # A step that counts: the run goes on, with a larger goal.
            self.heard_ending = False
        for part in self.parts:
            part.tokens += tokens
            part.steps += 1
        self._exchange()
        if now >= self._report_at + timing.REPORT_S:
            self._report(now)

    def join(self) -> None:
        """Between two steps, while none is made: before the first, in lockstep, at the end."""
        self._stepped_at = None  # The wait is no part of a step's time.
        self._exchange()

    def encoded(self, fragment: int, push_id: int, now: float) -> None:
        """The push is coded: it is announced and sent."""
        part = self.parts[fragment]
        if part.push and part.push_id == push_id:  # Else it was given up meanwhile.
            part.pushed, part.failed_codings, self._moved_at = Pushed.WAITING, 0, now
            part.announced_at = now
            if self.connected:
                self.effects.append(Send(part.push))
            self.effects.append(SendChunks(DataKind.PUSH, fragment, push_id))

    def sent(self, now: float) -> None:
        """A chunk of this learner has left: what it waits for is under way."""
        self._moved_at = now

    def encode_failed(
        self, fragment: int, push_id: int, *, reason: str, finite: bool = True
    ) -> None:
        """The push cannot be coded. Not `finite`: the parameters are nan or inf, so they are set
        back to the newest version, or this learner would never learn again."""
        part = self.parts[fragment]
        part.give_up(push_id, finite=finite)
        part.failed_codings += 1
        running = "" if part.failed_codings < FAILED_CODINGS_TOLD else NOT_NOTED_AGAIN[finite]
        if part.failed_codings <= FAILED_CODINGS_TOLD:
            self._note("encode_failed", f"fragment {fragment}: {reason}{running}")

    def pause(self, reason: str | None) -> None:
        """The loop makes no steps for a while, so no round should wait for it; None: it does."""
        self.paused, self._stepped_at = reason, None  # The pause is no part of a step's time.

    def leave(self, now: float) -> None:
        """The loop is over: push what is left, wait for what is merged or final, then Bye.

        Gives up when nothing has moved for LEAVE_S, and after LEAVE_MAX_S in any case.
        """
        if self._leaving_at is None:
            self._leaving_at = self._moved_at = now
            self.pause("leaving")

    def abandon(self) -> None:
        """Leaves at once, whatever is on its way."""
        if not self.ended:
            self.effects = [Send(msg.Bye("the loop was broken off"))]
            self.ended = True

    def broken_off(self, reason: str, *, decided: bool) -> None:
        """An exception left a call of the training thread, a signal's for instance. `effects` are
        those that are not known to be performed; `decided`: all were decided.

        A fragment that was to move, or to be copied, is cast adrift: nobody knows how far that
        came. Other effects stay, since none of them does harm when it is performed twice.
        """
        halves = [each for each in self.effects if isinstance(each, Adopt | Snapshot)]
        touched = {each.fragment for each in halves} if decided else set(range(len(self.parts)))
        self.effects = [each for each in self.effects if each not in halves]
        if touched and self.ended:  # It was to leave with the final model, which it has not.
            self.effects = [
                each
                for each in self.effects
                if not isinstance(each, Send) or not isinstance(each.message, msg.Bye)
            ]
            self.ended = False
        for part in self.parts:
            part.assembling = None  # Its effect may be lost. To make a copy twice does no harm.
            if part.index in touched:
                part.cast_adrift(self.tokens)
        if touched:
            text = f"{reason} in the middle of the exchange: fragments {sorted(touched)} take the"
            self._note("broken_off", f"{text} newest version, what they have not sent is given up")

    def _exchange(self) -> None:
        """Adopts, then pushes, fragment by fragment."""
        if self.ended:
            return
        run_ended = self.phase is Phase.ENDED
        for part in self.parts:
            if run_ended and part.tip == part.head >= 0 and part.standing is not Standing.FINAL:
                self.effects.append(part.adopt(0.0, final=True))
            elif not run_ended and part.can_adopt:
                self.effects.append(part.adopt(self._keep(part)))
            if not run_ended and self._pushes(part):
                self._push_id += 1
                self.effects.append(part.snapshot(self._push_id))
        if all(part.head - part.base <= 1 for part in self.parts):
            self._warned_given_up = False

    def _keep(self, part: FragmentSession) -> float:
        """The share of the unpushed work that an adoption keeps."""
        if self._slow:
            return 1.0  # It is pushed whole at this very boundary.
        missed = part.tip - part.base
        if missed > 1 and part.standing is Standing.BASED:
            if part.tokens and not self._warned_given_up:
                self._warned_given_up = True
                text = (
                    f"{missed} versions came out without this learner: what it has learned and"
                    f" not sent since, {part.tokens:,} tokens, is given up"
                )
                self._note("given_up", text)
            return 0.0  # Old work on an old point.
        if self.steps <= self.ramp_steps:
            return 0.0  # Steps of an optimizer that warms up.
        return 1.0 if self.stopping else self.settings.keep

    def _pushes(self, part: FragmentSession) -> bool:
        """Whether the unpushed work of a fragment becomes a push at this boundary."""
        ready = part.standing is Standing.BASED and part.pushed is Pushed.NONE and part.steps > 0
        if not ready or self.stopping:
            return ready
        if self.settings.mode is Mode.DILOCO:
            return part.steps >= self.settings.sync_period_steps
        # That Beat's head, not the newest that is known: its round is over once a later one exists.
        is_open = part.index in self.beat.collecting and self.beat.heads[part.index] == part.base
        return self.connected and (self._slow or is_open)

    @property
    def _slow(self) -> bool:
        """A step takes longer than half a period, so this learner meets open rounds by luck."""
        late_s = self.beat.period_s * timing.LATE_STEP_PERIODS
        return self.settings.mode is not Mode.DILOCO and 0 < late_s < self._step_s

    def _in_lockstep(self, part: FragmentSession) -> bool:
        """In mode diloco: the version that holds the push is waited for, tau steps after it."""
        if self.settings.mode is not Mode.DILOCO:
            return False
        if part.push is None:
            # The Beat of a version says whether the run goes on: nobody may train past the goal.
            return not self.beat.heads or self.beat.heads[part.index] < part.base
        # A version without the push was merged by others, who took this learner for lost.
        passed_by = part.base > part.push.base
        steps = self.settings.sync_period_steps if passed_by else self.settings.overlap_steps
        return part.steps >= steps

    def _offline_too_long(self, now: float) -> bool:
        return not self.connected and 0 < self.settings.max_offline_s < now - self._heard_at

    # Time.

    def tick(self, now: float) -> None:
        """After each event, and when `deadline` has come: says Hello while offline; else reports,
        asks for what is missing, and leaves when due."""
        if self.ended or self.refused:
            return
        if self.connected and now >= self._heard_at + timing.SILENT_S:
            self.connected = False
        self.effects += [each for part in self.parts if (each := part.next_assembly(now))]
        if not self.connected:
            if now >= self._hello_due:
                self._hello(now)
        else:
            if self._news != self._reported or now >= self._report_due:
                self._report(now)
            self._announce_again(now)
            self._ask(now)
        self._end_if_due(now)

    def deadline(self, now: float) -> float:
        """The time of the next `tick` if nothing happens."""
        if self.ended or self.refused:
            return math.inf
        leave_at = math.inf if self._leaving_at is None else now + timing.REPORT_S
        if not self.connected:
            return min(leave_at, self._hello_due)
        asks = [
            max(part.again_at, each.deadline(now)) for part in self.parts for _, each in part.pulled
        ]
        asks += [part.again_at for part in self.parts if now < part.again_at]
        return min(leave_at, self._report_due, self._heard_at + timing.SILENT_S, *asks)

    @property
    def _report_due(self) -> float:
        # The broker takes step times from Reports: one at a boundary is exact, so it goes first.
        return self._report_at + timing.REPORT_S + min(self._step_s, timing.REPORT_S)

    def _hello(self, now: float) -> None:
        if self.joined:
            event, what = "offline", "training goes on without the broker"
            if self._offline_too_long(now):
                limit_s = self.settings.max_offline_s
                event, what = "paused", f"training pauses after {limit_s:.0f} s without the broker"
            if self._leaving_at is not None:
                what = f"the broker is away: waits up to {timing.LEAVE_S:g} s to push what is left"
            text = f"{what}: {self.obstacle or self.refusal or 'it is not heard'}"
            if text not in self._warned_offline:
                self._warned_offline.add(text)
                self._note(event, text)
        self._hello_due, self._told = now + timing.HELLO_S, self._copies()
        hello = msg.Hello(
            msg.PROTOCOL, self.name, self.incarnation, self.run_id, self.epoch, self._fingerprint,
            self._told,
        )  # fmt: skip
        self.effects.append(Send(hello))

    def _copies(self) -> tuple[msg.PublishedCopy, ...]:
        return tuple(msg.PublishedCopy(part.tip, part.tip_digest) for part in self.parts)

    @property
    def _news(self) -> tuple[str | None, bool, msg.FragmentIndexes]:
        """Whatever is reported at once when it changes."""
        finished = tuple(part.index for part in self.parts if part.finished)
        return self.paused, self.joined, finished if self.phase is Phase.ENDING else ()

    def _report(self, now: float) -> None:
        if not self.connected:
            return
        self._report_at, self._reported = now, self._news
        paused, _, finished = self._reported
        bases = tuple(part.base for part in self.parts)
        report = msg.Report(self.steps, self.tokens, self.loss, bases, paused, finished)
        self.effects.append(Send(report))

    def _announce_again(self, now: float) -> None:
        """Repeats announcements without an outcome: the broker drops one above a quota, and without
        it the push would wait for ever."""
        for part in self.parts:
            if part.push and part.pushed is Pushed.WAITING:
                if now >= part.announced_at + timing.ANNOUNCE_S:
                    part.announced_at = now
                    self.effects.append(Send(part.push))

    def _ask(self, now: float) -> None:
        """Fetches what is missing and due, within one window for all fragments."""
        asked = sum(each.asked for part in self.parts for each in part.arriving.values())
        room = self.settings.window_messages - asked
        for part in [each for each in self.parts if now >= each.again_at]:
            part.expect(now, pull=False)
            for (kind, version), transfer in part.pulled:
                if ranges := transfer.ask(now, self._data_at, room + transfer.asked):
                    room -= sum(count for _, count in ranges)
                    self.effects.append(Send(msg.Fetch(kind, part.index, version, 0, ranges)))

    def _end_if_due(self, now: float) -> None:
        """Says Bye once the final model is adopted, or once leaving has nothing to wait for."""
        ending = self.phase in (Phase.ENDING, Phase.ENDED)
        # In a run that ends, a broker that is here decides how long the last rounds may take.
        moved_at = max(self._moved_at, self._heard_at) if self.heard_ending else self._moved_at
        if self.phase is Phase.ENDED and self.final:
            reason = "the run has ended"
        elif self._leaving_at is None:
            return
        elif not self.heard_ending and all(part.finished for part in self.parts):
            reason = "the loop has ended"
        elif now >= moved_at + timing.LEAVE_S or (
            not ending and now >= self._leaving_at + timing.LEAVE_MAX_S
        ):
            fragments = [part.index for part in self.parts if not part.finished]
            outcome = f"the outcome of its last pushes, of fragments {fragments}"
            lacking = "the run's final model" if self.heard_ending else outcome
            reason = f"leaves without {lacking}"
            self._note("left", reason)
        else:
            return
        self._report(now)
        self.effects.append(Send(msg.Bye(reason[: msg.TEXT_CHARACTERS_MAX])))
        self.ended = True

    def _note(self, event: str, text: str, *, warning: bool = True) -> None:
        self.effects.append(Note(event, text, warning))

    def check(self) -> None:
        """Asserts what always holds; the simulator calls it after every event."""
        for part in self.parts:
            part.check()
            assert part.push is None or 0 < part.push.push_id <= self._push_id, part
        ids = [part.push.push_id for part in self.parts if part.push]
        assert len(ids) == len(set(ids)), ids
        for part in self.parts:
            pushed = part.push.tokens if part.push else 0
            known = part.merged_tokens + part.lost_tokens + pushed + part.tokens
            assert known == self.tokens, part


def refused(code: ErrorCode, why: NarrowsError | msg.Refuse) -> Refused:
    """The error that the training thread raises."""
    return Refused(code, why.message, expected=why.expected, got=why.got, remedy=why.remedy)
