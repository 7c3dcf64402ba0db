"""Other ways to put a fragment's step into bits: codings that only the bench has."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, TypeAlias

import numpy as np
import zstandard

from narrows.proto.codec import F32, I64, codec, piece_scales
from narrows.proto.fragments import Fragment, Piece

Coding: TypeAlias = Callable[[Fragment, F32], tuple[F32, int]]
"""From a fragment's values (n,) to the values that arrive, and the bytes that they take."""

CODEC: Final = "int4-zstd"
BLOCK: Final = 256


def _quantised(values: F32, bounds: I64, rho: float) -> tuple[F32, int]:
    sent = np.empty_like(values)
    scales = piece_scales(values, bounds, rho)
    return sent, len(codec(CODEC).encode(values, bounds, scales, sent))


def _one_step(rho: float, part: Fragment, values: F32) -> tuple[F32, int]:
    """One quantisation step for the whole fragment."""
    return _quantised(values, np.array([0, values.size]), rho)


def _step_per_block(rho: float, part: Fragment, values: F32) -> tuple[F32, int]:
    """A quantisation step for every BLOCK elements."""
    return _quantised(values, np.append(np.arange(0, values.size, BLOCK), values.size), rho)


def _largest(density: float, part: Fragment, values: F32) -> tuple[F32, int]:
    """The largest values of each piece (top-k), quantised with a step per piece, and the gaps
    between them. The rest stays with the sender as residual. Of SparseLoCo (arXiv 2508.15706) this
    is the coding alone: SparseLoCo has no outer momentum and forgets a part of the residual."""
    places = np.sort(np.concatenate([_places(density, values, piece) for piece in part.pieces]))
    kept, size = _quantised(values[places], np.searchsorted(places, part.bounds), 0.5)
    sent = np.zeros_like(values)
    sent[places] = kept
    return sent, size + len(zstandard.compress(_gap_bytes(places)))


def _places(density: float, values: F32, piece: Piece) -> I64:
    sizes = np.abs(values[piece.offset : piece.offset + piece.count])
    count = max(1, round(density * piece.count))
    largest: I64 = np.argpartition(sizes, -count)[-count:]
    return piece.offset + largest


def _gap_bytes(places: I64) -> bytes:
    """One byte per gap, preceded by a byte of 255 for every 255 in the gap."""
    gaps = np.diff(places, prepend=-1) - 1
    lengths = gaps // 255 + 1
    coded = np.full(lengths.sum(), 255, np.uint8)
    coded[np.cumsum(lengths) - 1] = gaps % 255
    return coded.tobytes()


_LARGEST: Final = {share: partial(_largest, share) for share in (0.15, 0.05, 0.02)}

CODINGS: Final[dict[str, Coding]] = {
    "one step per fragment": partial(_one_step, 0.5),
    "a step per block": partial(_step_per_block, 0.5),
    **{f"largest {share:.0%}": coding for share, coding in _LARGEST.items()},
}
"""Codings of pushes and publications."""

OF_PUSHES: Final[dict[str, Coding]] = {
    f"largest {share:.0%} of pushes": coding for share, coding in _LARGEST.items()
}
"""Codings of pushes; publications keep their codec."""
