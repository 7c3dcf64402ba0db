"""Encodes pushes where the parameters are: on a GPU, so that only codes cross to the host.

The bits are those of the kernels on the CPU: the same operations in float32, each rounded once,
and a rms from the same samples, summed on the host.

On a GPU this happens on a stream beside that of training, in the order of these rules:

- Memory belongs to the stream on which it was allocated: torch hands it out again as soon as nobody
  refers to it, although work that was queued there before may still use it. So what encoding fills
  is allocated on the stream beside training, too; on training's it could be memory to which an
  unfinished kernel of training still writes.
- What training's stream has made (base, parameters) is read after an event recorded there, and made
  known to the stream beside (`record_stream`), so that it is not handed out while it is read.
- Streams belong to devices. A thread's current device need not be that of the parameters, and on a
  worker's thread it is cuda:0: a stream is always asked for by the device of a tensor.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from narrows.learner.module.parameters import ModuleParameters
from narrows.proto.codec import (
    F32,
    RMS_SAMPLES_MAX,
    EncodedChunk,
    QuantisedCodec,
    codec,
    not_finite,
    piece_scales,
    sample_places,
)
from narrows.proto.fragments import Fragment
from narrows.proto.frames import digest

BLOCK_ELEMENTS: Final = 1 << 24
"""Elements coded at once: enough to fill a GPU, few enough to bound the memory that coding takes
besides (20 bytes per element)."""


class DeviceParameters(ModuleParameters):
    """The parameters of a module that are all on one device, and there a copy of what was adopted.

    The copy and the residual of pushes take 8 bytes per parameter of the device's memory (4 if
    the run has no error feedback), instead of as much of the host's.
    """

    def __init__(self, model: nn.Module, merge_rules: Mapping[str, str] | None = None) -> None:
        super().__init__(model, merge_rules)
        self._adopted: dict[int, Tensor] = {}

    def adopt(self, fragment: Fragment, values: F32) -> None:
        """As ModuleParameters does; the parameters' new values are the next push's base."""
        super().adopt(fragment, values)
        # Read back: bfloat16 parameters hold other values than those that were adopted.
        self._adopted[fragment.index] = self._gathered(fragment)

    def capture(self, fragment: Fragment) -> DeviceSnapshot:
        """Copies an adopted fragment on its device, and does not wait for the copy."""
        local = self._gathered(fragment)
        ready = None
        if local.is_cuda:
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record(torch.cuda.current_stream(local.device))
        return DeviceSnapshot(self._adopted[fragment.index], local, ready)

    def _gathered(self, fragment: Fragment) -> Tensor:
        """The fragment's parameters in one float32 tensor of shape (elements,)."""
        views = [self.view(piece).reshape(-1) for piece in fragment.pieces]
        gathered = torch.empty(fragment.elements, dtype=torch.float32, device=views[0].device)
        torch.cat([view.to(torch.float32) for view in views], out=gathered)
        return gathered


def parameters_of(
    model: nn.Module, merge_rules: Mapping[str, str] | None, device_encoding: bool | None
) -> ModuleParameters:
    """The parameters of a module, encoded on their device if that is wanted.

    None: if they are all on one GPU.
    """
    parameters = ModuleParameters(model, merge_rules)
    if device_encoding is None:
        devices = parameters.devices
        device_encoding = len(devices) == 1 and next(iter(devices)).type == "cuda"
    return DeviceParameters(model, merge_rules) if device_encoding else parameters


@dataclass(frozen=True)
class DeviceSnapshot:
    """Base and parameters of a fragment, float32 (n,), on their device."""

    base: Tensor
    local: Tensor
    ready: torch.cuda.Event | None
    """Happens when `local` is complete; the training thread does not wait for it."""

    def empty(self) -> Tensor:
        """Uninitialised float32 memory of shape (n,), for encoding to fill."""
        with beside_training(self.local.device):
            return torch.empty_like(self.local)

    def encode(
        self,
        fragment: Fragment,
        residual: Tensor | None,
        *,
        codec_name: str,
        rho: float,
        chunk_elements: int,
        next_residual: Tensor,
    ) -> Iterator[EncodedChunk]:
        """As transfer.encode_push: (base - local) + residual, chunk by chunk; `next_residual`, from
        `empty`, gets what is not sent. Runs beside the training stream.

        Raises LocalProtocolError NOT_FINITE.
        """
        scales = self._scales(fragment, residual, codec_name, rho)
        block = max(1, BLOCK_ELEMENTS // chunk_elements) * chunk_elements
        for start in range(0, fragment.elements, block):
            count = min(block, fragment.elements - start)
            block_span = slice(start, start + count)
            # A generator must not leave a stream current while its caller goes on.
            with self._after_snapshot():
                coded = self._coded(
                    fragment, block_span, residual, scales, codec_name, next_residual[block_span]
                )
            for offset in range(start, start + count, chunk_elements):
                yield self._chunk(
                    fragment, coded[offset - start :][:chunk_elements], offset, scales, codec_name
                )

    def _value(self, places: slice | Tensor, residual: Tensor | None) -> Tensor:
        value = self.base[places] - self.local[places]
        return value if residual is None else value + residual[places]

    def _scales(
        self, fragment: Fragment, residual: Tensor | None, codec_name: str, rho: float
    ) -> F32:
        if not codec(codec_name).quantised:
            return np.ones(len(fragment.pieces), np.float32)
        places, bounds = sample_places(fragment.bounds, RMS_SAMPLES_MAX)
        with self._after_snapshot():
            where = torch.from_numpy(places).to(self.local.device)
            samples = self._value(where, residual).cpu().numpy()
        scales = piece_scales(samples, bounds, rho)
        for piece in np.flatnonzero(scales == 0):
            # A few large elements among zeros: the samples miss them, and they must travel.
            span = slice(int(fragment.bounds[piece]), int(fragment.bounds[piece + 1]))
            with self._after_snapshot():
                whole = self._value(span, residual).cpu().numpy()
            scales[piece] = piece_scales(whole, np.array([0, whole.size]), rho)[0]
        return scales

    def _coded(
        self,
        fragment: Fragment,
        span: slice,
        residual: Tensor | None,
        scales: F32,
        codec_name: str,
        next_residual: Tensor,
    ) -> NDArray[np.generic]:
        """Codes of the elements `span` in host memory, int8; with a codec that is not quantised the
        values themselves, float32."""
        value, scheme = self._value(span, residual), codec(codec_name)
        if not torch.isfinite(value).all():
            raise not_finite(f"values to be sent as {codec_name}")
        if not isinstance(scheme, QuantisedCodec):
            values: F32 = value.cpu().numpy()
            sent = np.empty_like(values)
            scheme.encode(values, np.array([0, values.size]), scales[:1], sent)
            next_residual.copy_(value - torch.from_numpy(sent).to(value.device))
            return sent
        steps = self._steps(fragment, span, scales)
        inverse = torch.where(steps > 0, 1 / steps, torch.zeros_like(steps))
        codes = (value * inverse).clamp_(-scheme.limit, scheme.limit).round_()
        # The product is exact, so that one rounding remains, fused or not.
        torch.sub(value, codes * steps, out=next_residual)
        return _in_host_memory(codes.to(torch.int8))

    def _steps(self, fragment: Fragment, span: slice, scales: F32) -> Tensor:
        """The scale of each element, shape (count,)."""
        count = span.stop - span.start
        pieces, bounds = fragment.pieces_of(span.start, count), fragment.spans(span.start, count)
        device = self.local.device
        own = torch.from_numpy(scales[pieces.start : pieces.stop]).to(device)
        lengths = torch.from_numpy(np.diff(bounds)).to(device)
        return own.repeat_interleave(lengths, output_size=count)

    def _chunk(
        self,
        fragment: Fragment,
        coded: NDArray[np.generic],
        offset: int,
        scales: F32,
        codec_name: str,
    ) -> EncodedChunk:
        bounds, scheme = fragment.spans(offset, coded.size), codec(codec_name)
        pieces = fragment.pieces_of(offset, coded.size)
        own = scales[pieces.start : pieces.stop]
        if isinstance(scheme, QuantisedCodec):
            payload = scheme.payload(coded.view(np.int8), own)
        else:
            values = coded.view(np.float32)
            payload = scheme.encode(values, bounds, own, np.empty_like(values))
        return EncodedChunk(offset, coded.size, payload, digest(payload))

    @contextmanager
    def _after_snapshot(self) -> Generator[None]:
        """Work in the block waits for the snapshot, and not for training's work after it."""
        with beside_training(self.local.device) as stream:
            if stream is not None and self.ready is not None:
                stream.wait_event(self.ready)
                # Their memory belongs to the training stream, which may go on to use it again.
                self.base.record_stream(stream)
                self.local.record_stream(stream)
            yield


@contextmanager
def beside_training(device: torch.device) -> Generator[torch.cuda.Stream | None]:
    """Queues and allocates in the block on a stream of our own; yields None on a CPU.

    There is one stream per device: one push reads the residual of the last one on the same stream.
    """
    if device.type != "cuda":
        yield None
        return
    if device not in _streams:
        # Several workers may come here at once; only one of their streams is kept.
        _streams.setdefault(device, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
    stream = _streams[device]
    with torch.cuda.stream(stream):  # Makes its device the current one, too.
        yield stream


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _in_host_memory(codes: Tensor) -> NDArray[np.int8]:
    if not codes.is_cuda:
        return codes.numpy()
    # Pinned memory, kept by torch for the next time: several times as fast as pageable memory.
    host = torch.empty(codes.shape, dtype=codes.dtype, pin_memory=True)
    host.copy_(codes, non_blocking=True)
    torch.cuda.current_stream(codes.device).synchronize()
    return host.numpy()
