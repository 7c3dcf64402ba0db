"""Encodes pushes: outer gradient, residual, and chunks that are kept for repair."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from narrows.learner.module import DeviceSnapshot, beside_training
from narrows.proto.codec import F32, I64, EncodedChunk, empty_f32, round_to_dtype, transfer
from narrows.proto.flow import Parcel, chunk_elements
from narrows.proto.fragments import Fragment
from narrows.proto.messages import DataKind, LayoutEntry, RunSettings

Residual: TypeAlias = F32 | Tensor
"""Shape (n,); in the memory where the push was encoded."""


@dataclass
class PushWork:
    """One push while it is encoded, sent and perhaps sent again."""

    push_id: int
    fragment: Fragment
    base_version: int
    base: F32
    """The published copy that the learner adopted."""
    local: F32 | DeviceSnapshot
    """The snapshot; one on a device has a base of its own."""
    residual: Residual | None
    """Rest of the outer gradient that earlier pushes did not send. It counts again if this push is
    not merged."""
    codec: str
    rho: float
    """Codec and quantisation step of this push."""
    next_residual: Residual | None = None
    """Rest that this push does not send; valid up to the last chunk that is ready."""
    chunks: list[EncodedChunk] = field(default_factory=list[EncodedChunk])
    settled: bool = False

    def error_ratio(self) -> float:
        """See transfer.error_ratio; known when all chunks are made."""
        next_residual = self.next_residual
        assert next_residual is not None

        def at(places: I64) -> F32:
            if isinstance(next_residual, np.ndarray):
                return next_residual[places]
            with beside_training(next_residual.device):
                where = torch.from_numpy(places).to(next_residual.device)
                sampled: F32 = next_residual[where].cpu().numpy()
            return sampled

        return transfer.error_ratio(self.fragment, self.chunks, at)

    def parcel(self, chunk: EncodedChunk) -> Parcel:
        """One of its chunks, ready for the sender."""
        place = (self.fragment.index, self.base_version, self.push_id)
        return Parcel(DataKind.PUSH, *place, self.codec, chunk)

    @property
    def bits_per_param(self) -> float:
        """Bits on the wire without headers and repairs; known when all chunks are made."""
        return 8 * sum(len(chunk.payload) for chunk in self.chunks) / self.fragment.elements


@dataclass
class Residuals:
    """Error feedback in two phases: the residual of a push counts only once the push is merged."""

    enabled: bool
    _by_fragment: dict[int, Residual] = field(default_factory=dict[int, "Residual"])

    def of(self, fragment: int) -> Residual | None:
        return self._by_fragment.get(fragment) if self.enabled else None

    def settle(self, work: PushWork, *, merged: bool) -> None:
        """Keeps the residual of a merged push; in every other case the one from before stays."""
        if self.enabled and merged and work.next_residual is not None:
            self._by_fragment[work.fragment.index] = work.next_residual


def rounded_base(fragment: Fragment, base: F32, layout: Sequence[LayoutEntry]) -> F32:
    """The published copy as the parameters hold it: rounded to each tensor's dtype.

    Without this the rounding of bfloat16 parameters would travel as progress.
    """
    if all(layout[piece.tensor].dtype == "float32" for piece in fragment.pieces):
        return base
    rounded = np.empty_like(base)
    for piece in fragment.pieces:
        span = slice(piece.offset, piece.offset + piece.count)
        round_to_dtype(base[span], layout[piece.tensor].dtype, rounded[span])
    return rounded


def encode_push(
    work: PushWork,
    settings: RunSettings,
    layout: Sequence[LayoutEntry],
    ready: Callable[[EncodedChunk], None],
) -> None:
    """Encodes base - local + residual; calls `ready` with each chunk as soon as it is made.

    Stops early when the push is settled. Raises LocalProtocolError NOT_FINITE.
    """
    for chunk in _encoded(work, layout, chunk_elements(settings, work.codec)):
        if work.settled:
            return
        # Its part of `next_residual` stands: once the last chunk is out, the push may be merged.
        ready(chunk)


def _encoded(work: PushWork, layout: Sequence[LayoutEntry], cut: int) -> Iterator[EncodedChunk]:
    fragment, local, residual = work.fragment, work.local, work.residual
    if isinstance(local, DeviceSnapshot):
        assert not isinstance(residual, np.ndarray)
        work.next_residual = next_residual = local.empty()
        return local.encode(
            fragment,
            residual,
            codec_name=work.codec,
            rho=work.rho,
            chunk_elements=cut,
            next_residual=next_residual,
        )
    assert not isinstance(residual, Tensor)
    work.next_residual = values = empty_f32(fragment.elements)
    return transfer.encode_push(
        fragment,
        rounded_base(fragment, work.base, layout),
        local,
        residual,
        codec_name=work.codec,
        rho=work.rho,
        chunk_elements=cut,
        next_residual=values,
    )
