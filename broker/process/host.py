"""The broker without sockets, threads or a clock: it performs what the syncer decides.

The process gives it real ports and the simulator virtual ones; this file is the same in both. Bytes
of peers enter here, and whatever is wrong with them becomes a refusal: nothing is raised for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Final

from msgspec import structs

from narrows.broker.config import BrokerConfig
from narrows.broker.merging import Alarm
from narrows.broker.process.downlink import Downlink
from narrows.broker.process.gauges import Meter, Refusals
from narrows.broker.process.pipeline import Pipeline, replay
from narrows.broker.store import Store
from narrows.broker.syncer import Syncer
from narrows.broker.syncer import events as ev
from narrows.proto import messages as msg
from narrows.proto import wire
from narrows.proto.errors import RETRIED, ErrorCode, RemoteProtocolError, fault, printable
from narrows.proto.ports import BrokerWires, Done, Pool

ASKERS_MAX: Final = 64
"""Connections that hear of the end of the run unasked: those that asked last."""


class Host:
    """One life of the broker, from the state directory on."""

    def __init__(
        self,
        config: BrokerConfig,
        wires: BrokerWires,
        pool: Pool,
        store: Store,
        now: Callable[[], float],
        nonce: str,
        *,
        now_unix: Callable[[], float],
        reach: Callable[[str], None] = lambda place: None,
        on_note: Callable[[ev.Note], None] = lambda note: None,
        on_fault: Callable[[str, float], None] = lambda peer, now: None,
        measure: Callable[[msg.Status, float], msg.Status] = lambda status, now: status,
    ) -> None:
        """Begins a life, durable before it returns, and replays what the last one left.

        `nonce` is eight random hex digits. `now` tells the monotonic time, `now_unix` seconds since
        1970. `reach` is called with each of pipeline.CRASH_PLACES, `on_fault` with the connection
        of each refusal that counts against a key, "" for the message in hand. `measure` adds to a
        Status what the process tells of itself. Raises StateError.
        """
        self._wires = wires
        self._pool = pool
        self._reach = reach
        self._on_note = on_note
        self._on_fault = on_fault
        recovered = store.recover(now_unix())
        alarm = Alarm()
        model = replay(config, store, recovered, alarm, on_note)
        epoch = f"{recovered.life}-{nonce}"
        # The time after the replay, which may take minutes: times that begin with this life, such
        # as the wait for those who have trained, would be over before anybody could come.
        self.syncer = Syncer(
            config,
            epoch,
            recovered,
            now(),
            published_digest=store.published_digest,
            newest_push=store.newest_push,
        )
        self.pipeline = Pipeline(
            config, self, store, self.syncer, recovered, model, alarm, reach=reach, note=on_note
        )
        self.downlink = Downlink(config, epoch, wires, self, self.pipeline)
        self.finished: ev.Finish | None = None
        """Set when the process should end."""
        self._measure = measure
        self._refusals = Refusals()
        self._meter = Meter(config, self.downlink, now())
        self._working = 0
        """Pieces of work that the pool has not given back."""
        self._idle_at = now()
        """When it had given all of them back last."""
        self._askers: dict[str, None] = {}
        """Connections that asked for a Status, the newest last, ASKERS_MAX at most."""

    # -- what comes in

    def control(self, peer: str, site: str | None, frames: list[bytes], now: float) -> None:
        """A control message of a connection, whose key may speak for `site` (None: no keys)."""
        try:
            message = wire.decode_control(frames, msg.CONTROL_UP_BYTES_MAX)
        except RemoteProtocolError as error:
            self.syncer.refuse(peer, error)
        else:
            self.syncer.control(peer, site, message, now)
        self._came(frames, now)

    def data(self, site: str | None, frames: list[bytes], now: float) -> None:
        """A data message: topic, header, payload.

        The uplink has no way back: the log names a sender whose data cannot be read, or that speaks
        for another. A push that no round can take is refused on control.
        """
        try:
            header = _sender_header(site, frames)
            # Data for another life were on their way during a restart. What is missing after it is
            # asked for again.
            if header.epoch == self.syncer.state.epoch:
                self._chunk(header, frames[2], now)
        except RemoteProtocolError as error:
            self._on_fault("", now)
            text = f"data from {site or 'the uplink'} refused: {printable(str(error))}"
            fields: dict[str, object] = {"code": error.code.value, "learner": site or ""}
            self._note(ev.Note("refused", text, fields, warning=True), now)
        self._came(frames, now)

    def is_learner(self, peer: str) -> bool:
        """Whether a learner that is here speaks on this connection."""
        return peer in self.syncer.state.members.by_peer

    def learners(self) -> list[str]:
        """Names of the learners that are here, for the quotas of their keys."""
        return [member.name for member in self.syncer.state.members.connected()]

    def revoked(self, sites: Collection[str], now: float) -> None:
        """Sites have no key any more; their connections end."""
        self.syncer.revoked(sites, now)
        self._perform(now)

    def _chunk(self, header: msg.Header, payload: bytes, now: float) -> None:
        wire.check_payload(header, payload)
        if header.codec != msg.LOSSLESS and header.kind is not msg.DataKind.PUSH:
            raise fault(
                "codec of version 0",
                expected=msg.LOSSLESS,
                got=header.codec,
                remedy="send version 0 without loss",
                code=ErrorCode.BAD_CHUNK,
            )
        if header.kind is msg.DataKind.LAYOUT:
            if self.syncer.wants_layout(header.incarnation):
                self.syncer.layout(header.incarnation, wire.unpack_layout(payload), now)
        elif self.syncer.take_chunk(header, now):
            self._meter.up_bytes[wire.name_of(header.incarnation)] += len(payload)
            self.pipeline.keep(header, payload)

    def _came(self, frames: list[bytes], now: float) -> None:
        # Acknowledgements of what comes leave on the line that the budget is for.
        self.downlink.sender.received(map(len, frames), now)
        self._perform(now)

    # -- time, and the end

    def turn(self, now: float) -> None:
        """Does what is due; called at `deadline`, and whenever the socket may have room again."""
        self.pipeline.turn(now)
        self._meter.turn(len(self.syncer.state.members.by_peer), now)
        self.syncer.advance(now)
        self._perform(now)
        members = self.syncer.state.members.connected()
        self.downlink.turn(now, [member.incarnation for member in members])

    def deadline(self, now: float) -> float:
        """Time at which `turn` is to be called if nothing comes before."""
        sends_at = self.downlink.sender.deadline(now)
        return min(self.syncer.wake_at, self.pipeline.deadline(), sends_at)

    def stop(self, reason: str, now: float) -> None:
        """The operator ends the process: everybody is told, and `finished` is set."""
        self.syncer.stop(reason, now)
        self._perform(now)
        self.finished = self.finished or ev.Finish(())

    def run(self, work: Callable[[], Any], done: Done) -> None:
        """The pool, as pipeline and downlink see it: what `done` decides is performed."""

        def finish(result: Any, now: float) -> None:
            self._working -= 1
            if not self._working:
                self._idle_at = now
            done(result, now)
            self._perform(now)

        self._working += 1
        self._pool.run(work, finish)

    def status(self, now: float) -> msg.Status:
        """The run as people see it: what the syncer knows, and what passes through here."""
        told = self.syncer.status(now)
        self._meter.describe(told.learners, now)
        status = structs.replace(
            told,
            line=self._meter.line(told.line, now),
            disk=self.pipeline.disk(now),
            process=msg.ProcessStatus(
                queue=self._working, busy_s=now - self._idle_at if self._working else 0.0
            ),
            refused=(*told.refused, *self._refusals.newest(now)),
            refusals=dict(self._refusals.by_code),
        )
        return self._measure(status, now)

    # -- effects

    def _perform(self, now: float) -> None:
        """Performs effects in order; what they lead to comes after all that wait."""
        while self.syncer.effects:
            self._do(self.syncer.effects.popleft(), now)
        self.downlink.pump(now)

    def _do(self, effect: ev.Effect, now: float) -> None:
        match effect:
            case ev.Send(peer, message):
                self._send(peer, message, now)
            case ev.AnswerStatus(peer):
                self._send(peer, self.status(now), now)
                self._askers.pop(peer, None)
                self._askers[peer] = None
                if len(self._askers) > ASKERS_MAX:
                    del self._askers[next(iter(self._askers))]
            case ev.Seed():
                self.pipeline.seed(effect)
            case ev.MergeRound():
                self.pipeline.merge(effect)
            case ev.Commit():
                self.pipeline.commit(effect)
            case ev.Publish(fragment, version):
                self.downlink.publish(fragment, version, now)
                self._reach("published")
            case ev.Drop():
                self.pipeline.drop(effect)
            case ev.Serve(incarnation, fetch):
                self.downlink.serve(incarnation, fetch, now)
            case ev.CommitEnd():
                self.pipeline.commit_end(effect)
            case ev.Finish():
                self.finished = effect
                told = self.status(now)
                # Else who asks now and then could not tell this end from an outage.
                for peer in self._askers:
                    self._send(peer, told, now)
            case ev.Note():
                self._note(effect, now)

    def _note(self, note: ev.Note, now: float) -> None:
        if note.event == "refused":
            self._refusals.count(
                str(note.fields["learner"]), str(note.fields["code"]), note.text, now
            )
        if note.event in ("joined", "rejoined"):
            self._refusals.admitted(str(note.fields["learner"]))
        self._on_note(note)

    def _send(self, peer: str, message: msg.ControlMessage, now: float) -> None:
        if isinstance(message, msg.Refuse) and message.code not in RETRIED:
            self._on_fault(peer, now)
        frames = wire.encode_control(message)
        # What no socket takes costs the line nothing: publications must not wait for it.
        if self._wires.control(peer, frames):
            self.downlink.sender.charge(map(len, frames), now)


def _sender_header(site: str | None, frames: list[bytes]) -> msg.Header:
    """The header of a message that may go up, of somebody for whom the key speaks.

    Raises RemoteProtocolError.
    """
    expected = "topic, header and payload of a PUSH, SEED or LAYOUT that names its learner"
    remedy = "connect learners to the uplink, not brokers"
    if len(frames) != 3:
        raise fault("data", expected=expected, got=f"{len(frames)} frames", remedy=remedy)
    header = wire.decode_header(frames[1])
    name = wire.name_of(header.incarnation)
    kind = header.kind
    if not name or kind in (msg.DataKind.PUBLICATION, msg.DataKind.STATE):
        raise fault("data", expected=expected, got=f"{kind.name} of {name!r}", remedy=remedy)
    if site is not None and not wire.speaks_for(site, name):
        raise fault(
            "the key is another site's",
            expected=f"a learner named {site} or {site}/...",
            got=name,
            remedy="use the key of the learner's own site",
            code=ErrorCode.KEY_NAME,
        )
    return header
