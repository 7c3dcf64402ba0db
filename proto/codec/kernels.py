"""The loops behind codecs and merging, compiled by numba: the same bits on every machine.

Every loop does strict float32 arithmetic element by element, or sums in element order: no
fast-math, nothing reassociated, nothing contracted. So the result does not depend on the vector
width, on the number of threads or on the CPU, and all peers hold the same copy of the model.

Kernels release the GIL, allocate nothing and check nothing: their callers have checked lengths and
bounds. Inputs are read-only arrays (`read_only`) and outputs writable ones, because numba compiles
once per combination of the two. Spans are given by bounds (s + 1,): span i is the elements
from bounds[i] to bounds[i + 1].
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

from narrows.proto.messages import DtypeName

F32: TypeAlias = NDArray[np.float32]
F64: TypeAlias = NDArray[np.float64]
I8: TypeAlias = NDArray[np.int8]
I64: TypeAlias = NDArray[np.int64]
U8: TypeAlias = NDArray[np.uint8]
U16: TypeAlias = NDArray[np.uint16]
U32: TypeAlias = NDArray[np.uint32]

RUN: Final = 256
"""Elements that are packed together: element j of a run shares its byte with element j + half. The
loop vectorises because neighbours lie in separate bytes; with two in one byte it does not."""

HALF: Final = RUN // 2
"""Bytes of a whole run. Loops over whole runs have this constant length: packing takes an eighth of
the time that it takes with a length that the compiler does not know."""

ROUNDER: Final = np.float32(3 << 22)
"""1.5 * 2**23: adding and subtracting it rounds |x| < 2**22 to an integer, half to even.

Compilers vectorise it on every CPU, while a rounding instruction exists only on newer ones.
"""

INFINITE_BITS: Final = 0x7F800000
"""Magnitude bits of infinity; those of a NaN are larger."""

ZERO: Final = np.float32(0)

Function = TypeVar("Function", bound=Callable[..., object])
Element = TypeVar("Element", bound=np.generic)

_numba: Any = numba
_refusals: list[str] = []
"""Why kernels are not kept on disk, if any is not."""


def kernel(function: Function) -> Function:
    """Compiles a strict loop at its first call, and keeps the result on disk if it can."""
    # The numpy error model lets loops with a division vectorise: no check for a zero divisor.
    strict = {"nogil": True, "fastmath": False, "error_model": "numpy"}
    given = _numba.config.CACHE_DIR
    try:
        # Set for this kernel alone: a program that trains may have kernels of its own.
        folder = _numba.config.CACHE_DIR = given or str(own_folder())
        compiled = _numba.njit(cache=True, **strict)(function)
        # Where numba cannot write the folder, it goes on to the one beside the module.
        if str(compiled.stats.cache_path).startswith(folder):
            return cast(Function, compiled)
        _refusals.append(f"{folder} cannot be written")
    # numba raises RuntimeError if it finds no folder at all. A loop has no `stats` if numba is told
    # not to compile. Any other error is raised again below.
    except (OSError, RuntimeError, AttributeError) as error:
        _refusals.append(str(error))
    finally:
        _numba.config.CACHE_DIR = given
    return cast(Function, _numba.njit(**strict)(function))


def own_folder() -> Path:
    """The user's own folder for compiled kernels, made if need be.

    numba executes what it finds there (pickle, machine code). So this user owns the folder and the
    two above it, and nobody else may write them. Raises OSError if that is not so.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")).absolute()
    for folder in (base, base / "narrows", base / "narrows" / "numba"):
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.stat()
        if found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise PermissionError(f"others own or may write {folder}: chmod go-w {folder}")
    return folder


def uncached_advice() -> str:
    """The advice to a user whose kernels cannot be kept on disk; "" if they can."""
    if not _refusals:
        return ""
    return (
        f"compiled code is not kept: {_refusals[0]}. Each start compiles anew, some ten seconds of "
        "a core; NUMBA_CACHE_DIR may name a folder that can be written, but by nobody else"
    )


def read_only(array: NDArray[Element]) -> NDArray[Element]:
    """A read-only contiguous view of `array`, or a copy if need be: the form of every input."""
    flags = array.flags
    view = array.view() if flags.c_contiguous and flags.aligned else array.copy()
    view.setflags(write=False)
    return view


NOTHING: Final = read_only(np.zeros(0, np.float32))
"""Stands for an array that is not given; kernels skip it."""


def fits(array: F32, count: int, *, writable: bool = False) -> bool:
    """Whether `array` is float32 (count,), and a kernel can write to it in place if it must."""
    return bool(
        array.dtype == np.float32
        and array.shape == (count,)
        and (array.flags.carray or not writable)
    )


def all_finite(values: F32) -> bool:
    """Whether no element of `values` (n,) is infinite or NaN."""
    return bool(np.isfinite(values).all())


@kernel
def quantise_difference(
    minuend: F32,
    subtrahend: F32,
    bounds: I64,
    scales: F32,
    limit: np.float32,
    codes: I8,
    advanced: F32,
) -> int:
    """codes (n,) = (minuend - subtrahend) / scale, rounded half to even, clamped to +-limit; 0
    where the scale is 0. And advanced = subtrahend + scale * code, as `add_codes` adds; it may be
    empty, and then this is left out.

    Returns the largest magnitude of a difference as float32 bits: from INFINITE_BITS on a value is
    not finite, and the codes mean nothing. One pass over memory: a fragment exceeds any cache.
    """
    largest = np.uint32(0)
    for span in range(scales.size):
        scale = scales[span]
        inverse = np.float32(1) / scale if scale > ZERO else ZERO
        first, end = bounds[span], bounds[span + 1]
        part, less = minuend[first:end], subtrahend[first:end]
        part_codes, part_advanced = codes[first:end], advanced[first:end]
        for i in range(part.size):
            value = np.float32(part[i] - less[i])
            largest = max(largest, value.view(np.uint32) & np.uint32(0x7FFFFFFF))
            # Clamped before rounding; this order of the comparisons turns a NaN into the limit,
            # so that the conversion to an integer below is always defined.
            ratio = value * inverse
            ratio = ratio if ratio < limit else limit
            ratio = ratio if ratio > -limit else -limit
            whole = (ratio + ROUNDER) - ROUNDER
            part_codes[i] = np.int8(whole)
            if advanced.size:
                step = scale * whole
                part_advanced[i] = less[i] if step == ZERO else less[i] + step
    return int(largest)


@kernel
def add_codes(base: F32, codes: I8, bounds: I64, scales: F32, out: F32) -> None:
    """out (n,) = base + scale * code; a zero value leaves the bits of base. See `add_nonzero`."""
    for span in range(scales.size):
        scale = scales[span]
        first, end = bounds[span], bounds[span + 1]
        part, part_codes, part_out = base[first:end], codes[first:end], out[first:end]
        for i in range(part.size):
            value = scale * np.float32(part_codes[i])
            part_out[i] = part[i] if value == ZERO else part[i] + value


@kernel
def add_nonzero(base: F32, values: F32, out: F32) -> None:
    """out (n,) = base + values; a zero value leaves the bits of base, so that -0.0 stays -0.0."""
    for i in range(out.size):
        out[i] = base[i] if values[i] == ZERO else base[i] + values[i]


@kernel
def pack_nibbles(codes: U8, packed: U8) -> None:
    """Two 4-bit codes per byte, in runs of RUN elements; the last run may be shorter.

    `codes` (n,) holds two's complement bytes in -7..7, `packed` has (n + 1) // 2 bytes. In a run
    of m elements and half = (m + 1) // 2 bytes, byte j holds element j in its low nibble and
    element j + half in its high one; where m is odd the last high nibble is 0.
    """
    whole = codes.size // RUN * RUN
    for start in range(0, whole, RUN):
        low, high = codes[start : start + HALF], codes[start + HALF : start + RUN]
        run = packed[start // 2 : start // 2 + HALF]
        for j in range(HALF):
            run[j] = np.uint8((low[j] & np.uint8(15)) | (high[j] << np.uint8(4)))
    half = (codes.size - whole + 1) // 2
    low, high, run = codes[whole : whole + half], codes[whole + half :], packed[whole // 2 :]
    for j in range(high.size):
        run[j] = np.uint8((low[j] & np.uint8(15)) | (high[j] << np.uint8(4)))
    if high.size < half:
        run[half - 1] = low[half - 1] & np.uint8(15)


@kernel
def unpack_nibbles(packed: U8, codes: I8) -> None:
    """The codes (n,) of `packed` ((n + 1) // 2,), the inverse of `pack_nibbles`."""
    whole = codes.size // RUN * RUN
    for start in range(0, codes.size, RUN):
        half = HALF if start < whole else (codes.size - whole + 1) // 2
        low, high = codes[start : start + half], codes[start + half : start + RUN]
        run = packed[start // 2 : start // 2 + half]
        for j in range(half):
            # Flipping the sign bit of a nibble and taking 8 off extends its sign.
            low[j] = np.int8(((run[j] & np.uint8(15)) ^ np.uint8(8)) - np.uint8(8))
        for j in range(high.size):
            high[j] = np.int8(((run[j] >> np.uint8(4)) ^ np.uint8(8)) - np.uint8(8))


@kernel
def lowest_nibble(packed: U8) -> int:
    """The smallest 4-bit code in `packed` (n,), from -8 to 7; 7 if there is none."""
    lowest = np.uint8(15)
    for i in range(packed.size):
        # With its sign bit flipped a nibble is code + 8, unsigned.
        flipped = packed[i] ^ np.uint8(0x88)
        lowest = min(lowest, min(flipped & np.uint8(15), flipped >> np.uint8(4)))
    return int(lowest) - 8


@kernel
def code_square_sums(codes: I8, bounds: I64, out: I64) -> None:
    """out (s,) = sum of code**2 of each span: integers, hence exact in any order."""
    for span in range(out.size):
        total = np.int64(0)
        for code in codes[bounds[span] : bounds[span + 1]]:
            total += np.int64(np.int32(code) * np.int32(code))
        out[span] = total


@kernel
def sampled_mean_squares(
    minuend: F32, subtrahend: F32, bounds: I64, samples_max: int, out: F64
) -> None:
    """out (k,) = mean of value**2 over at most `samples_max` elements of each piece, in float64,
    zeros left out: where few rows of an embedding are used, the step is one for those rows.

    value = minuend - subtrahend; the latter may be empty. A piece of n elements is cut into strata
    of width ceil(n / samples_max); elements that do not fill a stratum are left out. One element
    is read of each, at a place that a multiplicative hash of the stratum's number chooses: a
    constant stride would read a few columns of a matrix only. A piece of up to samples_max
    elements has strata of one element and is read whole, and so is one whose samples are all 0.
    """
    for piece in range(out.size):
        start = bounds[piece]
        count = bounds[piece + 1] - start
        width = (count + samples_max - 1) // samples_max
        total = 0.0
        nonzero = 0
        while not nonzero and width:
            for i in range(count // width):
                hashed = ((i * 0x9E3779B1) & 0xFFFFFFFF) >> 8
                place = start + i * width + ((hashed * width) >> 24)
                value = minuend[place]
                if subtrahend.size:
                    value -= subtrahend[place]
                total += np.float64(value) * np.float64(value)
                nonzero += value != ZERO
            # If all samples are 0, once more with strata of one element; then it is done.
            width = 1 if width > 1 else 0
        out[piece] = total / max(nonzero, 1)


def sample_places(bounds: I64, samples_max: int) -> tuple[I64, I64]:
    """The elements that `sampled_mean_squares` reads, in its order, and the bounds of the pieces
    among them. A caller whose values lie on a GPU fetches only these."""
    assert samples_max > 0, samples_max
    places: list[I64] = []
    for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        width = -(-(end - start) // samples_max)
        strata = np.arange((end - start) // width, dtype=np.int64)
        hashed = ((strata * 0x9E3779B1) & 0xFFFFFFFF) >> 8
        places.append(start + strata * width + ((hashed * width) >> 24))
    among = np.cumsum([0, *(each.size for each in places)], dtype=np.int64)
    assert bool(np.all(np.diff(among) > 0)), "a piece without a sample has no scale"
    return np.concatenate(places), among


@kernel
def round_bfloat16(bits: U32, out: U32) -> None:
    """float32 bit patterns (n,) rounded to bfloat16, half to even; a NaN stays a (quiet) NaN."""
    for i in range(bits.size):
        word = bits[i]
        even = np.uint32(0x7FFF) + ((word >> np.uint32(16)) & np.uint32(1))
        rounded = (word + even) & np.uint32(0xFFFF0000)
        is_nan = (word & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        out[i] = np.uint32(0x7FC00000) if is_nan else rounded


def round_to_dtype(values: F32, dtype: DtypeName, out: F32) -> None:
    """out (n,) = values rounded to `dtype` and back, half to even, as a parameter would hold them.

    Values beyond the range become infinite, as in every such cast. May be in place.
    """
    assert fits(values, out.size) and fits(out, values.size, writable=True), out.shape
    if dtype == "bfloat16":
        round_bfloat16(read_only(values).view(np.uint32), out.view(np.uint32))
    elif dtype == "float16":
        # An overflow is the documented result here; numpy would warn of it.
        with np.errstate(over="ignore"):
            out[:] = values.astype(np.float16)
    else:
        out[:] = values
