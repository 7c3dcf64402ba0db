"""The learner's data path: published copies, chunks, pushes, the outbox. No decisions.

Called on the background thread, which alone changes `published`; slow work runs on a pool and
reports through `post`, which hands an event to the background thread.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

from narrows.learner import events as ev
from narrows.learner.device import DeviceSnapshot
from narrows.learner.uplink import Parcel, PushWork, Ranges, Residuals, encode_push, touches
from narrows.learner.wires import Wires
from narrows.proto import messages as msg
from narrows.proto.chunk import DecodedChunk
from narrows.proto.errors import ErrorCode, NarrowsError, RemoteProtocolError
from narrows.proto.fragments import Fragment
from narrows.proto.frames import decode_data, encode_header
from narrows.proto.limits import PROTOCOL
from narrows.proto.outbox import Lane, Outbox
from narrows.proto.rate import RateControl, codecs_of, rate_control
from narrows.proto.socket_options import STREAM_WINDOW_BYTES
from narrows.proto.transfer import (
    STATE_CODEC,
    EncodedChunk,
    advance_copy,
    decode_chunk,
    digest_of,
    encode_fragment,
    values_of,
)

F32: TypeAlias = NDArray[np.float32]


@dataclass
class Counters:
    """Bytes are those of ZeroMQ frames: topic, header and payload."""

    data_up_bytes: int = 0
    data_down_bytes: int = 0
    push_bytes: int = 0
    push_elements: int = 0
    publication_bytes: int = 0
    publication_elements: int = 0
    pushes: int = 0


class Exchange:
    """What one learner sends, receives and holds, by fragment."""

    def __init__(
        self,
        wires: Wires,
        *,
        name: str,
        incarnation: str,
        layout: Sequence[msg.LayoutEntry],
        post: Callable[[Callable[[], ev.Event | None]], None],
        records: Path | None,
    ) -> None:
        self._wires = wires
        self._name, self._incarnation, self._layout = name, incarnation, layout
        self._post = post
        self._records = records.open("a", buffering=1) if records else None
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="narrows-codec")
        self.counters = Counters()
        self.table: tuple[Fragment, ...] = ()
        self.settings: msg.RunSettings | None = None
        #: The published copy per fragment. Arrays are replaced, never changed in place.
        self.published: dict[int, F32] = {}
        self._run_id, self._epoch = "", (0, 0)
        self._outbox = Outbox[Parcel](1, STREAM_WINDOW_BYTES)
        self._residuals = Residuals(False)
        self._rates: list[RateControl] = []
        #: Pushes whose outcome is open, by id.
        self.pushes: dict[int, PushWork] = {}
        self._chunks: dict[int, tuple[int, DecodedChunk]] = {}
        #: The newest result of an apply; replaced by the next one if the session refuses it.
        self._applied: tuple[F32, int] | None = None
        self._handle = 0

    def _submit(self, work: Callable[[], None]) -> None:
        """Runs `work` on the pool; an unexpected error ends the background thread, loudly."""

        def guarded() -> None:
            try:
                work()
            except Exception as error:
                self._post(partial(_raise, error))

        self._pool.submit(guarded)

    def identify(self, run_id: str, epoch: tuple[int, int]) -> None:
        """Headers carry these from now on; what was queued under another epoch is dropped."""
        if (run_id, epoch) != (self._run_id, self._epoch):
            self._outbox.discard(lambda parcel: True)
        self._run_id, self._epoch = run_id, epoch

    def open_streams(self, effect: ev.OpenStreams) -> None:
        settings = effect.settings
        if self.settings is None:
            self._outbox = Outbox[Parcel](settings.streams, STREAM_WINDOW_BYTES)
            self._residuals = Residuals(settings.error_feedback)
            self.table = effect.table
            self._rates = [
                rate_control(settings.push_codec, rho=settings.push_rho, bits=settings.push_bits)
                for _ in effect.table
            ]
        elif self.settings.streams != settings.streams:
            self._outbox = Outbox[Parcel](settings.streams, STREAM_WINDOW_BYTES)
        self.settings = settings
        self._wires.open_streams(settings.streams, effect.uplink_port, effect.downlink_port)

    # Down.

    def receive(self, frames: list[bytes]) -> ev.ChunkArrived:
        """Checks and decodes a data message. Raises RemoteProtocolError."""
        header, payload = decode_data(frames)
        if self.settings is None or header.fragment >= len(self.table):
            raise RemoteProtocolError(
                ErrorCode.BAD_FRAGMENT, "data message", got=f"fragment {header.fragment}"
            )
        part = self.table[header.fragment]
        if header.offset + header.count > part.elements:
            raise RemoteProtocolError(
                ErrorCode.BAD_RANGE,
                f"data message for fragment {header.fragment}",
                expected=f"within 0..{part.elements}",
                got=f"{header.offset}+{header.count}",
            )
        state = header.kind is msg.DataKind.STATE
        codecs = codecs_of(STATE_CODEC if state else self.settings.publish_codec)
        if header.codec not in codecs:
            raise RemoteProtocolError(
                ErrorCode.UNKNOWN_CODEC,
                f"data message for fragment {header.fragment}",
                expected=" or ".join(sorted(codecs)),
                got=header.codec,
            )
        chunk = decode_chunk(part, header.codec, header.offset, header.count, payload)
        size_bytes = sum(map(len, frames))
        self.counters.data_down_bytes += size_bytes
        if not state:
            self.counters.publication_bytes += size_bytes
            self.counters.publication_elements += header.count
        self._handle += 1
        self._chunks[self._handle] = (header.offset, chunk)
        return ev.ChunkArrived(header, self._handle)

    def drop(self, handles: Sequence[int]) -> None:
        for handle in handles:
            self._chunks.pop(handle, None)

    def apply(self, effect: ev.Apply) -> None:
        """Makes the next published copy on the pool and checks its digest."""
        part = self.table[effect.fragment]
        chunks = [self._chunks[handle] for handle in effect.handles]
        base = None
        if effect.kind is msg.DataKind.PUBLICATION:
            base = self.published[effect.fragment]
        self._submit(lambda: self._apply(effect, part, chunks, base))

    def _apply(
        self,
        effect: ev.Apply,
        part: Fragment,
        chunks: list[tuple[int, DecodedChunk]],
        base: F32 | None,
    ) -> None:
        values = values_of(part, chunks) if base is None else advance_copy(part, base, chunks)
        digest = digest_of(values)

        def applied() -> ev.Event:
            if digest != effect.digest:
                return ev.ApplyFailed(effect.fragment, effect.version, effect.digest)
            self._applied = values, digest
            return ev.Applied(effect.fragment, effect.version, effect.digest)

        self._post(applied)

    def install(self, fragment: int, version: int) -> None:
        """The result that was applied last becomes the published copy."""
        assert self._applied is not None
        self.published[fragment], digest = self._applied
        self._applied = None
        if self._records is not None:
            record = {
                "time_s": time.time(),
                "event": "installed",
                "learner": self._name,
                "fragment": fragment,
                "version": version,
                "digest": f"{digest:016x}",
            }
            self._records.write(json.dumps(record) + "\n")

    # Up.

    def start_push(self, effect: ev.Snapshot, local: F32 | DeviceSnapshot, base: F32) -> None:
        """A snapshot is taken: encode it behind the training thread's back."""
        part, rate = self.table[effect.fragment], self._rates[effect.fragment]
        work = PushWork(
            effect.push_id,
            part,
            effect.base_version,
            base,
            local,
            self._residuals.of(effect.fragment),
            rate.codec,
            rate.rho,
        )
        self.pushes[effect.push_id] = work
        self._submit(lambda: self._encode(work))

    def _encode(self, work: PushWork) -> None:
        assert self.settings is not None

        def ready(chunk: EncodedChunk) -> None:
            self._post(lambda: self._queue_push(work, chunk))

        try:
            encode_push(work, self.settings, self._layout, ready)
        except NarrowsError as error:
            failed = ev.EncodeFailed(work.push_id, str(error)[:500])
            self._post(lambda: failed)

    def _queue_push(self, work: PushWork, chunk: EncodedChunk) -> None:
        if not work.settled:
            work.chunks.append(chunk)
            self.counters.pushes += chunk.offset == 0
            self._put(msg.DataKind.PUSH, work, chunk)
            if chunk.offset + chunk.count == work.fragment.elements:
                rate = self._rates[work.fragment.index]
                if rate.target_bits is not None:
                    rate.observe(work.bits_per_param, work.error_ratio())

    def _put(self, kind: msg.DataKind, work: PushWork, chunk: EncodedChunk) -> None:
        parcel = Parcel(
            kind,
            work.fragment.index,
            work.base_version,
            work.push_id,
            work.codec,
            chunk,
        )
        self._outbox.put(parcel, len(chunk.payload))

    def resend(self, push_id: int, ranges: Ranges) -> None:
        """Queues the chunks that touch these ranges again, unless they still wait to leave."""
        work = self.pushes.get(push_id)
        if work is None or work.settled:
            return
        self._outbox.discard(lambda parcel: parcel.push_id == push_id)
        for chunk in work.chunks:
            if touches(ranges, chunk.offset, chunk.count):
                self._put(msg.DataKind.PUSH, work, chunk)

    def settle(self, push_id: int, *, merged: bool) -> None:
        """Stops sending a push; its remainder stays only if it was merged."""
        work = self.pushes.pop(push_id, None)
        if work is not None:
            work.settled = True
            self._residuals.settle(work, merged=merged)
            self._outbox.discard(lambda parcel: parcel.push_id == push_id)

    def found(self, fragment: int, values: F32, ranges: Ranges) -> None:
        """Encodes the parameters of a fragment, or these ranges of them, as version 0."""
        kind = msg.DataKind.FOUND
        if ranges:
            self._outbox.discard(lambda p: p.kind is kind and p.fragment == fragment)
        self._submit(lambda: self._encode_founding(self.table[fragment], values, ranges))

    def _encode_founding(self, part: Fragment, values: F32, ranges: Ranges) -> None:
        assert self.settings is not None
        for chunk in encode_fragment(
            part,
            values,
            codec_name=STATE_CODEC,
            rho=1.0,
            chunk_elements=self.settings.chunk_elements,
            reconstructed=np.empty_like(values),
        ):
            if not ranges or touches(ranges, chunk.offset, chunk.count):
                self._post(partial(self._queue_founding, part.index, chunk))

    def _queue_founding(self, fragment: int, chunk: EncodedChunk) -> None:
        parcel = Parcel(msg.DataKind.FOUND, fragment, 0, 0, STATE_CODEC, chunk)
        self._outbox.put(parcel, len(chunk.payload), Lane.STATE)

    def acknowledge(self, positions: tuple[int, ...], now: float) -> None:
        self._outbox.acknowledge(positions, now)

    def pump(self, now: float) -> None:
        """Sends what the credit allows."""
        self._outbox.renew_stalled(now)
        while self._wires.uplink_open:
            departure = self._outbox.take(now)
            if departure is None:
                return
            parcel = departure.item
            header = msg.Header(
                protocol=PROTOCOL,
                run_id=self._run_id,
                epoch=self._epoch,
                kind=parcel.kind,
                learner=self._name,
                incarnation=self._incarnation,
                fragment=parcel.fragment,
                version=parcel.version,
                push_id=parcel.push_id,
                offset=parcel.chunk.offset,
                count=parcel.chunk.count,
                codec=parcel.codec,
                payload_digest=parcel.chunk.payload_digest,
                result_digest=0,
                stream=departure.stream,
                position=departure.position,
            )
            sent_bytes = self._wires.send_data(
                departure.stream, encode_header(header), parcel.chunk.payload
            )
            self.counters.data_up_bytes += sent_bytes
            if parcel.kind is msg.DataKind.PUSH:
                self.counters.push_bytes += sent_bytes
                self.counters.push_elements += parcel.chunk.count

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        if self._records is not None:
            self._records.close()


def _raise(error: Exception) -> NoReturn:
    raise error
