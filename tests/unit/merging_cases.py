"""Rounds for tests of merging: fragments, pushes, and values that no library draws."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from narrows.broker.records import Contribution, FragmentState, Policy, Round
from narrows.proto.codec import F32, DecodedChunk, decode_chunk, encode_push, values_of
from narrows.proto.layout import Fragment, build_table
from narrows.proto.messages import CodecName, LayoutEntry, MergeRule


def one_fragment(*pieces: tuple[int, MergeRule]) -> Fragment:
    """A fragment with pieces of these sizes and merge rules."""
    layout = [LayoutEntry(f"t{i}", (n,), "float32", rule) for i, (n, rule) in enumerate(pieces)]
    (fragment,) = build_table(layout, 1)
    return fragment


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


def awkward(elements: int, seed: int) -> F32:
    """Values (elements,) of many magnitudes, from integers alone."""
    index = np.arange(elements, dtype=np.int64) + 7919 * seed
    whole = (index * 2_654_435_761 % (1 << 24) - (1 << 23)).astype(np.float32)
    values: F32 = whole * np.float32(2.0**-20) * np.exp2((index % 13 - 6).astype(np.float32))
    return values
