"""Encodes, decodes and keeps the data of a learner: copies, chunks, pushes. No decisions.

Called on the background thread, which alone changes `published`; slow work runs on a pool and
reports through `post`, which hands an event to the background thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from narrows.learner.module import DeviceSnapshot
from narrows.learner.session import events as ev
from narrows.learner.transport.options import ClientOptions
from narrows.learner.transport.push import PushWork, Residuals, encode_push
from narrows.learner.transport.sockets import LearnerSockets
from narrows.proto import messages as msg
from narrows.proto.codec import (
    F32,
    STATE_CODEC,
    BitControl,
    DecodedChunk,
    EncodedChunk,
    advance_copy,
    codecs_of,
    decode_chunk,
    digest_of,
    encode_fragment,
    make_bit_control,
    values_of,
)
from narrows.proto.errors import ErrorCode, NarrowsError, RemoteProtocolError
from narrows.proto.flow import Datagram, Parcel, Sender, chunk_elements
from narrows.proto.fragments import Fragment
from narrows.proto.frames import UPLINK_TOPIC, decode_data
from narrows.proto.shell import EventFile, raising
from narrows.proto.terms import Ranges

OUT_OF_MEMORY = (MemoryError, torch.OutOfMemoryError)
"""Errors that pass by themselves: the same work may succeed later, so it is tried again."""

_log = logging.getLogger("narrows.learner")


def reason_of(error: BaseException) -> str:
    """The text of an error for the broker and the log. Its kind comes first, before a colon."""
    text = str(error) if isinstance(error, NarrowsError) else f"{type(error).__name__}: {error}"
    return text.removesuffix(": ")[:500]


@dataclass
class DataCounters:
    """Bytes are those of ZeroMQ frames: topic, header and payload."""

    data_up_bytes: int = 0
    data_down_bytes: int = 0
    push_bytes: int = 0
    push_elements: int = 0
    publication_bytes: int = 0
    publication_elements: int = 0
    pushes: int = 0

    def count_up(self, datagram: Datagram) -> None:
        """A data message has left."""
        self.data_up_bytes += datagram.frame_bytes
        if datagram.parcel.kind is msg.DataKind.PUSH:
            self.push_bytes += datagram.frame_bytes
            self.push_elements += datagram.parcel.chunk.count


class DataPath:
    """The data of one learner by fragment: received, held, and on its way out."""

    def __init__(
        self,
        wires: LearnerSockets,
        options: ClientOptions,
        *,
        post: Callable[[Callable[[], ev.Event | None]], None],
    ) -> None:
        self._wires = wires
        self._name, self._layout = options.name, options.layout
        self._post = post
        self._records = EventFile(options.events, _log) if options.events else None
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="narrows-codec")
        self.sender = Sender(options.name, options.incarnation, topic=lambda _: UPLINK_TOPIC)
        self.counters = DataCounters()
        self.table: tuple[Fragment, ...] = ()
        self.settings: msg.RunSettings | None = None
        #: The published copy per fragment. Arrays are replaced, never changed in place.
        self.published: dict[int, F32] = {}
        self._residuals = Residuals(False)
        self._rates: list[BitControl] = []
        #: Pushes whose outcome is open, by id.
        self.pushes: dict[int, PushWork] = {}
        self._chunks: dict[int, tuple[int, DecodedChunk]] = {}
        #: The newest result of an apply; replaced by the next one if the session refuses it.
        self._applied: tuple[F32, int] | None = None
        self._handle = 0
        #: Kinds of unexpected errors that were logged.
        self._seen: set[type[Exception]] = set()

    def _submit(self, work: Callable[[], None], failed: Callable[[str], ev.Event | None]) -> None:
        """Runs `work` on the pool; an error there is handed on as the event `failed(reason)`.

        Until the learner holds every fragment it has nothing to go on with: then an error ends the
        background thread, and is raised where the learner joins.
        """

        def guarded() -> None:
            try:
                work()
            except Exception as error:
                if len(self.published) < len(self.table):
                    self._post(raising(error))
                    return
                self._trace(error)
                event = failed(reason_of(error))
                self._post(lambda: event)

        self._pool.submit(guarded)

    def _trace(self, error: Exception) -> None:
        """Logs the traceback of an error, unless it is a usual one or was seen before."""
        usual = isinstance(error, (NarrowsError, *OUT_OF_MEMORY)) or type(error) in self._seen
        self._seen.add(type(error))
        _log.log(logging.DEBUG if usual else logging.ERROR, "in a worker:", exc_info=error)

    def open_streams(self, effect: ev.OpenStreams) -> None:
        settings, before = effect.settings, self.settings
        self.table = effect.table
        # A broker may come back with other settings.
        if before is None or before.error_feedback != settings.error_feedback:
            self._residuals = Residuals(settings.error_feedback)
        coding = settings.push_codec, settings.push_rho
        if before is None or (before.push_codec, before.push_rho) != coding:
            self._rates = [
                make_bit_control(
                    settings.push_codec, rho=settings.push_rho, bits=settings.push_bits
                )
                for _ in effect.table
            ]
        for rate in self._rates:
            rate.aim(settings.push_bits)
        self.settings = settings
        self.sender.open_streams(settings.streams)
        self._wires.open_streams(settings.streams, effect.uplink_port, effect.downlink_port)

    # Down.

    def receive(self, frames: list[bytes]) -> ev.ChunkDecoded:
        """Checks and decodes a data message. Raises RemoteProtocolError."""
        header, payload = decode_data(frames)
        if self.settings is None or header.fragment >= len(self.table):
            raise RemoteProtocolError(
                ErrorCode.BAD_FRAGMENT, "data message", got=f"fragment {header.fragment}"
            )
        fragment = self.table[header.fragment]
        if header.offset + header.count > fragment.elements:
            raise RemoteProtocolError(
                ErrorCode.BAD_RANGE,
                f"data message for fragment {header.fragment}",
                expected=f"within 0..{fragment.elements}",
                got=f"{header.offset}+{header.count}",
            )
        is_state = header.kind is msg.DataKind.STATE
        codecs = codecs_of(STATE_CODEC if is_state else self.settings.publish_codec)
        if header.codec not in codecs:
            raise RemoteProtocolError(
                ErrorCode.UNKNOWN_CODEC,
                f"data message for fragment {header.fragment}",
                expected=" or ".join(sorted(codecs)),
                got=header.codec,
            )
        chunk = decode_chunk(fragment, header.codec, header.offset, header.count, payload)
        size_bytes = sum(map(len, frames))
        self.counters.data_down_bytes += size_bytes
        self.sender.received(size_bytes, time.monotonic())
        if not is_state:
            self.counters.publication_bytes += size_bytes
            self.counters.publication_elements += header.count
        self._handle += 1
        self._chunks[self._handle] = (header.offset, chunk)
        return ev.ChunkDecoded(header, self._handle)

    def drop(self, handles: Sequence[int]) -> None:
        """Lets go of chunks; those that are gone already are passed over."""
        for handle in handles:
            self._chunks.pop(handle, None)

    def apply(self, effect: ev.Apply) -> None:
        """Makes the next published copy on the pool and compares its digest with the broker's."""
        if not self._chunks.keys() >= set(effect.handles):
            # The session has dropped them since, with its wish for this version: effects of the
            # training thread's events come here behind those of the background's own.
            return
        fragment = self.table[effect.fragment]
        chunks = [self._chunks[handle] for handle in effect.handles]
        base = None
        if effect.kind is msg.DataKind.PUBLICATION:
            # Read here, on the only thread that replaces it, and not on the pool.
            base = self.published[effect.fragment]
        self._submit(
            lambda: self._apply(effect, fragment, chunks, base),
            lambda reason: ev.ApplyFailed(effect.fragment, effect.version, effect.digest, reason),
        )

    def _apply(
        self,
        effect: ev.Apply,
        fragment: Fragment,
        chunks: list[tuple[int, DecodedChunk]],
        base: F32 | None,
    ) -> None:
        if base is None:
            values = values_of(fragment, chunks)
        else:
            values = advance_copy(fragment, base, chunks)
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
            self._records.write(
                {
                    "event": "installed",
                    "learner": self._name,
                    "fragment": fragment,
                    "version": version,
                    "digest": f"{digest:016x}",
                }
            )

    # Up.

    def start_push(self, effect: ev.Snapshot, local: F32 | DeviceSnapshot, base: F32) -> None:
        """A snapshot is taken: encode it behind the training thread's back."""
        fragment, rate = self.table[effect.fragment], self._rates[effect.fragment]
        work = PushWork(
            effect.push_id,
            fragment,
            effect.base_version,
            base,
            local,
            self._residuals.of(effect.fragment),
            rate.codec,
            rate.rho,
        )
        self.pushes[effect.push_id] = work
        self._submit(lambda: self._encode(work), partial(ev.EncodeFailed, work.push_id))

    def _encode(self, work: PushWork) -> None:
        assert self.settings is not None

        def ready(chunk: EncodedChunk) -> None:
            self._post(lambda: self._queue_push(work, chunk))

        encode_push(work, self.settings, self._layout, ready)

    def _queue_push(self, work: PushWork, chunk: EncodedChunk) -> None:
        if not work.settled:
            work.chunks.append(chunk)
            self.counters.pushes += chunk.offset == 0
            self.sender.put(work.parcel(chunk))
            if chunk.offset + chunk.count == work.fragment.elements:
                rate = self._rates[work.fragment.index]
                if rate.target_bits is not None:
                    # To look may take waiting for a device: not on this thread.
                    self._submit(lambda: self._observe(work, rate), lambda _: None)

    def _observe(self, work: PushWork, rate: BitControl) -> None:
        bits, ratio = work.bits_per_param, work.error_ratio()
        self._post(lambda: rate.observe(bits, ratio))

    def resend(self, push_id: int, ranges: Ranges) -> None:
        """Queues the chunks that touch these ranges again, unless they are on their way."""
        work = self.pushes.get(push_id)
        if ranges and work is not None and not work.settled:
            parcels = [work.parcel(chunk) for chunk in work.chunks]
            self.sender.put_again(parcels, ranges, time.monotonic())

    def settle(self, push_id: int, *, merged: bool) -> None:
        """Stops sending a push; its residual stays only if it was merged."""
        work = self.pushes.pop(push_id, None)
        if work is not None:
            work.settled = True
            self._residuals.settle(work, merged=merged)
            self.sender.discard(lambda parcel: parcel.push_id == push_id)

    def start_founding(self, fragment: int, values: F32, ranges: Ranges) -> None:
        """Encodes the parameters of a fragment, or these ranges of them, as version 0."""
        copy = ev.SendFounding(fragment, ranges)
        self._submit(
            lambda: self._encode_founding(self.table[fragment], values, ranges),
            partial(ev.CopyFailed, copy),
        )

    def _encode_founding(self, fragment: Fragment, values: F32, ranges: Ranges) -> None:
        assert self.settings is not None
        again: list[Parcel] = []
        for chunk in encode_fragment(
            fragment,
            values,
            codec_name=STATE_CODEC,
            rho=1.0,
            chunk_elements=chunk_elements(self.settings, STATE_CODEC),
            reconstructed=np.empty_like(values),
        ):
            parcel = Parcel(msg.DataKind.FOUND, fragment.index, 0, 0, STATE_CODEC, chunk)
            if ranges:
                again.append(parcel)
            else:
                self._post(partial(self.sender.put, parcel))
        self._post(partial(self._put_again, again, ranges))

    def _put_again(self, parcels: list[Parcel], ranges: Ranges) -> None:
        self.sender.put_again(parcels, ranges, time.monotonic())

    def pump(self, now: float) -> None:
        """Sends what credit and rate allow."""
        self.sender.is_heard = self._wires.uplink_open
        for stream in self._wires.take_reconnected():
            self.sender.reconnect(stream, now)
        for datagram in self.sender.due(now):
            self._wires.send_data(datagram.stream, datagram.frames)
            self.counters.count_up(datagram)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        if self._records is not None:
            self._records.close()
