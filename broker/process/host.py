"""The broker without sockets, threads or a clock: it performs what the syncer decides.

The process gives it real ports and the simulator virtual ones; this file is the same in both. Bytes
of peers enter here, and whatever is wrong with them becomes a refusal: nothing is raised for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Final

from narrows.broker.config import BrokerConfig
from narrows.broker.process.downlink import Downlink
from narrows.broker.process.pipeline import Pipeline
from narrows.broker.store import Store
from narrows.broker.syncer import Syncer
from narrows.broker.syncer import events as ev
from narrows.proto import messages as msg
from narrows.proto import wire
from narrows.proto.errors import RETRIED, ErrorCode, RemoteProtocolError, printable
from narrows.proto.ports import BrokerWires, Done, Pool

NO_FAULT = frozenset({*RETRIED, ErrorCode.MERGE_FAILED})
"""Refusals that an honest learner meets; they do not count against its key."""

SWEEP_S: Final = 1.0
"""Seconds between two looks for answers that wait for learners who are gone."""


class Host:
    """One life of the broker, from the state directory on."""

    def __init__(
        self,
        config: BrokerConfig,
        wires: BrokerWires,
        pool: Pool,
        store: Store,
        now: float,
        nonce: str,
        *,
        now_unix: Callable[[], float],
        reach: Callable[[str], None] = lambda place: None,
        on_note: Callable[[ev.Note], None] = lambda note: None,
    ) -> None:
        """Begins a life, durable before it returns, and replays what the last one left.

        `nonce` is eight random hex digits. `now` is monotonic, `now_unix` in seconds since 1970.
        `reach` is called with each of log.CRASH_PLACES. Raises StateError.
        """
        self._wires, self._pool, self._reach, self._on_note = wires, pool, reach, on_note
        recovered = store.recover(now_unix())
        epoch, run_id = f"{recovered.life}-{nonce}", recovered.run_id
        self.pipeline = Pipeline(config, self, store, reach, on_note)
        resumed, digest = self.pipeline.resume(recovered), store.published_digest
        newest = store.newest_push
        self.syncer = Syncer(
            config, epoch, run_id, now, resumed=resumed, published_digest=digest, newest_push=newest
        )
        self.pipeline.syncer = self.syncer
        self.downlink = Downlink(config, epoch, wires, self, self.pipeline)
        self.finished: ev.Finish | None = None
        """Set when the process should end."""
        self._swept_at = now
        self._performing = False
        self._refusals = 0
        self._up_bytes: Counter[str] = Counter()
        """Payloads of this life, by learner."""
        self._received_bytes = 0

    # -- what comes in

    def control(self, peer: str, site: str | None, frames: list[bytes], now: float) -> bool:
        """A control message of a connection, whose key may speak for `site` (None: no keys).

        False: it was refused, and that counts against the key.
        """
        before = self._refusals
        try:
            message = wire.decode_control(frames, msg.CONTROL_UP_BYTES_MAX)
        except RemoteProtocolError as error:
            self.syncer.refused(peer, error, now)
        else:
            self.syncer.control(peer, site, message, now)
        self._came(frames, now)
        return self._refusals == before

    def data(self, site: str | None, frames: list[bytes], now: float) -> bool:
        """A data message: topic, header, payload. False: refused, as in `control`.

        The uplink has no way back: who sends what cannot be read, or speaks for another, is named
        in the log. A push that no round can take is refused on control.
        """
        before = self._refusals
        try:
            header = _checked_header(site, frames)
            # What is for another life was on its way during a restart. What lacks is asked for.
            if header.epoch == self.syncer.epoch:
                self._chunk(header, frames[2], now)
        except RemoteProtocolError as error:
            self._refusals += 1
            text = f"data from {site or 'the uplink'} refused: {printable(str(error))}"
            self._on_note(ev.Note("refused", text, {"code": error.code.value}, warning=True))
        self._came(frames, now)
        return self._refusals == before

    def _chunk(self, header: msg.Header, payload: bytes, now: float) -> None:
        if (got := wire.digest(payload)) != header.payload_digest:
            # Damaged on its way, so it counts as lost: it is asked for again.
            what = f"payload of chunk {header.chunk} of fragment {header.fragment}"
            raise _error(what, f"{header.payload_digest:016x}", f"{got:016x}", ErrorCode.BAD_DIGEST)
        if header.kind is msg.DataKind.PUSH:
            if self.syncer.push_chunk(header, now):
                self._up_bytes[wire.name_of(header.incarnation)] += len(payload)
                self.pipeline.keep(header, payload, now)
        elif header.codec != msg.LOSSLESS:
            raise _error("codec of version 0", msg.LOSSLESS, header.codec, ErrorCode.BAD_CHUNK)
        elif header.kind is msg.DataKind.LAYOUT:
            if self.syncer.wants_layout(header.incarnation):
                self.syncer.layout(header.incarnation, wire.unpack_layout(payload), now)
        elif self.syncer.seed_chunk(header, now):
            self._up_bytes[wire.name_of(header.incarnation)] += len(payload)
            self.pipeline.keep_seed(header, payload)

    def _came(self, frames: list[bytes], now: float) -> None:
        # Acknowledgements of what comes leave on the line that the budget is for.
        self._received_bytes += sum(map(len, frames))
        self.downlink.sender.received(map(len, frames), now)
        self._perform(now)

    # -- time, and the end

    def turn(self, now: float) -> None:
        """Does what is due; called at `deadline`, and whenever the socket may have room again."""
        self.pipeline.turn(now)
        self.syncer.advance(now)
        self._perform(now)
        members = self.syncer.state.members.connected()
        self.downlink.members(member.name for member in members)
        if now >= self._swept_at + SWEEP_S:
            self._swept_at = now
            self.downlink.forget_all_but(member.incarnation for member in members)
        self.downlink.turn(now)

    def deadline(self, now: float) -> float:
        """Time at which `turn` is to be called if nothing comes before."""
        parts = self.syncer.deadline(now), self.pipeline.deadline(), self.downlink.deadline(now)
        return min(parts)

    def stop(self, reason: str, now: float) -> None:
        """The operator ends the process: everybody is told, and `finished` is set."""
        self.syncer.stop(reason, now)
        self._perform(now)
        self.finished = self.finished or ev.Finish(())

    def close(self) -> None:
        """Writes snapshots, so that the next start replays nothing. Called after the workers."""
        self.pipeline.close()

    def run(self, work: Callable[[], Any], done: Done) -> None:
        """The pool, as pipeline and downlink see it: what `done` decides is performed."""

        def finish(result: Any, now: float) -> None:
            done(result, now)
            self._perform(now)

        self._pool.run(work, finish)

    def status(self, now: float) -> dict[str, object]:
        """The run as people see it: what the syncer knows, and the bytes of the data sockets."""
        status = self.syncer.status(now)
        self._add_bytes(status)
        return status

    def _add_bytes(self, status: dict[str, object]) -> None:
        down = self.downlink
        learners = status["learners"]
        assert isinstance(learners, dict)
        for name, learner in learners.items():
            learner["up_bytes"] = self._up_bytes[name]
            learner["down_bytes"] = down.asked_bytes[name] + down.live_bytes
        status["up_bytes"] = self._received_bytes
        status["down_bytes"] = down.asked_bytes.total() + down.fanned_bytes

    # -- effects

    def _perform(self, now: float) -> None:
        """Performs effects in order; what they lead to in their turn comes after them."""
        if self._performing:
            return
        self._performing = True
        try:
            while effects := list(self.syncer.effects):
                self.syncer.effects.clear()
                for effect in effects:
                    self._do(effect, now)
        finally:
            self._performing = False
        self.downlink.pump(now)

    def _do(self, effect: ev.Effect, now: float) -> None:
        match effect:
            case ev.Send(peer, message):
                self._send(peer, message, now)
            case ev.Seed():
                self.pipeline.seed(effect)
            case ev.Merge():
                self.pipeline.merge(effect)
            case ev.Commit(fragment):
                self.pipeline.commit(fragment)
            case ev.Publish(fragment, version):
                self.downlink.publish(fragment, version, now)
                self._reach("published")
            case ev.Drop():
                self.pipeline.drop(effect)
            case ev.Serve(incarnation, fetch):
                self.downlink.serve(incarnation, fetch, now)
            case ev.CommitEnd():
                self.pipeline.commit_end()
            case ev.Finish():
                self.finished = effect
            case ev.Note():
                self._on_note(effect)

    def _send(self, peer: str, message: msg.ControlMessage, now: float) -> None:
        if isinstance(message, msg.Refuse) and message.code not in NO_FAULT:
            self._refusals += 1
        if isinstance(message, msg.Status):
            self._add_bytes(message.status)
        frames = wire.encode_control(message)
        self.downlink.sender.charge(map(len, frames), now)
        self._wires.control(peer, frames)


def _checked_header(site: str | None, frames: list[bytes]) -> msg.Header:
    """The header of a message that may go up, of somebody for whom the key speaks.

    Raises RemoteProtocolError.
    """
    expected = "topic, header and payload of a PUSH, SEED or LAYOUT that names its learner"
    if len(frames) != 3:
        raise _error("data", expected, f"{len(frames)} frames")
    header = wire.decode_header(frames[1])
    name, kind = wire.name_of(header.incarnation), header.kind
    if not name or kind in (msg.DataKind.PUBLICATION, msg.DataKind.STATE):
        raise _error("data", expected, f"{kind.name} of {name!r}")
    if site is not None and not wire.speaks_for(site, name):
        what, expected = "the key is another site's", f"a learner named {site} or {site}/..."
        remedy = "use the key of the learner's own site"
        raise _error(what, expected, name, ErrorCode.KEY_NAME, remedy)
    return header


def _error(
    what: str, expected: str, got: str, code: ErrorCode = ErrorCode.BAD_MESSAGE, remedy: str = ""
) -> RemoteProtocolError:
    return RemoteProtocolError(code, what, expected=expected, got=got, remedy=remedy)
