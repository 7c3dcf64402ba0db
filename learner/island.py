"""The parameters of one process as the host uses them: it never sees a tensor.

An outer gradient begins here: a snapshot becomes a coded push. It ends here, too, with the rule of
an adoption. With `keep` from 0 to 1 and `push` as it was coded (0 without one):

    params = new + keep * (params - old + push) - (0 if merged else push)

`params - old + push` is what was learned since the snapshot, and the rounding error of the code.
So that error stays in the parameters and is in the next push again: there is no residual buffer. A
push that waits stays whole; one that `new` holds has done its work. `old` and `new` are rounded to
the parameters' precision, so that the rounding of bfloat16 never travels as progress. Streaming
DiLoCo (arXiv 2501.18512) mixes so, too.

The rule runs as one numba kernel in host memory and as torch expressions on a GPU. Codes made on a
GPU have the bits of those from a CPU: the same operations in float32, each rounded once, and an rms
from the same samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from narrows.proto.codec import (
    CODECS,
    F32,
    RMS_SAMPLES_MAX,
    PushChunk,
    empty_f32,
    encode_codes,
    encode_push,
    kernel,
    piece_scales,
    read_only,
    round_to_dtype,
    sample_places,
)
from narrows.proto.codec import warm_up as warm_up_codecs
from narrows.proto.errors import ErrorCode, LocalProtocolError
from narrows.proto.layout import BLOCK, Fragment, Piece
from narrows.proto.messages import CodecName, DtypeName, RunSettings

SLICE: Final = 4 * BLOCK
"""Elements adopted at once without a push; with one it is a chunk of it, decoded within cache."""

DEVICE_BLOCK: Final = 1 << 24
"""Elements coded at once on a GPU: enough to fill it, few enough to bound the memory that coding
takes besides (17 bytes an element)."""

NOTHING: Final = read_only(np.empty(0, np.float32))


@dataclass(frozen=True, eq=False)
class Copy:
    """A published copy of a fragment. Neither array is written to after it is made."""

    values: F32
    """(n,) as the broker has it, bit for bit, in host memory."""
    rounded: F32 | Tensor
    """(n,) as the parameters can hold it, where they are; `values` itself if nothing differs."""


class DeviceCodes(NamedTuple):
    """A push as coded, on its device."""

    scales: F32
    """(k,), by piece; in host memory."""
    codes: Tensor
    """int8 (n,); of a lossless push its values, float32, with scales of 1."""


@dataclass(frozen=True, eq=False)
class CodedPush:
    """A push that waits: its chunks for repair, and the values that its receiver holds."""

    base: int
    """Version that the parameters stood on."""
    codec: CodecName
    chunk_elements: int
    chunks: tuple[PushChunk, ...]
    on_device: DeviceCodes | None = None


class Adoption(NamedTuple):
    """The terms of the rule besides the parameters."""

    old: Copy
    new: Copy
    push: CodedPush | None
    keep: float
    merged: bool


class ParameterSource(Protocol):
    """The tensors of a model, by piece."""

    def read(self, fragment: Fragment, out: F32) -> None:
        """Copies a fragment to host memory; `out` is float32 (n,)."""

    def write(self, fragment: Fragment, values: F32) -> None:
        """Overwrites a fragment with float32 (n,), rounded to the parameters' precision."""

    def view(self, piece: Piece) -> Any:
        """The elements of a piece, sharing the parameter's memory: a float32 array (count,), or a
        torch tensor of any shape, precision and device with so many elements."""

    def dtype(self, piece: Piece) -> DtypeName:
        """The parameter's own precision."""


class Island:
    """The parameters as the host uses them.

    `copy` is called on a worker, everything else on the training thread between two steps. A
    fragment that is on one GPU takes the GPU's path; with `on_device` every torch tensor does.
    """

    def __init__(self, source: ParameterSource, *, on_device: bool = False) -> None:
        self._source, self._on_device = source, on_device

    def copy(self, fragment: Fragment, values: F32) -> Copy:
        """Prepares a published copy (n,) for `snapshot` and `adopt`, so that they only compute."""
        rounded = values
        if any(self._source.dtype(piece) != "float32" for piece in fragment.pieces):
            rounded = empty_f32(fragment.elements)
            for piece in fragment.pieces:
                span = slice(piece.offset, piece.offset + piece.count)
                round_to_dtype(values[span], self._source.dtype(piece), rounded[span])
        device = self._device(fragment)
        return Copy(values, rounded if device is None else to_device(rounded, device))

    def read(self, fragment: Fragment) -> F32:
        """The parameters (n,) of a fragment, for version 0."""
        values = empty_f32(fragment.elements)
        self._source.read(fragment, values)
        return values

    def snapshot(self, fragment: Fragment, published: Copy) -> HostSnapshot | DeviceSnapshot:
        """Copies the parameters of a fragment now; the snapshot is encoded later, on a worker."""
        if isinstance(published.rounded, np.ndarray):
            return HostSnapshot(published.rounded, self.read(fragment))
        return snapshot_on_device(self._views(fragment), published.rounded)

    def adopt(self, fragment: Fragment, rule: Adoption) -> None:
        """Moves the parameters in place by the rule of this module."""
        if not isinstance(rule.new.rounded, np.ndarray):
            adopt_on_device(fragment, self._views(fragment), rule)
        elif (arrays := self._arrays(fragment)) is not None:
            adopt_on_host(fragment, arrays, rule)
        else:
            values = self.read(fragment)
            parts = np.split(values, fragment.bounds[1:-1])
            adopt_on_host(fragment, parts, rule)
            self._source.write(fragment, values)

    def overwrite(self, fragment: Fragment, new: Copy) -> None:
        """Makes the parameters equal to a copy, whatever they were."""
        self._source.write(fragment, new.values)

    def _views(self, fragment: Fragment) -> list[Any]:
        return [self._source.view(piece) for piece in fragment.pieces]

    def _arrays(self, fragment: Fragment) -> list[F32] | None:
        """The pieces as float32 arrays that share the parameters' memory; None: they cannot."""
        arrays: list[F32] = []
        for piece, view in zip(fragment.pieces, self._views(fragment), strict=True):
            if not isinstance(view, np.ndarray):
                place = view.device.type, self._source.dtype(piece), view.shape
                if place != ("cpu", "float32", (piece.count,)):
                    return None
                view = view.numpy()
            arrays.append(view)
        return arrays

    def _device(self, fragment: Fragment) -> torch.device | None:
        """The device where this fragment is coded and adopted; None: in host memory."""
        views = self._views(fragment)
        if any(isinstance(view, np.ndarray) for view in views):
            return None
        devices = {view.device for view in views}
        device: torch.device = views[0].device
        on_gpu = len(devices) == 1 and device.type == "cuda"
        return device if on_gpu or self._on_device else None


# In host memory.


@dataclass(frozen=True, eq=False)
class HostSnapshot:
    """Published copy and parameters, float32 (n,)."""

    published: F32
    local: F32

    def encode(self, fragment: Fragment, base: int, settings: RunSettings) -> CodedPush:
        """Codes `published - parameters`, on a worker. Raises LocalProtocolError NOT_FINITE."""
        codec, size = settings.push_codec, settings.chunk_elements
        chunks = encode_push(
            fragment, self.published, self.local,
            codec=codec, rho=settings.push_rho, chunk_elements=size,
        )  # fmt: skip
        return CodedPush(base, codec, size, tuple(chunks))


@kernel
def adopt_kernel(
    params: F32, old: F32, new: F32, push: F32, keep: np.float32, merged: bool
) -> None:
    """The rule, in place. All are float32 (n,); `push` may be empty, which means 0."""
    for i in range(params.size):
        mine = push[i] if push.size else np.float32(0.0)
        value = new[i]
        # Without this test, 0 times a nan of the parameters would spoil the new copy.
        if keep > np.float32(0.0):
            value = value + keep * ((params[i] - old[i]) + mine)
        params[i] = value if merged else value - mine


def adopt_on_host(fragment: Fragment, views: Sequence[F32], rule: Adoption) -> None:
    """The rule for a fragment whose pieces are `views`, float32 (count,), in host memory."""
    old, new = rule.old.rounded, rule.new.rounded
    assert isinstance(old, np.ndarray) and isinstance(new, np.ndarray), "copies on a device"
    old, new, keep = read_only(old), read_only(new), np.float32(rule.keep)
    size = rule.push.chunk_elements if rule.push else SLICE
    scratch = empty_f32(min(size, fragment.elements))
    for chunk in range(fragment.chunk_count(size)):
        offset, count = fragment.chunk(chunk, size)
        push = NOTHING
        if rule.push is not None:
            rule.push.chunks[chunk].decoded.values(scratch[:count])
            push = read_only(scratch[:count])
        bounds = fragment.spans(offset, count) + offset
        for index, first, end in zip(
            fragment.pieces_of(offset, count), bounds[:-1], bounds[1:], strict=True
        ):
            start = fragment.pieces[index].offset
            params = views[index][first - start : end - start]
            mine = push[first - offset : end - offset]
            adopt_kernel(params, old[first:end], new[first:end], mine, keep, rule.merged)


def warm_up() -> None:
    """Loads every kernel that a learner runs: one that is loaded later would hold training up."""
    warm_up_codecs()
    values = np.ones(2, np.float32)
    adopt_kernel(values, read_only(values), read_only(values), NOTHING, np.float32(0.5), False)


# On a GPU. Encoding runs on a stream beside that of training, in the order of these rules:
#
# - Memory belongs to the stream on which it was allocated: torch hands it out again as soon as
#   nobody refers to it, although work queued there may still use it. So whatever another stream
#   reads is made known to it (`record_stream`).
# - What training's stream has made is read after an event recorded there; what the stream beside
#   has made is complete before it is handed over, because a worker waits for it.
# - A thread's current device need not be that of the parameters: a stream is asked for by device.


@dataclass(frozen=True, eq=False)
class DeviceSnapshot:
    """Published copy and parameters, float32 (n,), on their device."""

    published: Tensor
    local: Tensor
    ready: torch.cuda.Event | None
    """Happens when `local` is complete; the training thread does not wait for it."""

    def encode(self, fragment: Fragment, base: int, settings: RunSettings) -> CodedPush:
        """As in host memory, and with the same bits; only codes cross to the host."""
        codec, size = settings.push_codec, settings.chunk_elements
        stream = beside_training(self.local.device)
        with torch.cuda.stream(stream):
            if stream is not None and self.ready is not None:
                stream.wait_event(self.ready)
                self.local.record_stream(stream)
                self.published.record_stream(stream)
            if not CODECS[codec].coded:
                whole = DeviceCodes(np.ones(len(fragment.pieces), np.float32), self._values())
                host = HostSnapshot(self.published.cpu().numpy(), self.local.cpu().numpy())
                return replace(host.encode(fragment, base, settings), on_device=whole)
            scales = self._scales(fragment, settings.push_rho)
            codes = self._codes(fragment, scales, CODECS[codec].limit)
            # Pinned memory, kept by torch for the next time: several times as fast as pageable.
            in_host_memory = torch.empty(codes.shape, dtype=codes.dtype, pin_memory=codes.is_cuda)
            in_host_memory.copy_(codes, non_blocking=True)
            if stream is not None:
                stream.synchronize()
        chunks = tuple(encode_codes(fragment, codec, scales, in_host_memory.numpy(), size))
        return CodedPush(base, codec, size, chunks, DeviceCodes(scales, codes))

    def _values(self, places: slice | Tensor = slice(None)) -> Tensor:
        return self.published[places] - self.local[places]

    def _scales(self, fragment: Fragment, rho: float) -> F32:
        places, bounds = sample_places(fragment.bounds, RMS_SAMPLES_MAX)
        where = torch.from_numpy(places).to(self.local.device)
        scales = piece_scales(self._values(where).cpu().numpy(), bounds, rho).copy()
        for piece in np.flatnonzero(scales == 0):
            # A few large elements among zeros: the samples miss them, and they must travel.
            span = slice(int(fragment.bounds[piece]), int(fragment.bounds[piece + 1]))
            whole = self._values(span).cpu().numpy()
            scales[piece] = piece_scales(whole, np.array([0, whole.size]), rho)[0]
        return read_only(scales)

    def _codes(self, fragment: Fragment, scales: F32, limit: int) -> Tensor:
        """int8 (n,) codes, block by block."""
        device = self.local.device
        codes = torch.empty(fragment.elements, dtype=torch.int8, device=device)
        for index in range(fragment.chunk_count(DEVICE_BLOCK)):
            offset, count = fragment.chunk(index, DEVICE_BLOCK)
            pieces, bounds = fragment.pieces_of(offset, count), fragment.spans(offset, count)
            own = torch.from_numpy(scales[pieces.start : pieces.stop].copy()).to(device)
            lengths = torch.from_numpy(np.diff(bounds)).to(device)
            steps = own.repeat_interleave(lengths, output_size=count)
            value = self._values(slice(offset, offset + count))
            if not torch.isfinite(value).all():
                raise LocalProtocolError(
                    ErrorCode.NOT_FINITE, "outer gradient", expected="finite", got="nan or inf"
                )
            inverse = torch.where(steps > 0, 1 / steps, torch.zeros_like(steps))
            codes[offset : offset + count] = (value * inverse).clamp_(-limit, limit).round_()
        return codes


def snapshot_on_device(views: Sequence[Tensor], published: Tensor) -> DeviceSnapshot:
    """Copies the pieces of a fragment on their device, and does not wait for the copy."""
    local = torch.cat([view.reshape(-1).to(torch.float32) for view in views])
    ready = None
    if local.is_cuda:
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record(torch.cuda.current_stream(local.device))
    return DeviceSnapshot(published, local, ready)


def adopt_on_device(fragment: Fragment, views: Sequence[Tensor], rule: Adoption) -> None:
    """The rule as torch expressions, piece by piece, on the training thread's stream."""
    old, new = rule.old.rounded, rule.new.rounded
    assert not isinstance(old, np.ndarray) and not isinstance(new, np.ndarray), "copies on the host"
    codes = rule.push.on_device if rule.push else None
    if new.is_cuda:
        for tensor in (old, new) if codes is None else (old, new, codes.codes):
            tensor.record_stream(torch.cuda.current_stream(new.device))
    for index, (piece, view) in enumerate(zip(fragment.pieces, views, strict=True)):
        span = slice(piece.offset, piece.offset + piece.count)
        mine = None
        if codes is not None:
            mine = codes.codes[span].to(torch.float32) * float(codes.scales[index])
        value = new[span].clone()
        if rule.keep > 0:
            kept = view.reshape(-1).to(torch.float32) - old[span]
            value += (kept if mine is None else kept + mine) * rule.keep
        if mine is not None and not rule.merged:
            value -= mine
        view.copy_(value.view(view.shape))


def to_device(values: F32, device: torch.device) -> Tensor:
    """A float32 tensor (n,) on the device, complete when this returns. Runs on a worker."""
    stream = beside_training(device)
    with torch.cuda.stream(stream):
        # torch warns when it is lent read-only memory, even if it only reads there.
        tensor = torch.from_numpy(values if values.flags.writeable else values.copy()).to(device)
        if stream is not None:
            stream.synchronize()
    return tensor


def beside_training(device: torch.device) -> torch.cuda.Stream | None:
    """A stream of our own, to queue and allocate on; to enter it makes its device the current one,
    too. None on a CPU: to enter that does nothing."""
    if device.type != "cuda":
        return None
    if device not in _streams:
        # Several workers may come here at once; only one of their streams is kept.
        _streams.setdefault(device, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
    return _streams[device]


_streams: dict[torch.device, torch.cuda.Stream] = {}
