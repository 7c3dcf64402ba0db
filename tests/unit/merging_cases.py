"""Codecs, fragments, pushes and rounds for several tests, and values that no library draws."""

from collections.abc import Sequence
from itertools import pairwise
from typing import get_args

import numpy as np
import xxhash

from narrows.broker.merging import merge
from narrows.broker.records import Contribution, FragmentState, Policy, Round
from narrows.proto.codec import F32, I64, DecodedChunk, decode_chunk, encode_push, values_of
from narrows.proto.layout import Fragment, build_table
from narrows.proto.messages import CodecName, LayoutEntry, MergeRule

CODECS: tuple[CodecName, ...] = get_args(CodecName)


def lane_square_sums(values: F32, bounds: I64) -> list[float]:
    """(s,) sums of value**2 of the spans in float64. Those of codes are exact, whatever the order;
    for floats element i of a span is added to lane i mod 16, and then the lanes in order."""
    sums = []
    for first, end in pairwise(bounds):
        lanes = [0.0] * 16
        for index, value in enumerate(values[first:end].tolist()):
            lanes[index % 16] += value * value
        sums.append(sum(lanes, 0.0))
    return sums


def one_fragment(*pieces: tuple[int, MergeRule]) -> Fragment:
    """A fragment with pieces of these sizes and merge rules."""
    layout = [LayoutEntry(f"t{i}", (n,), "float32", rule) for i, (n, rule) in enumerate(pieces)]
    (fragment,) = build_table(layout, 1)
    return fragment


def fragment_of(*lengths: int) -> Fragment:
    """A fragment whose pieces have these lengths."""
    return one_fragment(*((length, "rda") for length in lengths))


def state_of(fragment: Fragment, values: F32) -> FragmentState:
    """Version 0."""
    return FragmentState.of(fragment.index, 0, values, np.zeros_like(values), values)


def push_of(
    fragment: Fragment,
    learner: str,
    gradient: F32,
    *,
    codec: CodecName = "f32-blosc2",
    chunk_elements: int = 256,
    tokens: int = 100,
    steps: int = 10,
) -> Contribution:
    """A push of `gradient` (n,), which is published - local."""
    zeros = np.zeros_like(gradient)
    chunks = encode_push(
        fragment, gradient, zeros, codec=codec, rho=0.5, chunk_elements=chunk_elements
    )
    payloads = tuple(chunk.payload for chunk in chunks)
    incarnation = f"{learner}.00000001"
    return Contribution(learner, incarnation, 1, 0, tokens, steps, codec, chunk_elements, payloads)


def decoded(fragment: Fragment, push: Contribution) -> list[DecodedChunk]:
    """The chunks of a push, as a broker holds them."""
    return [
        decode_chunk(fragment, push.codec, push.chunk_elements, index, payload)
        for index, payload in enumerate(push.chunks)
    ]


def values_in(fragment: Fragment, push: Contribution) -> F32:
    """The outer gradient (n,) that a push carries, as its codec has it."""
    return values_of(fragment, decoded(fragment, push))


def round_of(pushes: Sequence[Contribution], version: int = 1, **policy: object) -> Round:
    """A round of these pushes. The publication is lossless unless `policy` says otherwise."""
    rules = {"chunk_elements": 256, "codec": "f32-blosc2"} | policy
    return Round(0, version, tuple(pushes), Policy(**rules))  # type: ignore[arg-type]


def awkward(elements: int, first: int, *, size: float = 8.0, spread: int = 13) -> F32:
    """Values (elements,) around `size`, of `spread` magnitudes, from integers alone."""
    index = np.arange(elements, dtype=np.int64) + first
    whole = (index * 2_654_435_761 % (1 << 24) - (1 << 23)).astype(np.float32)
    exponents = (index % spread - spread // 2).astype(np.float32)
    values: F32 = whole * np.float32(size * 2.0**-23) * np.exp2(exponents)
    return values


(GOLDEN,) = build_table(
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
    state = state_of(GOLDEN, awkward(GOLDEN.elements, 0))
    for number in (1, 2, 3):
        pushes = []
        for i in range(learners):
            gradient = awkward(GOLDEN.elements, 7919 * (10 * number + i))
            gradient *= longer if i == learners - 1 else 1
            work = {"tokens": 1000 + 100 * i, "steps": 10 + i}
            push = push_of(
                GOLDEN, f"l{i}", gradient, codec="int4-zstd", chunk_elements=16384, **work
            )
            pushes.append(push)
        version = merge(GOLDEN, state, round_of(pushes, number, chunk_elements=16384, **policy))
        state = version.state
        for array in (state.global_, state.momentum, state.published):
            states.update(array.tobytes())
        for chunk in version.publication:
            publications.update(chunk.payload)
    return states.hexdigest(), publications.hexdigest()
