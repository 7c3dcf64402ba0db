"""A round becomes a version: weights, average, outer step, and the coded publication.

The merge of a round that was just decided and the replay of one from the store are this one
function, so they cannot differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import get_args

import numpy as np

from narrows.broker.merging.average import average, token_weights
from narrows.broker.merging.outer import outer_step
from narrows.broker.merging.sums import in_order
from narrows.broker.records import Contribution, FragmentState, Policy, Round, Version
from narrows.proto.codec import RUN, DecodedChunk, decode_chunk, empty_f32, encode_push, encode_step
from narrows.proto.errors import LocalProtocolError
from narrows.proto.layout import Fragment, build_table
from narrows.proto.messages import CodecName, LayoutEntry


def merge(
    fragment: Fragment,
    before: FragmentState,
    round_: Round,
    decoded: Sequence[Sequence[DecodedChunk]] | None = None,
) -> Version:
    """Merges the contributions of a round and makes the fragment's next version.

    Pure and re-entrant: it reads `before`, and changes nothing. `decoded` are the chunks of the
    contributions, in their order, if the caller holds them; else their payloads are decoded. Both
    are as compact as codes are, and become floats a slice at a time.

    Raises FloatingPointError, which names the longest push, if a parameter or the publication
    would not be finite.
    """
    contributions, policy = round_.contributions, round_.policy
    orders = [each.order for each in contributions]
    assert orders and all(a < b for a, b in pairwise(orders)), orders
    assert fragment.index == round_.fragment == before.fragment, (fragment.index, round_.fragment)
    assert round_.version == before.version + 1, (before.version, round_.version)
    if decoded is None:
        decoded = [
            [
                decode_chunk(fragment, push.codec, push.chunk_elements, index, payload)
                for index, payload in enumerate(push.chunks)
            ]
            for push in contributions
        ]
    vectors = list(zip((each.chunk_elements for each in contributions), decoded, strict=True))
    weights = token_weights([(each.tokens, each.steps) for each in contributions], policy.weights)
    values, gains, piece_norms = average(fragment, vectors, weights, policy.rule)
    norms = tuple(np.sqrt(in_order(piece_norms.T**2)).tolist())
    try:
        params, momentum = outer_step(fragment, before, values, gains, policy)
        # Their memory serves as the next published copy: both are as large as the fragment.
        del values
        advanced = empty_f32(fragment.elements)
        # What the code drops stays in global - published, and so in the next publication. Step and
        # code are two passes: chunk by chunk in one they took longer, whatever the chunk.
        publication = tuple(
            encode_step(
                fragment,
                params,
                before.published,
                codec=policy.codec,
                rho=policy.rho,
                chunk_elements=policy.chunk_elements,
                advanced=advanced,
            )
        )
    except (FloatingPointError, LocalProtocolError) as error:
        norm, longest = max(zip(norms, contributions, strict=True), key=lambda pair: pair[0])
        raise FloatingPointError(
            f"version {round_.version} of fragment {fragment.index} would not be finite ({error}). "
            f"The longest push is number {longest.push_id} of {longest.learner}, of norm "
            f"{norm:.3g}: look at that learner's loss. The fragment stays at the version before"
        ) from error
    state = FragmentState.of(fragment.index, round_.version, params, momentum, advanced)
    return Version(round_, state, weights, publication, norms)


def warm_up() -> None:
    """Compiles the kernels of a merge, or loads them from numba's cache, before one has to wait."""
    entry = LayoutEntry("warm up", (3,), "float32", "rda")
    (fragment,) = build_table([entry], 1)
    ones = np.ones(3, np.float32)
    state = FragmentState.of(0, 0, ones, ones, ones)
    for codec in get_args(CodecName):
        chunks = encode_push(fragment, ones, ones * 2, codec=codec, rho=0.5, chunk_elements=RUN)
        payloads = tuple(chunk.payload for chunk in chunks)
        pushes = tuple(
            Contribution(name, name, 1, 0, 1, 1, codec, RUN, payloads) for name in ("a", "b")
        )
        policy = Policy(codec=codec, chunk_elements=RUN)
        merge(fragment, state, Round(0, 1, pushes, policy))
