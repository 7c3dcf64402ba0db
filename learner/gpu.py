"""The parameters of a torch model: a fragment that is on one GPU is coded and adopted there.

Codes made on a GPU have the bits of those from a CPU: the same operations in float32, each rounded
once, and an rms from the same samples. Only codes cross to the host.

Encoding and preparing run on a stream beside that of training, in the order of these rules:

- Memory belongs to the stream on which it was allocated: torch hands it out again as soon as
  nobody refers to it, although work queued there may still use it. So whatever another stream
  reads is made known to it (`record_stream`).
- What training's stream has made is read after an event recorded there; what the stream beside
  has made is complete before it is handed over, because a worker waits for it.
- A thread's current device need not be that of the parameters: a stream is asked for by device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from narrows.learner.island import HandOver, HostIsland, ParameterSource, encode_on_host, is_copy
from narrows.proto.codec import (
    CODECS,
    F32,
    RMS_SAMPLES_MAX,
    Spread,
    encode_codes,
    piece_scales,
    read_only,
    sample_places,
)
from narrows.proto.errors import ErrorCode, LocalProtocolError
from narrows.proto.layout import Fragment
from narrows.proto.messages import RunSettings
from narrows.proto.ports import Adoption, CodedPush, Copy, Prepared

DEVICE_BLOCK: Final = 1 << 24
"""Elements coded at once on a GPU: enough to fill it, few enough to bound the memory that coding
takes besides (17 bytes an element)."""


class TorchIsland(HostIsland):
    """The parameters of a torch model: the port Island.

    A fragment that is on one GPU stays there, any other takes the way through host memory. With
    `on_device` every fragment takes the GPU's way, on a CPU too, which shows that both agree.
    """

    def __init__(
        self,
        source: ParameterSource,
        hand_over: HandOver | None = None,
        *,
        on_device: bool = False,
    ) -> None:
        super().__init__(source, hand_over)
        self._on_device = on_device

    def copy(self, fragment: Fragment, values: F32) -> Copy:
        """`rounded` is a tensor on the fragment's device if it has one."""
        copy = super().copy(fragment, values)
        device = self._device(fragment)
        if device is None:
            return copy
        return replace(copy, rounded=to_device(copy.rounded, device))

    def snapshot(
        self, fragment: Fragment, published: Copy, base: int, settings: RunSettings
    ) -> Callable[[Spread], CodedPush]:
        """Copies the parameters where they are; a GPU's copy is not waited for."""
        place = _place_of(published.rounded)
        if place is None or place != self._device(fragment):
            host_copy = self._in_host_memory(fragment, published)
            return super().snapshot(fragment, host_copy, base, settings)
        views = self._views(fragment)
        local = torch.cat([view.reshape(-1).to(torch.float32) for view in views])
        ready = None
        if local.is_cuda:
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record(torch.cuda.current_stream(local.device))
        return partial(encode_on_device, fragment, published.rounded, local, ready, base, settings)

    def prepare(self, fragment: Fragment, rule: Adoption) -> Prepared:
        """`out` is a tensor on the fragment's device if it has one, and complete."""
        if is_copy(rule):
            return super().prepare(fragment, rule)
        places = {_place_of(copy.rounded) for copy in (rule.old, rule.new)}
        if rule.push is not None:
            coded: DeviceCodes | None = rule.push.on_device
            places.add(None if coded is None else coded.codes.device)
        if None in places or len(places) > 1:
            old = self._in_host_memory(fragment, rule.old)
            new = self._in_host_memory(fragment, rule.new)
            return super().prepare(fragment, rule._replace(old=old, new=new))
        movement = self._movement(fragment, rule)
        return Prepared(prepare_on_device(fragment, rule), rule.keep, rule.share, movement)

    def _movement(self, fragment: Fragment, rule: Adoption) -> Any:
        # From host memory: where parameters have fewer bits, the exact copies are there alone.
        movement = super()._movement(fragment, rule)
        if movement is None or not isinstance(rule.new.rounded, Tensor):
            return movement
        return to_device(movement, rule.new.rounded.device)

    def adopt(self, fragment: Fragment, prepared: Prepared) -> None:
        """Moves the parameters in place, where they are now."""
        if not isinstance(prepared.out, Tensor):
            super().adopt(fragment, prepared)
            return
        out = prepared.out
        if out.is_cuda:
            stream = torch.cuda.current_stream(out.device)
            out.record_stream(stream)
            if prepared.movement is not None:
                prepared.movement.record_stream(stream)
        for piece, view in zip(fragment.pieces, self._views(fragment), strict=True):
            own = out[piece.offset : piece.offset + piece.count].view(view.shape).to(view.device)
            if prepared.keep == 0:
                view.copy_(own)
                continue
            values = view.to(torch.float32)  # The view itself, if it is float32.
            # Rounded twice, as in host memory: one operation for both may round once.
            values.mul_(prepared.keep).add_(own)
            if values is not view:
                view.copy_(values)
        self._turn_momentum(fragment, prepared)

    def _in_host_memory(self, fragment: Fragment, copy: Copy) -> Copy:
        """A copy for a model that was on another device, or in host memory, when it was made."""
        if _place_of(copy.rounded) is None:
            return copy
        return super().copy(fragment, copy.values)

    def _device(self, fragment: Fragment) -> torch.device | None:
        """The device where this fragment is coded and adopted; None: in host memory."""
        devices = {view.device for view in self._views(fragment)}
        device: torch.device = devices.pop()
        on_gpu = not devices and device.type == "cuda"
        return device if on_gpu or self._on_device else None


def _place_of(rounded: F32 | Tensor) -> torch.device | None:
    """The device of what a copy's island computes with; None: it is in host memory."""
    return rounded.device if isinstance(rounded, Tensor) else None


class DeviceCodes(NamedTuple):
    """A push as coded, on its device."""

    scales: F32
    """(k,), by piece; in host memory."""
    codes: Tensor
    """int8 (n,); of a lossless push its values, float32, with scales of 1."""


def encode_on_device(
    fragment: Fragment,
    published: Tensor,
    local: Tensor,
    ready: torch.cuda.Event | None,
    base: int,
    settings: RunSettings,
    spread: Spread,
) -> CodedPush:
    """Codes `published - local`, float32 (n,) on their device, with the bits of `encode_on_host`;
    only codes cross to the host. `ready` happens when `local` is complete."""
    codec = settings.push_codec
    size = settings.chunk_elements
    stream = beside_training(local.device)
    with torch.cuda.stream(stream):
        if stream is not None and ready is not None:
            stream.wait_event(ready)
            local.record_stream(stream)
            published.record_stream(stream)
        if not CODECS[codec].coded:
            whole = DeviceCodes(np.ones(len(fragment.pieces), np.float32), published - local)
            push = encode_on_host(
                fragment, published.cpu().numpy(), local.cpu().numpy(), base, settings, spread
            )
            return replace(push, on_device=whole)
        scales = _scales(fragment, published, local, settings.push_rho)
        codes = _codes(fragment, published, local, scales, CODECS[codec].limit)
        # Pinned memory, kept by torch for the next time: several times as fast as pageable.
        in_host_memory = torch.empty(codes.shape, dtype=codes.dtype, pin_memory=codes.is_cuda)
        in_host_memory.copy_(codes, non_blocking=True)
        if stream is not None:
            stream.synchronize()
    chunks = tuple(encode_codes(fragment, codec, scales, in_host_memory.numpy(), size, spread))
    return CodedPush(base, codec, size, chunks, DeviceCodes(scales, codes))


def _scales(fragment: Fragment, published: Tensor, local: Tensor, rho: float) -> F32:
    places, bounds = sample_places(fragment.bounds, RMS_SAMPLES_MAX)
    where = torch.from_numpy(places).to(local.device)
    sampled = (published[where] - local[where]).cpu().numpy()
    scales = piece_scales(sampled, bounds, rho).copy()
    for piece in np.flatnonzero(scales == 0):
        # A few large elements among zeros: the samples miss them, and they must travel.
        span = slice(int(fragment.bounds[piece]), int(fragment.bounds[piece + 1]))
        whole = (published[span] - local[span]).cpu().numpy()
        scales[piece] = piece_scales(whole, np.array([0, whole.size]), rho)[0]
    return read_only(scales)


def _codes(fragment: Fragment, published: Tensor, local: Tensor, scales: F32, limit: int) -> Tensor:
    """int8 (n,) codes, block by block."""
    codes = torch.empty(fragment.elements, dtype=torch.int8, device=local.device)
    for index in range(fragment.chunk_count(DEVICE_BLOCK)):
        offset, count = fragment.chunk(index, DEVICE_BLOCK)
        block = slice(offset, offset + count)
        pieces = fragment.pieces_of(offset, count)
        own = torch.from_numpy(scales[pieces.start : pieces.stop].copy()).to(local.device)
        lengths = torch.from_numpy(np.diff(fragment.spans(offset, count))).to(local.device)
        element_scales = own.repeat_interleave(lengths, output_size=count)
        value = published[block] - local[block]
        if not torch.isfinite(value).all():
            raise LocalProtocolError(
                ErrorCode.NOT_FINITE, "outer gradient", expected="finite", got="nan or inf"
            )
        inverse = torch.where(
            element_scales > 0, 1 / element_scales, torch.zeros_like(element_scales)
        )
        codes[block] = (value * inverse).clamp_(-limit, limit).round_()
    return codes


def prepare_on_device(fragment: Fragment, rule: Adoption) -> Tensor:
    """The first part of the rule as torch expressions, piece by piece: float32 (n,), complete when
    this returns."""
    old: Tensor = rule.old.rounded
    new: Tensor = rule.new.rounded
    coded: DeviceCodes | None = rule.push.on_device if rule.push else None
    stream = beside_training(new.device)
    # Whatever is read here is complete, and was allocated on this stream.
    with torch.cuda.stream(stream):
        out = new.clone()
        for index, piece in enumerate(fragment.pieces):
            span = slice(piece.offset, piece.offset + piece.count)
            value = out[span]
            rest = old[span]
            mine = None
            if coded is not None:
                mine = coded.codes[span].to(torch.float32) * float(coded.scales[index])
                rest = rest - mine
            if rule.keep > 0:
                value -= rest * rule.keep
            if mine is not None and not rule.merged:
                value -= mine
        if stream is not None:
            stream.synchronize()
    return out


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
