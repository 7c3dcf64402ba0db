"""The parameters of one process, in host memory, as host and training thread use them.

An outer gradient begins here: a snapshot becomes a coded push. It ends here, too, with the rule of
an adoption. With `keep` from 0 to 1 and `push` as it was coded (0 without one):

    params = new + keep * (params - old + push) - (0 if merged else push)

It is computed in two parts, the first of which needs no parameters:

    out = new - keep * (old - push) - (0 if merged else push)        prepare
    params = out + keep * params                                     adopt

`params - old + push` is what was learned since the snapshot, and the rounding error of the code.
So that error stays in the parameters and is in the next push again: there is no residual buffer. A
push that waits stays whole; one that `new` holds has done its work. `old` and `new` are rounded to
the parameters' precision, so that the rounding of bfloat16 never travels as progress. Streaming
DiLoCo (arXiv 2501.18512) mixes so, too.

Each part is one numba kernel here; learner/gpu.py has their twins in torch, with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, Protocol, TypeAlias

import numpy as np

from narrows.proto.codec import (
    F32,
    I8,
    I64,
    Spread,
    empty_f32,
    encode_push,
    kernel,
    read_only,
    round_to_dtype,
)
from narrows.proto.codec import warm_up as warm_up_codecs
from narrows.proto.layout import Fragment, Piece
from narrows.proto.messages import DtypeName, RunSettings
from narrows.proto.ports import Adoption, CodedPush, Copy, Prepared

HandOver: TypeAlias = Callable[[Fragment, Any, float], None]
"""Replaces a share of the optimizer's first moments, the last argument, by a movement of the
published copies as `Prepared` has it."""

NO_PUSH: Final = read_only(np.empty(0, np.float32))
ONE_SCALE: Final = read_only(np.ones(1, np.float32))


class ParameterSource(Protocol):
    """The tensors of a model, by piece."""

    def read(self, fragment: Fragment, out: F32) -> None:
        """Copies a fragment to host memory; `out` is float32 (n,)."""

    def write(self, fragment: Fragment, values: F32) -> None:
        """Overwrites a fragment with float32 (n,), rounded to the parameters' precision."""

    def view(self, piece: Piece) -> Any:
        """The elements of a piece, sharing the parameter's memory: a float32 array (count,), or a
        torch tensor of any shape, precision and device with so many elements."""

    def arrays(self, fragment: Fragment) -> list[F32] | None:
        """All pieces as float32 arrays (count,) that share the parameters' memory; None: they
        cannot."""

    def dtype(self, piece: Piece) -> DtypeName:
        """The parameter's own precision."""


class HostIsland:
    """Parameters that are exchanged in host memory, wherever they are: the port Island.

    Without `hand_over` the moments of the optimizer stay what they are at an adoption.
    """

    def __init__(self, source: ParameterSource, hand_over: HandOver | None = None) -> None:
        self._source = source
        self._hand_over = hand_over

    def copy(self, fragment: Fragment, values: F32) -> Copy:
        """`rounded` is `values` itself where all parameters are float32."""
        rounded = values
        if any(self._source.dtype(piece) != "float32" for piece in fragment.pieces):
            rounded = empty_f32(fragment.elements)
            for piece in fragment.pieces:
                span = slice(piece.offset, piece.offset + piece.count)
                round_to_dtype(values[span], self._source.dtype(piece), rounded[span])
        return Copy(values, rounded)

    def read(self, fragment: Fragment) -> F32:
        """Copies the parameters (n,)."""
        values = empty_f32(fragment.elements)
        arrays = self._source.arrays(fragment)
        if arrays is None:
            self._source.read(fragment, values)
        else:
            np.concatenate(arrays, out=values)
        return values

    def snapshot(
        self, fragment: Fragment, published: Copy, base: int, settings: RunSettings
    ) -> Callable[[Spread], CodedPush]:
        """Copies the parameters; the published copy is never written to."""
        return partial(
            encode_on_host, fragment, published.rounded, self.read(fragment), base, settings
        )

    def prepare(self, fragment: Fragment, rule: Adoption) -> Prepared:
        """The first part of this module's rule."""
        movement = self._movement(fragment, rule)
        if is_copy(rule):
            return Prepared(rule.new.rounded, 0.0, rule.share, movement)
        return Prepared(prepare_on_host(fragment, rule), rule.keep, rule.share, movement)

    def _movement(self, fragment: Fragment, rule: Adoption) -> Any:
        """Makes `Prepared.movement`; None: nobody wants it."""
        if self._hand_over is None or rule.share == 0:
            return None
        movement = empty_f32(fragment.elements)
        np.subtract(rule.old.values, rule.new.values, out=movement)
        movement /= np.float32(rule.steps)
        return movement

    def adopt(self, fragment: Fragment, prepared: Prepared) -> None:
        """The second part. Parameters that are not float32 in host memory are read and written."""
        arrays = self._source.arrays(fragment)
        out = read_only(prepared.out)
        if arrays is not None:
            for piece, array in zip(fragment.pieces, arrays, strict=True):
                _adopt(array, out[piece.offset : piece.offset + piece.count], prepared.keep)
        elif prepared.keep == 0:
            self._source.write(fragment, out)
        else:
            values = self.read(fragment)
            _adopt(values, out, prepared.keep)
            self._source.write(fragment, values)
        self._turn_momentum(fragment, prepared)

    def _turn_momentum(self, fragment: Fragment, prepared: Prepared) -> None:
        if self._hand_over is not None and prepared.movement is not None:
            self._hand_over(fragment, prepared.movement, prepared.share)

    def _views(self, fragment: Fragment) -> list[Any]:
        return [self._source.view(piece) for piece in fragment.pieces]


def encode_on_host(
    fragment: Fragment,
    published: F32,
    local: F32,
    base: int,
    settings: RunSettings,
    spread: Spread,
) -> CodedPush:
    """Codes `published - local`, float32 (n,). Raises LocalProtocolError NOT_FINITE."""
    codec = settings.push_codec
    size = settings.chunk_elements
    chunks = encode_push(
        fragment,
        published,
        local,
        codec=codec,
        rho=settings.push_rho,
        chunk_elements=size,
        spread=spread,
    )
    return CodedPush(base, codec, size, tuple(chunks))


def is_copy(rule: Adoption) -> bool:
    """Whether the parameters become the new copy, whatever they were."""
    return rule.keep == 0 and (rule.push is None or rule.merged)


@kernel
def prepare_kernel(
    old: F32,
    new: F32,
    multiples: I8 | F32,
    bounds: I64,
    scales: F32,
    keep: np.float32,
    merged: bool,
    out: F32,
) -> None:
    """The first part of the rule for a chunk: old, new and out are float32 (n,). The push is scale
    times `multiples` (n,), by spans; these may be empty, and then it is 0."""
    for span in range(scales.size):
        scale = scales[span]
        first, end = bounds[span], bounds[span + 1]
        part_old, part_new, part = old[first:end], new[first:end], multiples[first:end]
        part_out = out[first:end]
        for i in range(part_out.size):
            mine = scale * np.float32(part[i]) if multiples.size else np.float32(0.0)
            value = part_new[i]
            # Without this test, 0 times a nan of the old copy would spoil the new one.
            if keep > np.float32(0.0):
                value = value - keep * (part_old[i] - mine)
            part_out[i] = value if merged else value - mine


@kernel
def adopt_kernel(params: F32, out: F32, keep: np.float32) -> None:
    """The second part, in place, on float32 (n,)."""
    for i in range(params.size):
        params[i] = out[i] + keep * params[i]


@kernel
def hand_over_kernel(
    first: F32, second: F32, movement: F32, keep: np.float32, scale: np.float32
) -> None:
    """The rule of learner/handover.py, in place, on float32 (n,)."""
    for i in range(first.size):
        first[i] = keep * first[i] + scale * np.sqrt(second[i]) * movement[i]


def prepare_on_host(fragment: Fragment, rule: Adoption) -> F32:
    """The first part of the rule, float32 (n,), in host memory."""
    old = read_only(rule.old.rounded)
    new = read_only(rule.new.rounded)
    keep = np.float32(rule.keep)
    out = empty_f32(fragment.elements)
    size = rule.push.chunk_elements if rule.push else fragment.elements
    for chunk in range(fragment.chunk_count(size)):
        offset, count = fragment.chunk(chunk, size)
        multiples: I8 | F32 = NO_PUSH
        bounds = np.array([0, count])
        scales = ONE_SCALE
        if rule.push is not None:
            decoded = rule.push.chunks[chunk].decoded
            multiples = decoded.multiples()
            bounds = decoded.bounds
            scales = decoded.scales
        place = slice(offset, offset + count)
        prepare_kernel(
            old[place], new[place], multiples, read_only(bounds), scales, keep, rule.merged,
            out[place],
        )  # fmt: skip
    return read_only(out)


def _adopt(params: F32, out: F32, keep: float) -> None:
    """`out` is read-only, as the kernel was compiled for."""
    # Parameters that are not finite, times 0, would spoil what they become.
    if keep == 0:
        np.copyto(params, out)
    else:
        adopt_kernel(params, out, np.float32(keep))


def warm_up() -> None:
    """Loads every kernel that a learner runs: one that is loaded later would hold training up."""
    warm_up_codecs()
    one = ONE_SCALE
    half = np.float32(0.5)
    bounds = read_only(np.array([0, 1]))
    codes: tuple[I8 | F32, ...] = (one, read_only(np.ones(1, np.int8)))
    for multiples in codes:
        prepare_kernel(one, one, multiples, bounds, one, half, False, one.copy())
    adopt_kernel(one.copy(), one, half)
    hand_over_kernel(one.copy(), one, one, half, half)
