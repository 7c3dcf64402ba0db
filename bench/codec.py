"""`narrows bench codec`: bits, error and speed of the codecs, beside what others do."""

from __future__ import annotations

import math
import timeit
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import median
from typing import Any, Final, NamedTuple, cast

import numpy as np
from safetensors.numpy import load_file

from narrows.bench.kit.rows import CHECKOUT, Column, Json, Row, Short, bench
from narrows.proto.codec import F32, advance_copy, decode_chunk, encode_push, warm_up
from narrows.proto.layout import Fragment, build_table
from narrows.proto.messages import LOSSLESS, CodecName, LayoutEntry

RECORDING: Final = CHECKOUT / "bench/kit/recorded.safetensors"
"""Outer gradients of a small GPT in the middle of its training. An installed package has none."""

RHOS: Final = (0.4, 0.5, 0.7, 1.0)
DEFAULT_RHO: Final = 0.5
"""Steps of the codes of int4-zstd, and the one that a run has unless it is set."""
CHUNK_ELEMENTS: Final = 1 << 18
REPEATS: Final = 5
RMS: Final = 1e-3
"""Root mean square of drawn outer gradients."""
BLOCK: Final = 256
"""Values that share a scale in codes of fixed length."""

ABSMAX: Final = {"absmax int4 by 256": 7, "absmax int8 by 256": 127}
"""The largest code of each quantiser as most systems have it: the largest value of a block sets the
step, and no entropy coder follows."""

COLUMNS: Final = (
    Column("data", "data"),
    Column("codec", "codec"),
    Column("rho", "rho", "{:g}"),
    Column("bits/param", "bits_per_param", "{:.2f}"),
    Column("SNR dB", "snr_db", "{:.1f}"),
    Column("Gaussian bound", "gaussian_bound_bits", "{:.2f}"),
    Column("encode G/s", "encode_gparams_per_s", "{:.2f}"),
    Column("decode+add G/s", "decode_gparams_per_s", "{:.2f}"),
    Column("memcpy G/s", "memcpy_gparams_per_s", "{:.2f}"),
)


@dataclass(frozen=True)
class CodecCell:
    """One codec on one kind of data."""

    data: str
    codec: str
    rho: float | None
    """Step in units of the rms; None: the codec has none."""
    elements: int
    """Elements to draw; a recording has its own number."""


class Coding(NamedTuple):
    """A way to code an outer gradient (n,)."""

    encode: Callable[[], Any]
    decode: Callable[[], F32]
    """Returns the values (n,) that the receiver gets."""
    size_bytes: int


def codec(*, short: Short = False, json: Json = None) -> None:
    """Measure bits, error and speed of the codecs on one core, beside what others do."""
    warm_up()
    # 16 MiB as float32 are more than the caches of a core hold.
    elements = 1 << 20 if short else 1 << 22
    rhos = (DEFAULT_RHO,) if short else RHOS
    kinds = ["gaussian", "student_t"]
    if RECORDING.exists():
        kinds.append("recorded")
    cells: list[CodecCell] = []
    for data in kinds:
        cells += [CodecCell(data, "int4-zstd", rho, elements) for rho in rhos]
        cells.append(CodecCell(data, "int8-zstd", 0.25, elements))
        cells += [CodecCell(data, name, None, elements) for name in (LOSSLESS, *ABSMAX)]
    bench("codec", cells, measure, COLUMNS, headline, json=json)


def measure(cell: CodecCell) -> Row:
    """Bits, signal over error, and speeds in 10^9 parameters per second.

    Speeds are medians of REPEATS. A lossless codec has no error: its SNR and bound are None.
    """
    fragment, values = _data(cell.data, cell.elements)
    if cell.codec in ABSMAX:
        coding = _absmax(values, ABSMAX[cell.codec])
    else:
        coding = _ours(fragment, values, cast(CodecName, cell.codec), cell.rho or 1.0)
    error = float(np.sum((values.astype(np.float64) - coding.decode()) ** 2))
    signal = float(np.sum(values.astype(np.float64) ** 2))
    row: Row = {
        "bits_per_param": 8 * coding.size_bytes / values.size,
        "snr_db": None,
        "gaussian_bound_bits": None,
        "encode_gparams_per_s": values.size / _median_s(coding.encode) / 1e9,
        "decode_gparams_per_s": values.size / _median_s(coding.decode) / 1e9,
        "memcpy_gparams_per_s": values.size / _median_s(values.copy) / 1e9,
    }
    if error > 0:
        snr_db = 10 * math.log10(signal / error)
        row["snr_db"] = snr_db
        # Every code of independent Gaussian values needs so many bits at this error.
        row["gaussian_bound_bits"] = snr_db / (20 * math.log10(2))
    return row


def headline(rows: Sequence[Row]) -> list[str]:
    """The default codec on the data that are nearest to real ones, which come last."""
    mine = [row for row in rows if (row["codec"], row["rho"]) == ("int4-zstd", DEFAULT_RHO)]
    return [
        f"{row['data']}: {row['bits_per_param']:.2f} bits per parameter at {row['snr_db']:.1f} dB "
        f"(Gaussian bound {row['gaussian_bound_bits']:.2f}); encode "
        f"{row['encode_gparams_per_s']:.2f}, decode and add {row['decode_gparams_per_s']:.2f} "
        "G param/s on one core"
        for row in mine[-1:]
    ]


# Codings.


def _ours(fragment: Fragment, values: F32, name: CodecName, rho: float) -> Coding:
    """Narrows' own codec: a sender encodes a push of `values`; its receiver decodes and adds it."""
    zeros = np.zeros_like(values)

    def encode() -> list[bytes]:
        return [
            chunk.payload
            for chunk in encode_push(
                fragment, values, zeros, codec=name, rho=rho, chunk_elements=CHUNK_ELEMENTS
            )
        ]

    payloads = encode()

    def decode() -> F32:
        decoded = [
            decode_chunk(fragment, name, CHUNK_ELEMENTS, index, payload)
            for index, payload in enumerate(payloads)
        ]
        return advance_copy(fragment, zeros, decoded)

    return Coding(encode, decode, sum(map(len, payloads)))


def _absmax(values: F32, limit: int) -> Coding:
    """One float32 scale for each BLOCK of values, and codes from -limit to limit."""

    def encode() -> tuple[Any, F32]:
        blocks = np.resize(values, (-(-values.size // BLOCK), BLOCK))
        scales = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(limit)
        inverse = np.divide(1.0, scales, out=np.zeros_like(scales), where=scales > 0)
        return np.rint(blocks * inverse).astype(np.int8), scales

    codes, scales = encode()

    def decode() -> F32:
        sent: F32 = (codes * scales).reshape(-1)[: values.size]
        return sent

    bits = (2 * limit + 1).bit_length()
    return Coding(encode, decode, values.size * bits // 8 + 4 * scales.size)


# Data.


@lru_cache(maxsize=1)
def _data(name: str, count: int) -> tuple[Fragment, F32]:
    """A fragment and its outer gradient (n,), drawn or recorded."""
    if name == "recorded":
        tensors = load_file(RECORDING)
        indices = sorted(
            key.removeprefix("bounds.") for key in tensors if key.startswith("bounds.")
        )
        values = np.concatenate([tensors[f"outer_grad.{index}"] for index in indices])
        lengths = np.concatenate([np.diff(tensors[f"bounds.{index}"]) for index in indices])
        return _fragment(lengths.tolist()), values
    rng = np.random.default_rng(0)
    if name == "student_t":  # Infinite kurtosis, finite variance.
        drawn = rng.standard_t(3, size=count)
    else:
        drawn = rng.standard_normal(count)
    return _fragment([count]), (RMS * drawn).astype(np.float32)


def _fragment(pieces: Sequence[int]) -> Fragment:
    """One fragment whose pieces have these lengths, one after the other."""
    entries = [LayoutEntry(f"t{i}", (n,), "float32", "rda") for i, n in enumerate(pieces)]
    (fragment,) = build_table(entries, 1)
    assert [piece.count for piece in fragment.pieces] == list(pieces), "the order of the layout"
    return fragment


def _median_s(work: Callable[[], Any]) -> float:
    times = timeit.repeat(work, number=1, repeat=REPEATS + 1)
    return median(times[1:])  # The first one warms up.
