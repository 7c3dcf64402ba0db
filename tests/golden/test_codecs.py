"""The bits that peers must agree on, stored: payloads decode and codes come out as ever.

`codecs.json` belongs to protocol version 2. What zstd and Blosc2 make of them may change with
the library, so payloads are compared after decoding, and the codes before compression.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TypedDict

import numpy as np
import pytest
import xxhash
from coding import add_values

from narrows.proto.codec.bfloat16 import round_to_dtype
from narrows.proto.codec.codecs import codec, codec_names, piece_scales
from narrows.proto.codec.kernels import F32


class Coded(TypedDict):
    """Result of one codec for a case; hex of little-endian bytes."""

    payload: str
    codes: str
    reconstructed: str
    square_sums: list[float]


class Case(TypedDict):
    """Values, spans and scales of a chunk; scales as hex of bfloat16."""

    values: str
    bounds: list[int]
    scales: str
    codecs: dict[str, Coded]


CASES: dict[str, Case] = json.loads(Path(__file__).with_name("codecs.json").read_text())
both = pytest.mark.parametrize(
    ("case", "name"), [(case, name) for case in CASES for name in codec_names()]
)


def floats(text: str) -> F32:
    return np.frombuffer(bytes.fromhex(text), "<f4").astype(np.float32)


def scales_of(case: Case) -> F32:
    halves = np.frombuffer(bytes.fromhex(case["scales"]), "<u2").astype(np.uint32)
    return (halves << np.uint32(16)).view(np.float32)


@both
def test_stored_payloads_decode(case: str, name: str) -> None:
    coded = CASES[case]["codecs"][name]
    bounds = np.array(CASES[case]["bounds"], np.int64)
    chunk = codec(name).decode(bytes.fromhex(coded["payload"]), bounds)
    out = np.empty(chunk.count, np.float32)
    chunk.values(out)
    assert out.tobytes().hex() == coded["reconstructed"]
    assert chunk.codes.tobytes().hex() == coded["codes"]
    assert chunk.square_sums().tolist() == coded["square_sums"]


@both
def test_codes_and_reconstruction_are_as_ever(case: str, name: str) -> None:
    stored = CASES[case]
    values, bounds = floats(stored["values"]), np.array(stored["bounds"], np.int64)
    reconstructed = np.empty_like(values)
    payload = codec(name).encode(values, bounds, scales_of(stored), reconstructed)
    assert reconstructed.tobytes().hex() == stored["codecs"][name]["reconstructed"]
    assert (
        codec(name).decode(payload, bounds).codes.tobytes().hex() == stored["codecs"][name]["codes"]
    )
    if name in ("raw32", "bf16"):  # What no other library has a say in.
        assert payload.hex() == stored["codecs"][name]["payload"]
    elif codec(name).quantised:
        assert payload.hex().startswith(stored["scales"])


def test_every_codec_is_stored() -> None:
    assert all(tuple(case["codecs"]) == codec_names() for case in CASES.values())


def digest_of_everything() -> str:
    """One digest over all arithmetic whose bits are promised, on 200,000 awkward values."""
    hasher = xxhash.xxh3_128()
    index = np.arange(200_003, dtype=np.int64)
    whole = (index * 2_654_435_761 % (1 << 24) - (1 << 23)).astype(np.float32)
    values = whole * np.float32(2.0**-20) * np.exp2((index % 23 - 11).astype(np.float32))
    bounds = np.array([0, 1, 3, 258, 70_000, 199_999, 200_003], np.int64)
    scales = piece_scales(values, bounds, 0.7)
    hasher.update(values.tobytes() + scales.tobytes())
    out, total = np.empty_like(values), np.zeros_like(values)
    for name in codec_names():
        chunk = codec(name).decode(codec(name).encode(values, bounds, scales, out), bounds)
        add_values(total, out, total)
        hasher.update(chunk.codes.tobytes() + out.tobytes() + chunk.square_sums().tobytes())
        chunk.values(out)
        hasher.update(out.tobytes() + total.tobytes())
    for dtype in ("bfloat16", "float16"):
        round_to_dtype(values, dtype, out)
        hasher.update(out.tobytes())
    return hasher.hexdigest()


DIGEST = "e092382eaa57cc656a22f1de77d95a61"


def test_this_cpu_computes_the_stored_bits() -> None:
    assert digest_of_everything() == DIGEST


def test_a_generic_cpu_computes_the_stored_bits(tmp_path: Path) -> None:
    # The oldest instruction set and a fresh cache: nothing of this machine's own code is used.
    environment = os.environ | {
        "NUMBA_CPU_NAME": "generic",
        "NUMBA_CPU_FEATURES": "",
        "NUMBA_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    script = "import runpy, sys\nprint(runpy.run_path(sys.argv[1])['digest_of_everything']())\n"
    done = subprocess.run(
        [sys.executable, "-c", script, __file__],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert any(tmp_path.rglob("*.nbi")), "numba compiled nothing afresh"
    assert done.stdout.strip() == DIGEST
