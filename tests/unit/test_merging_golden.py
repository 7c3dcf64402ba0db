"""The bits of merges, stored: a run that began on another machine must go on with the same ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import xxhash
from merging_cases import awkward, push_of, round_of, state_of

from narrows.broker.merging import merge
from narrows.proto.layout import build_table
from narrows.proto.messages import LayoutEntry

(FRAGMENT,) = build_table(
    (
        LayoutEntry("embedding", (37, 64), "float32", "mean"),
        LayoutEntry("hidden", (300, 257), "float32", "rda"),
        LayoutEntry("norm", (5,), "float32", "mean"),
        LayoutEntry("out", (64, 64), "float32", "rda"),
    ),
    1,
)
CASES: dict[str, tuple[dict[str, object], int, float, str, str]] = {
    "five, one far longer": (
        {"codec": "int4-zstd", "outer_lr": 0.7, "momentum": 0.6}, 5, 100.0,
        "9c71de7f844ac2fe6e3af6aebd391d5c", "0ed3a77c0432e9bac155563632bdeb83",
    ),
    "two, int8": (
        {"codec": "int8-zstd", "outer_lr": 0.4, "momentum": 0.9}, 2, 1.0,
        "0ca9efcff8002f87967e80001c4d7e11", "f9688912961ad2a2d55cc8e4f52e8b54",
    ),
    "three, mean, lossless": (
        {"codec": "f32-blosc2", "rule": "mean", "weights": "equal"}, 3, 1.0,
        "1da802e2a8a602c1b65a90a3bfbaf7c0", "7d210e19aee5e1826b789bd02b619bf8",
    ),
    "one": (
        {"codec": "int4-zstd"}, 1, 1.0,
        "5f4189c5559716ca2b5186d133f027cd", "a5f72e80652cfe8a6e809f40276fd8d9",
    ),
}  # fmt: skip
"""Policy, learners, how much longer the last one's pushes are; digests of the states and of the
publications of three versions."""


def digests(case: str) -> tuple[str, str]:
    policy, learners, longer, _, _ = CASES[case]
    states, publications = xxhash.xxh3_128(), xxhash.xxh3_128()
    state = state_of(FRAGMENT, awkward(FRAGMENT.elements, 0))
    for number in (1, 2, 3):
        pushes = []
        for i in range(learners):
            gradient = awkward(FRAGMENT.elements, 10 * number + i)
            gradient *= longer if i == learners - 1 else 1
            work = {"tokens": 1000 + 100 * i, "steps": 10 + i}
            push = push_of(
                FRAGMENT, f"l{i}", gradient, codec="int4-zstd", chunk_elements=16384, **work
            )
            pushes.append(push)
        version = merge(FRAGMENT, state, round_of(pushes, number, chunk_elements=16384, **policy))
        state = version.state
        for array in (state.global_, state.momentum, state.published):
            states.update(array.tobytes())
        for chunk in version.publication:
            publications.update(chunk.payload)
    return states.hexdigest(), publications.hexdigest()


@pytest.mark.parametrize("case", CASES)
def test_this_cpu_computes_the_stored_bits(case: str) -> None:
    assert digests(case) == CASES[case][3:]


def test_a_generic_cpu_computes_the_stored_bits(tmp_path: Path) -> None:
    """Without wide vectors and fused multiply-adds, and compiled anew."""
    environment = os.environ | {
        "NUMBA_CPU_NAME": "generic",
        "NUMBA_CPU_FEATURES": "",
        "NUMBA_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": str(Path(__file__).parent),
    }
    script = "import test_merging_golden as golden; print(golden.digests('two, int8'))"
    command = [sys.executable, "-P", "-c", script]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=55, check=True
    )
    assert done.stdout.strip() == str(CASES["two, int8"][3:])
