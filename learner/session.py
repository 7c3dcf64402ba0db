"""A learner's decisions: joining, what to fetch and adopt, what to push, when to leave.

Pure: it has no clock, no bytes and no parameters. Its events are methods; after each of them the
host calls `tick` and performs the `effects`. An inner step without effects is an exception: what
time alone asks for is left to the host's loop. It exchanges every fragment by the same rule, at the
boundaries between two inner steps:

- *Adopt, then push*, in this order for everybody. An adoption keeps a share of the steps that no
  push has taken (`_keep`).
- *Push while the round is open*, as far as this learner knows: the fragment is in the newest Beat,
  and the parameters stand on that Beat's head. Answers to closed rounds would be merged a version
  late for ever. A learner whose step takes longer than half a period pushes at every boundary.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from narrows.learner.clock import RunClock, StepTimes
from narrows.learner.effects import Adopt, Effect, Note, SendChunks, Snapshot
from narrows.learner.fragment import NO_LOSSES, FragmentSession, Pushed, Standing
from narrows.proto import messages as msg
from narrows.proto import timing
from narrows.proto.errors import ErrorCode, NarrowsError, Refused
from narrows.proto.layout import build_table, fingerprint
from narrows.proto.messages import PUBLICATIONS_KEPT, DataKind, Mode, Phase, Role
from narrows.proto.recorder import Recorder, recorded

LATE_S: Final = 10.0
"""Copies that stay behind the heads for so long, while Beats come, are warned of."""

RETRIED_S: Final[dict[str, float]] = {
    ErrorCode.PROTOCOL_VERSION: 0.0, ErrorCode.LAYOUT_DIFFERS: 0.0, ErrorCode.WRONG_RUN: math.inf,
    ErrorCode.BAD_NAME: 0.0, ErrorCode.KEY_NAME: 0.0, ErrorCode.NOT_FINITE_SEED: 0.0,
    ErrorCode.NAME_IN_USE: timing.NAME_IN_USE_S,
    ErrorCode.OVER_CAPACITY: timing.OVER_CAPACITY_S,
}  # fmt: skip
"""Refusals of the session, and how long the learner says Hello again before it raises; 0: time does
not heal them. Another run is an outage: a learner meets it where the broker's state directory was
lost, and its own run is back once the directory is. Every other code refuses a message."""

FAILED_CODINGS_TOLD: Final = 3
"""So many pushes running that cannot be coded are noted, the last one with the remedy."""

NOT_NOTED_AGAIN: Final = {
    True: f". {FAILED_CODINGS_TOLD} times running: not noted again until a push is coded",
    False: f". {FAILED_CODINGS_TOLD} times running, though the parameters were set back each time:"
    " the optimizer's state is not finite. Load it again, or make the optimizer anew with a lower"
    " learning rate. Not noted again until a push is coded",
}
"""The end of the last of those notes, by whether the parameters were finite."""

LAST_PHASES: Final = (Phase.ENDING, Phase.ENDED)
"""The run has reached its goal."""

NO_NEWS: Final = msg.Beat("", Phase.SEEDING, (), (), 0.0, 0, 0.0, 0.0)
"""The newest Beat before the first."""


class View(NamedTuple):
    """The answers to what a training loop asks."""

    stopping: bool
    run_tokens: float
    step_tokens: float
    """Tokens of one step of the run's clock; 0: not known yet."""
    goal_tokens: int
    steps: int
    ramp_steps: int
    health: str


class Session:
    """One incarnation of a learner. Times are seconds on the caller's monotonic clock.

    In the first `ramp_steps` steps the optimizer's moments are too young to be trusted: adoptions
    keep nothing of them.
    """

    def __init__(self, name: str, incarnation: str, layout: msg.Layout, now: float) -> None:
        self.name = name
        self.incarnation = incarnation
        self.layout = layout
        self.recorder = Recorder("session", name, incarnation, layout, now)
        self.ramp_steps = 0
        self.effects: list[Effect] = []
        self.run_id = self.epoch = ""
        self.settings = msg.RunSettings()
        self.parts: tuple[FragmentSession, ...] = ()
        """By fragment; empty before the first Welcome."""
        self.beat = NO_NEWS
        """The newest Beat; its phase is where the run stands, as far as this learner knows."""
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
        started again may say RUNNING for a while: a learner that leaves then waits for the final
        model."""
        self.steps = self.tokens = 0
        self.loss: float | None = None
        self._losses = NO_LOSSES
        self.paused: str | None = None
        self.connected = False
        """A Welcome has come since the last sign that the connection is gone."""
        self.obstacle: NarrowsError | None = None
        """Why nobody answers, as far as handshakes tell."""
        self.blocked = ""
        """The data ports on which nothing moves though it should."""
        self._hello_copies: tuple[msg.CopyDigest, ...] = ()
        """Copies, as the newest Hello tells them."""
        self._push_id = 0
        self._run_clock = RunClock()
        self._step_times = StepTimes()
        self._heard_at = self._data_at = self._beat_at = self._moved_at = now
        self._abreast_at = math.inf
        """When a Beat last told a head that is here, or came after a silence. Infinite: no copy can
        be late yet, or the lateness is noted."""
        self._refused_at = now
        """When the broker refused this learner first, if `refusal` is set."""
        self._hello_due = math.inf
        """Before the first connection nobody hears a Hello: it would wait, and be said twice."""
        self._report_at = -math.inf
        self._reported = self._news
        self._leaving_at: float | None = None
        self._warned_offline: set[Note] = set()
        """The warnings of the present outage."""
        self._noted_given_up = False
        """That work is given up, until no fragment is far behind any more."""
        self._disowned = False

    # What the training thread asks.

    @property
    def joined(self) -> bool:
        """The parameters stand on the run."""
        return bool(self.parts) and all(part.base >= 0 for part in self.parts)

    @property
    def stopping(self) -> bool:
        """No further inner step counts: the run ends, or this learner leaves."""
        return self._leaving_at is not None or self.beat.phase in LAST_PHASES

    @property
    def final(self) -> bool:
        """The parameters are the run's final model, bit for bit."""
        return bool(self.parts) and all(part.standing is Standing.FINAL for part in self.parts)

    def must_wait(self, now: float, *, steps_ahead: int = 0) -> bool:
        """The next inner step must not begin yet; `exchange_without_step` adopts what comes
        meanwhile.

        With `steps_ahead` the answer holds after so many more steps without an exchange.
        """
        if self.ended or self.refused or self.stopping:
            return False
        # Version 0 is being made: its fragments are read one by one and must be of one moment, and
        # no step counts that a learner makes while it waits for version 0.
        seeding = bool(self.parts) and not self.beat.heads
        in_lockstep = self.settings.mode is Mode.DILOCO and any(
            self._in_lockstep(part, steps_ahead) for part in self.parts
        )
        return seeding or in_lockstep or self._offline_too_long(now)

    def due(self, now: float) -> bool:
        """Whether the boundary after the coming step will exchange something, or wait.

        If it is False and no event comes until then, the boundary moves and copies nothing. It may
        be True in vain: only the time of the coming step shows whether this learner is slow. An
        outage that becomes too long during the coming step is due at the boundary after it.
        """
        if self.ended:
            return False
        exchanges = any(self._adopts(part) or self._pushes(part, 1) for part in self.parts)
        return exchanges or self.must_wait(now, steps_ahead=1)

    def foreseen(self, now: float) -> list[Adopt]:
        """The adoptions of the next boundary, as it would decide them now: they can be prepared. A
        training thread that waits adopts at once, and nothing is worth preparing for it."""
        adopting = [part for part in self.parts if self._adopts(part)]
        if self.ended or not adopting or self.must_wait(now):
            return []
        return [
            part.adoption(self._keep(part), final=self._has_ended, warms_up=self._warms_up)
            for part in adopting
        ]

    def run_tokens(self, now: float) -> float:
        """The run's clock in tokens of all learners. It never falls."""
        return self._run_clock.tokens(self.beat, now - self._beat_at)

    def health(self, now: float) -> str:
        """One word: refused, final, ended, offline, joining, waiting, blocked or connected."""
        if self.refused:
            return "refused"
        if self.ended:
            return "final" if self.final else "ended"
        if not self.connected:
            return "offline" if self.joined else "joining"
        if self.joined and self.must_wait(now):
            return "waiting"
        if self.blocked:
            return "blocked"
        return "connected" if self.joined else "joining"

    def view(self, now: float) -> View:
        """Answers what the training loop asks."""
        own_step_tokens = self.tokens / max(1, self.steps)
        return View(
            self.stopping, self.run_tokens(now),
            self.settings.tokens_per_run_step or own_step_tokens, self.settings.goal_tokens,
            self.steps, self.ramp_steps, self.health(now),
        )  # fmt: skip

    @property
    def awaits_data(self) -> bool:
        """Chunks that lead to the newest version are not here yet, and the broker is."""
        transfers = [transfer for part in self.parts for _, transfer in part.pulled]
        return self.connected and not all(transfer.complete for transfer in transfers)

    @property
    def merged_tokens(self) -> int:
        """Logged tokens whose work is in versions; each fragment has its share of a token."""
        settled = sum(part.merged_tokens for part in self.parts)
        # A push counts once its version is here. Who leaves does not adopt that version any more.
        here = sum(part.pushed_tokens for part in self.parts if part.pushed is Pushed.MERGED)
        return (settled + here) // max(1, len(self.parts))

    @property
    def lost_tokens(self) -> int:
        """Logged tokens whose work an adoption overwrote. Tokens that are neither merged nor lost
        are on their way."""
        return sum(part.lost_tokens for part in self.parts) // max(1, len(self.parts))

    # Control.

    @recorded
    def control(self, message: msg.ControlMessage, now: float) -> None:
        """A control message of the broker."""
        if self.ended:
            return
        # A learner that is refused is as alone as one without a broker.
        if not isinstance(message, msg.Refuse):
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

    @recorded
    def lost(self, now: float) -> None:
        """The connection is the first or another one: say Hello at once."""
        self.connected = False
        self._hello_due = now

    # What others than the broker tell.

    @recorded
    def refuse(self, code: ErrorCode, why: NarrowsError) -> None:
        """This learner cannot take part: the training thread raises it."""
        self.refused = refused(code, why)

    @recorded
    def set_obstacle(self, obstacle: NarrowsError | None) -> None:
        """The owner of the sockets knows why nobody answers; None: nothing hinders them."""
        self.obstacle = obstacle

    @recorded
    def set_blocked(self, ports: str) -> None:
        """The owner of the sockets names the data ports on which nothing moves; "": none."""
        self.blocked = ports

    @recorded
    def set_ramp(self, steps: int) -> None:
        """The optimizer's moments are young for so many steps."""
        self.ramp_steps = steps

    def _welcome(self, welcome: msg.Welcome, now: float) -> None:
        settings = welcome.settings
        is_new_life = welcome.beat.epoch != self.epoch
        if not self.parts:
            try:
                table = build_table(self.layout.entries, settings.fragments)
            except NarrowsError as error:
                self.refuse(error.code, error)
                return
            self.parts = tuple(FragmentSession(each, settings) for each in table)
        if is_new_life and self.epoch and self._hello_copies != self._copies():
            # A copy was completed after the Hello that this answers: the broker has not compared
            # it with its history yet.
            self._hello(now)
            return

        self.connected = True
        self.refusal = None
        self.run_id = welcome.run_id
        self.epoch = welcome.beat.epoch
        self.settings = settings
        self.ports = (welcome.uplink_port, welcome.downlink_port)
        if self._warned_offline:
            self._warned_offline.clear()
            self._note("online", f"the broker is back, epoch {self.epoch}", warning=False)
        if is_new_life:
            self._begin_epoch(welcome.go_back)

        self._take_beat(welcome.beat, now)
        for part in self.parts:
            part.expect(now, pull=True)
            # Whether a push is merged is not known; the broker does not answer if it is.
            self._announce(part, now)
            if is_new_life and part.pushed is Pushed.ANNOUNCED:
                self.effects.append(SendChunks(DataKind.PUSH, part.index, part.push_id))
        if welcome.role is Role.SEED and all(part.tip < 0 for part in self.parts):
            self.effects.append(SendChunks(DataKind.LAYOUT))
            self.effects += [SendChunks(DataKind.SEED, part.index) for part in self.parts]
        # At once: a new life of the broker knows neither what we hold nor how fast we are.
        self._report(now)

    def _begin_epoch(self, go_back: msg.FragmentIndexes) -> None:
        """Another life of the broker. The fragments in `go_back` are of another history."""
        # The broker could not compare a base whose copy was damaged.
        back = [each.index for each in self.parts if each.index in go_back or each.tip < each.base]
        for part in self.parts:
            part.new_epoch(self.settings, go_back=part.index in back)
        if back:
            self._note(
                "went_back",
                f"fragments {back}: the broker's history is another, taking its versions",
            )

    def _take_beat(self, beat: msg.Beat, now: float) -> None:
        if beat.epoch != self.epoch or len(beat.heads) not in (0, len(self.parts)):
            self.connected = False  # Another life of the broker, which has not met us.
            return
        was_away = now >= self._beat_at + timing.SILENT_S
        self.beat = beat
        self._beat_at = now
        self.heard_ending = self.heard_ending or self.beat.phase in LAST_PHASES
        for part, head in zip(self.parts, beat.heads, strict=False):  # No heads before version 0.
            part.head = max(part.head, head)
        for part, head, digest in zip(self.parts, beat.heads, beat.digests, strict=False):
            part.told = msg.CopyDigest(head, digest)
            self._drop_altered(part, now)
        # Of a copy further behind the state is fetched, which takes its time.
        all_behind = all(0 < part.head - part.tip <= PUBLICATIONS_KEPT for part in self.parts)
        if not all_behind or not self.joined or was_away:
            self._abreast_at = now
        elif now >= self._abreast_at + LATE_S:
            self._abreast_at = math.inf  # Once, until it is abreast again.
            self._note(
                "late",
                f"for {LATE_S:g} s all copies have been behind the heads: the downlink, or the"
                f" relay, is late: work counts on the heads alone",
            )

    def _drop_altered(self, part: FragmentSession, now: float) -> None:
        """Beats pass no relay: a copy of another digest than a Beat tells was altered on its way.

        The parameters may stand on it, or on one before it that no Beat named: their difference to
        the next copy is not this learner's work.
        """
        if not part.altered:
            return
        part.drop_copy(now)
        part.cast_adrift(self.tokens)
        self._note(
            "altered",
            f"fragment {part.index}: the copy of version {part.told.version} is not the broker's:"
            f" whoever passes publications on, a relay, has altered it. It is dropped, and a state"
            f" is fetched in {part.pause_s:g} s",
        )

    def _serve(self, fetch: msg.Fetch) -> None:
        """The broker lacks chunks. If what it asks for is settled meanwhile, it gets nothing."""
        if fetch.fragment >= len(self.parts):
            return
        part = self.parts[fetch.fragment]
        has = {
            DataKind.LAYOUT: True,
            DataKind.SEED: part.base < 0,
            DataKind.PUSH: part.pushed is Pushed.ANNOUNCED and part.push_id == fetch.push_id,
        }
        if has.get(fetch.kind):
            self.effects.append(SendChunks(fetch.kind, fetch.fragment, fetch.push_id, fetch.chunks))

    def _take_refusal(self, refuse: msg.Refuse, now: float) -> None:
        text = f"{refuse.code}: {refuse.message}"
        if refuse.remedy:
            text += f". {refuse.remedy}"
        if refuse.push_id:
            if refuse.fragment < len(self.parts):
                self.parts[refuse.fragment].give_up(refuse.push_id)
                self._note("push_refused", f"fragment {refuse.fragment}: {text}")
        elif refuse.code not in RETRIED_S:
            self._note("refused", text)
        else:
            is_first = self.refusal is None
            if is_first:
                self._refused_at = now
            self.connected = False
            self.refusal = refused(ErrorCode(refuse.code), refuse)
            if now - self._refused_at >= RETRIED_S[refuse.code]:
                self.refused = self.refusal
            elif is_first and not self.joined:  # Else the outage is told, with this as its reason.
                self._note("refused", f"{text}; trying again")

    # Data.

    @recorded
    def chunk(self, header: msg.Header, now: float) -> bool:
        """Whether a chunk is wanted: then the host keeps its payload before it performs effects."""
        known = header.epoch == self.epoch and header.fragment < len(self.parts)
        if not known or header.kind not in (DataKind.PUBLICATION, DataKind.STATE):
            return False
        if header.incarnation not in ("", self.incarnation):
            return False  # Its push_id tells the outcome of somebody else's push.
        self._data_at = now
        return self.parts[header.fragment].chunk(header, now)

    @recorded
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
            self._note(
                "digest_differs",
                f"fragment {part.index}: version {header.version} is damaged, the state is fetched"
                f" in {part.pause_s:g} s",
            )
            return False
        part.assembled(header, self.incarnation)
        if part.pushed is Pushed.MERGED:
            self._moved_at = now
        self._drop_altered(part, now)
        return part.tip == header.version

    # The training thread.

    @recorded
    def boundary(
        self, tokens: int, loss: float | None, now: float, *, exchanges: bool = True
    ) -> None:
        """After an inner step of `tokens` tokens: adopt what is here, then push what is due.

        Not `exchanges`: nothing was due at the boundary before, so the ranks of an island have not
        met. They count the tokens of a step one boundary late, or at the end by `count`.
        """
        self.steps += 1
        self.tokens += tokens
        if loss is not None:  # The newest one stays, where a step tells none.
            self.loss = loss
        self._losses = self._losses.with_one(loss)
        self._step_times.stepped(now)
        if self.beat.phase is Phase.RUNNING:
            self.heard_ending = False  # The step counts: the run goes on, with a larger goal.
        for part in self.parts:
            part.tokens += tokens
            part.steps += 1
        if exchanges:
            self._exchange()
        if now >= self._report_at + timing.REPORT_S:
            self._report(now)

    @recorded
    def count(self, tokens: int) -> None:
        """Tokens of the last step, which no boundary has counted, and no push has taken. Where the
        step itself was overwritten meanwhile, they are lost."""
        self.tokens += tokens
        for part in self.parts:
            if part.steps > 0:
                part.tokens += tokens
            else:
                part.lost_tokens += tokens

    @recorded
    def exchange_without_step(self) -> None:
        """Between two steps, while none is made: before the first, in lockstep, at the end."""
        self._step_times.interrupt()
        self._exchange()

    @recorded
    def encoded(self, index: int, push_id: int, now: float) -> None:
        """The push is coded: it is announced and sent."""
        part = self.parts[index]
        if part.push_id == push_id:  # Else it was given up meanwhile.
            part.pushed = Pushed.ANNOUNCED
            part.failed_codings = 0
            self._moved_at = now
            if self.connected:
                self._announce(part, now)
            self.effects.append(SendChunks(DataKind.PUSH, index, push_id))

    @recorded
    def sent(self, now: float) -> None:
        """A chunk of this learner has left: its push is under way."""
        self._moved_at = now

    @recorded
    def encode_failed(self, index: int, push_id: int, *, reason: str, finite: bool = True) -> None:
        """The push cannot be coded. Not `finite`: the parameters are nan or inf, so they are set
        back to the newest version, or this learner would never learn again."""
        part = self.parts[index]
        part.give_up(push_id, finite=finite)
        part.failed_codings += 1
        if part.failed_codings == FAILED_CODINGS_TOLD:
            reason += NOT_NOTED_AGAIN[finite]
        if part.failed_codings <= FAILED_CODINGS_TOLD:
            self._note("encode_failed", f"fragment {index}: {reason}")

    @recorded
    def pause(self, reason: str | None) -> None:
        """The loop makes no steps for a while, so no round should wait for it; None: it goes on."""
        self.paused = reason
        self._step_times.interrupt()

    @recorded
    def leave(self, now: float) -> None:
        """The loop is over: push what is left, wait for what is merged or final, then Bye.

        Gives up when nothing has moved for LEAVE_S, and after LEAVE_MAX_S in any case.
        """
        if self._leaving_at is None:
            self._leaving_at = self._moved_at = now
            self.pause("leaving")

    @recorded
    def disown(self) -> None:
        """The parameters are somebody else's work, such as averaged weights: none of them is pushed
        and the steps that no push has taken are lost. Call before `leave`. They stay as they are,
        but for the run's final model."""
        self._disowned = True
        tokens = max((part.tokens for part in self.parts), default=0)
        for part in self.parts:
            part.drop_unpushed()
        self._note(
            "swapped",
            "something else than the optimizer has changed the parameters since the last step, such"
            f" as averaged or best weights: they are not pushed, and up to {tokens:,} tokens that"
            " no push has taken are lost. Leave the block first, then swap weights in",
        )

    @recorded
    def abandon(self) -> None:
        """Leaves at once, whatever is on its way."""
        if not self.ended:
            self.effects = [msg.Bye("the loop was broken off")]
            self.ended = True

    @recorded
    def broken_off(self, reason: str, *, decided: bool) -> None:
        """An exception left a call of the training thread, a signal's for instance. `effects` are
        those that are not known to be performed; `decided`: all were decided.

        A fragment that was to move, or to be copied, is cast adrift: nobody knows how far that
        came. Other effects stay, since none of them does harm when it is performed twice.
        """
        touched = {each.fragment for each in self.effects if isinstance(each, Adopt | Snapshot)}
        if not decided:
            touched = {part.index for part in self.parts}
        self.effects = [each for each in self.effects if not isinstance(each, Adopt | Snapshot)]
        for part in self.parts:
            part.assembling = None  # Its effect may be lost. To make a copy twice does no harm.
            if part.index in touched:
                part.cast_adrift(self.tokens)
        if not touched:
            return
        if self.ended:  # It was to leave with the final model, and does not have that now.
            self.effects = [each for each in self.effects if not isinstance(each, msg.Bye)]
            self.ended = False
        self._note(
            "broken_off",
            f"{reason} in the middle of the exchange: fragments {sorted(touched)} take the"
            f" newest version, what they have not sent is given up",
        )

    def _exchange(self) -> None:
        """Adopts, then pushes, fragment by fragment."""
        if self.ended:
            return
        for part in self.parts:
            if self._disowned:  # A push that has failed is not made again, of other parameters.
                part.drop_unpushed()
            if self._adopts(part):
                keep = self._keep(part)
                self._note_given_up(part, keep)
                adopted = part.adopt(keep, final=self._has_ended, warms_up=self._warms_up)
                self.effects.append(adopted)
            if self._pushes(part):
                self._push_id += 1
                self.effects.append(part.snapshot(self._push_id, self._losses))
        if self._noted_given_up:
            self._noted_given_up = any(part.head - part.base > 1 for part in self.parts)

    @property
    def _has_ended(self) -> bool:
        return self.beat.phase is Phase.ENDED

    def _adopts(self, part: FragmentSession) -> bool:
        """Whether the parameters of a fragment move to its newest copy at this boundary."""
        if self._has_ended:  # They take the final model and no version before it.
            return part.tip == part.head >= 0 and part.standing is not Standing.FINAL
        return part.can_adopt and not self._disowned

    @property
    def _warms_up(self) -> bool:
        """The newest step is one of an optimizer that warms up: its rate is scaled down, and its
        moments are young."""
        return self.steps <= self.ramp_steps

    def _keep(self, part: FragmentSession) -> float:
        """The share of the unpushed work that an adoption keeps."""
        if self._has_ended:
            return 0.0  # The final model is everybody's, bit for bit.
        if self._is_slow():
            return 1.0  # It is pushed whole at this very boundary.
        if part.missed_versions:
            return 0.0  # Old work on an old point.
        if self._warms_up:
            return 0.0
        return 1.0 if self.stopping else self.settings.keep

    def _note_given_up(self, part: FragmentSession, keep: float) -> None:
        """Tells of the work that an adoption gives up: once, until no fragment is far behind any
        more. A pause of the machine that is no absence, and a step that takes long because it
        compiles, are no trouble: they warn of nothing."""
        is_given_up = keep == 0 and part.missed_versions and not self._has_ended
        if not is_given_up or not part.tokens or self._noted_given_up:
            return
        self._noted_given_up = True
        missed = part.tip - part.base
        text = (
            f"{missed} versions came out without this learner: what it has learned and not sent"
            f" since, {part.tokens:,} tokens, is given up"
        )
        period_s = self.beat.period_s
        is_absence = missed * period_s >= timing.SILENT_S
        if not is_absence:
            text += (
                f". In this run a version comes out every {period_s:.2g} s, so a short pause of the"
                " machine costs that; where it happens often, raise fragments.sync_period_steps"
            )
        self._note("given_up", text, warning=is_absence and part.steps > 1)

    def _pushes(self, part: FragmentSession, steps_ahead: int = 0) -> bool:
        """Whether the unpushed work of a fragment becomes a push at this boundary, or after so many
        steps more."""
        steps = part.steps + steps_ahead
        is_ready = part.standing is Standing.BASED and part.push is None and steps > 0
        if not is_ready or self.stopping:
            return is_ready and self.beat.phase is not Phase.ENDED
        if self.settings.mode is Mode.DILOCO:
            return steps >= self.settings.sync_period_steps
        # That Beat's head, not the newest that is known: its round is over once a later one exists.
        is_open = part.index in self.beat.collecting and self.beat.heads[part.index] == part.base
        return self.connected and (is_open or self._is_slow(steps_ahead))

    def _is_slow(self, steps_ahead: int = 0) -> bool:
        """A step takes longer than half a period, so this learner meets open rounds by luck. With
        `steps_ahead`: that may become so, however long those steps take."""
        if self.settings.mode is Mode.DILOCO:
            return False
        late_s = self.beat.period_s * timing.LATE_STEP_PERIODS
        return 0 < late_s < self._step_times.median_s(steps_ahead)

    def _in_lockstep(self, part: FragmentSession, steps_ahead: int) -> bool:
        """In mode diloco a learner waits for the version that holds its push, from `overlap_steps`
        steps after the push on."""
        if part.push is None:
            # Its version came before the Beat that names it, and that Beat may end the run: wait.
            return not self.beat.heads or self.beat.heads[part.index] < part.base
        steps_max = self.settings.overlap_steps
        if part.base > part.push.base:
            # Others merged a version without this push: it may make a whole period of steps before
            # it waits.
            steps_max = self.settings.sync_period_steps
        return part.steps + steps_ahead >= steps_max

    def _offline_too_long(self, now: float) -> bool:
        return not self.connected and 0 < self.settings.max_offline_s < now - self._heard_at

    # Time.

    @recorded
    def tick(self, now: float) -> None:
        """After each event, and when `deadline` has come: says Hello while offline; else reports,
        asks for what is missing, and leaves when due."""
        if self.ended or self.refused:
            return
        if self.connected and now >= self._heard_at + timing.SILENT_S:
            self.connected = False
        assemblies = [part.next_assembly(now) for part in self.parts]
        self.effects += [each for each in assemblies if each is not None]
        if self.connected:
            if self._news != self._reported or now >= self._report_due:
                self._report(now)
            for part in self.parts:
                # The broker drops one above a quota, and without it the push would wait for ever.
                self._announce(part, now, timing.ANNOUNCE_S)
            self._ask(now)
        elif now >= self._hello_due:
            self._hello(now)
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
        retries = [part.again_at for part in self.parts if now < part.again_at]
        return min(leave_at, self._report_due, self._heard_at + timing.SILENT_S, *asks, *retries)

    @property
    def _report_due(self) -> float:
        # The broker takes step times from Reports: one at a boundary is exact, so it goes first.
        return self._report_at + timing.REPORT_S + min(self._step_times.median_s(), timing.REPORT_S)

    def _hello(self, now: float) -> None:
        if self.joined:
            self._warn_offline(now)
        self._hello_due = now + timing.HELLO_S
        self._hello_copies = self._copies()
        hello = msg.Hello(
            msg.PROTOCOL, self.name, self.incarnation, self.run_id, self.epoch,
            fingerprint(self.layout), self._hello_copies,
        )  # fmt: skip
        self.effects.append(hello)

    def _warn_offline(self, now: float) -> None:
        """Warns of an outage, once for each reason, and once that it has become too long."""
        reason = self.obstacle or self.refusal or "it is not heard"
        warning = Note("offline", f"training goes on without the broker: {reason}")
        if self._leaving_at is not None:
            what = f"the broker is away: waits up to {timing.LEAVE_S:g} s to push what is left"
            warning = Note("offline", f"{what}: {reason}")
        elif self._offline_too_long(now):
            after = f"after {self.settings.max_offline_s:.0f} s"
            warning = Note("paused", f"training pauses {after} without the broker: {reason}")
        if warning not in self._warned_offline:
            self._warned_offline.add(warning)
            self.effects.append(warning)

    def _copies(self) -> tuple[msg.CopyDigest, ...]:
        return tuple(part.newest_copy for part in self.parts)

    @property
    def _news(self) -> tuple[str | None, bool, msg.FragmentIndexes]:
        """The part of a Report that goes out at once when it changes."""
        is_ending = self.beat.phase is Phase.ENDING
        finished = tuple(part.index for part in self.parts if is_ending and part.finished)
        return self.paused, self.joined, finished

    def _report(self, now: float) -> None:
        if not self.connected:
            return
        self._report_at = now
        self._reported = self._news
        paused, _, finished = self._reported
        bases = tuple(part.base for part in self.parts)
        report = msg.Report(
            steps=self.steps,
            tokens=self.tokens,
            loss=self.loss,
            bases=bases,
            paused=paused,
            lost_tokens=self.lost_tokens,
            finished=finished,
        )
        self.effects.append(report)

    def _announce(self, part: FragmentSession, now: float, after_s: float = 0.0) -> None:
        """Announces a push that waits for its outcome, if it was not announced for `after_s`."""
        if part.push and part.pushed is Pushed.ANNOUNCED and now >= part.announced_at + after_s:
            part.announced_at = now
            self.effects.append(part.push)

    def _ask(self, now: float) -> None:
        """Fetches what is missing and due, within one window for all fragments."""
        asked = sum(each.asked for part in self.parts for each in part.arriving.values())
        room = self.settings.window_messages - asked
        for part in [each for each in self.parts if now >= each.again_at]:
            part.expect(now, pull=False)
            for key, transfer in part.pulled:
                if ranges := transfer.ask(now, self._data_at, room + transfer.asked):
                    room -= sum(count for _, count in ranges)
                    fetch = msg.Fetch(key.kind, part.index, key.version, 0, ranges)
                    self.effects.append(fetch)

    def _end_if_due(self, now: float) -> None:
        """Says Bye once the final model is adopted, or once leaving has nothing to wait for."""
        moved_at = self._moved_at
        if self.heard_ending:
            # In a run that ends, a broker that is here decides how long the last rounds may take.
            moved_at = max(moved_at, self._heard_at)
        leave_max_s = math.inf if self.beat.phase in LAST_PHASES else timing.LEAVE_MAX_S
        if self.beat.phase is Phase.ENDED and self.final:
            reason = "the run has ended"
        elif self._leaving_at is None:
            return
        elif not self.heard_ending and all(part.finished for part in self.parts):
            reason = "the loop has ended"
        elif now >= min(moved_at + timing.LEAVE_S, self._leaving_at + leave_max_s):
            unfinished = [part.index for part in self.parts if not part.finished]
            reason = f"leaves without the outcome of its last pushes, of fragments {unfinished}"
            if self.heard_ending:
                reason = "leaves without the run's final model"
            self._note("left", reason)
        else:
            return
        self._report(now)
        self.effects.append(msg.Bye(reason[: msg.TEXT_CHARACTERS_MAX]))
        self.ended = True

    def _note(self, event: str, text: str, *, warning: bool = True) -> None:
        self.effects.append(Note(event, text, warning))

    def check(self) -> None:
        """Asserts what always holds; the simulator calls it after every event."""
        ids = [part.push_id for part in self.parts if part.push]
        assert len(ids) == len(set(ids)), ids
        for part in self.parts:
            part.check()
            assert part.push is None or 0 < part.push_id <= self._push_id, part
            known = part.merged_tokens + part.lost_tokens + part.pushed_tokens + part.tokens
            assert known == self.tokens, part


def refused(code: ErrorCode, why: NarrowsError | msg.Refuse) -> Refused:
    """The error that the training thread raises."""
    return Refused(code, why.message, expected=why.expected, got=why.got, remedy=why.remedy)
