"""The global model in memory: parameters, momentum, published copies, recent publications."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from narrows.broker.config import BrokerConfig, settings
from narrows.broker.merging import merge as merge_module
from narrows.broker.merging import outer
from narrows.broker.merging.contribution import Contribution
from narrows.broker.merging.merge import DecodedVector, MergeResult, merge_vectors, token_weights
from narrows.broker.merging.outer import outer_optimizer
from narrows.broker.merging.policy import policy_of
from narrows.proto.codec import (
    F32,
    STATE_CODEC,
    DecodedChunk,
    EncodedChunk,
    all_finite,
    codecs,
    digest_of,
    empty_f32,
    encode_fragment,
    encode_step,
    error_ratio,
    make_bit_control,
    round_to_dtype,
    values_of,
)
from narrows.proto.flow import chunk_elements
from narrows.proto.fragments import Fragment
from narrows.proto.limits import PUBLICATIONS_KEPT
from narrows.proto.messages import RunSettings

Handles: TypeAlias = Mapping[int, tuple[int, DecodedChunk]]
"""Decoded chunks with their offsets, by handle."""


@dataclass(frozen=True, eq=False)
class FragmentState:
    """One fragment at one version; the arrays are float32 (n,) and never written to again."""

    version: int
    digest: int
    """xxh3_64 of `published`."""
    global_: F32
    """The model that users evaluate and export."""
    momentum: F32
    published: F32
    """The copy that every learner holds."""


@dataclass(frozen=True)
class EncodedVersion:
    """`version` of a fragment as it travels: the step from the version before (a publication), or
    the whole published copy (a state)."""

    version: int
    digest: int
    codec: str
    rho: float
    chunks: tuple[EncodedChunk, ...]

    @property
    def bits_per_param(self) -> float:
        """On the wire, headers left out."""
        elements = sum(chunk.count for chunk in self.chunks)
        return 8 * sum(len(chunk.payload) for chunk in self.chunks) / elements


@dataclass(frozen=True)
class Outcome:
    """What a merge made; nothing is changed until it is installed."""

    fragment: int
    state: FragmentState
    digests: tuple[int, int, int]
    """xxh3_64 of the state's `global`, `momentum` and `published`: a worker makes them, because a
    fragment of many GB takes longer than the loop's thread may stand still."""
    publication: EncodedVersion
    error_ratio: float
    """See transfer.error_ratio; 0 unless the codec follows a rate."""
    merged: MergeResult
    weights: tuple[float, ...]
    """Of the contributions, in learner-name order."""


class GlobalModel:
    """The only authoritative parameters. Arrays are replaced, never changed in place: a
    checkpoint or a transfer may hold the old ones while the next version is made."""

    def __init__(
        self,
        config: BrokerConfig,
        table: Sequence[Fragment],
        fragments: Sequence[FragmentState],
    ) -> None:
        self.table = tuple(table)
        self.fragments = list(fragments)
        self.policy = policy_of(config)
        self.configure(config)
        self._publications: list[dict[int, EncodedVersion]] = [{} for _ in self.table]

    def configure(self, config: BrokerConfig) -> None:
        """Takes the codec of publications from a configuration; the policy stays."""
        self.config, codec = config, config.codec
        self.told = settings(config)
        self._rates = [
            make_bit_control(codec.publish, rho=codec.publish_rho, bits=codec.publish_bits)
            for _ in self.table
        ]

    def tell(self, told: RunSettings) -> None:
        """Takes the settings that follow the budget: sizes of messages, bits of codec auto."""
        self.told = told
        for rate in self._rates:
            rate.aim(told.publish_bits)

    def forget_publications(self) -> None:
        """After a replay: learners that were there fetch states."""
        self._publications = [{} for _ in self.table]

    def set_rate(self, fragment: int, codec: str, rho: float) -> None:
        """Lets the rate control of a fragment go on from where it was."""
        self._rates[fragment].resume(codec, rho)

    def publication(self, fragment: int, version: int) -> EncodedVersion | None:
        """A publication that is still kept."""
        return self._publications[fragment].get(version)

    def newest_version(self, fragment: int) -> int:
        """Version of the published copy."""
        return self.fragments[fragment].version

    def merge(
        self, fragment: int, version: int, contributed: Sequence[Contribution], chunks: Handles
    ) -> Outcome:
        """Merges contributions (in learner-name order) and makes the next version.

        Runs on a worker thread; reads the current state and changes nothing.
        Raises FloatingPointError if a parameter would not be finite.
        """
        part = self.table[fragment]
        contributions = [
            DecodedVector(done.learner, [chunks[handle] for handle in done.handles])
            for done in contributed
        ]
        weights = token_weights(
            [(done.tokens, done.steps) for done in contributed],
            rule=self.policy.weights,
            share_max=self.policy.share_max,
        )
        merged = self.merged(part, contributions, weights)
        params, momentum = self.step(part, merged.outer_grad)
        return self.published(part, version, params, momentum, merged, tuple(weights))

    def merged(
        self, part: Fragment, contributions: Sequence[DecodedVector], weights: Sequence[float]
    ) -> MergeResult:
        """The outer gradient out of contributions, as the policy wants it."""
        policy = self.policy
        merged = merge_vectors(
            part, contributions, weights, clip_ratio=policy.clip_ratio, rule=policy.merge_rule
        )
        if policy.is_rounded:
            round_to_dtype(merged.outer_grad, "bfloat16", merged.outer_grad)
        return merged

    def step(self, part: Fragment, outer_grad: F32) -> tuple[F32, F32]:
        """New parameters and momentum of a fragment. Raises FloatingPointError unless finite."""
        params, momentum = self.outer_step(part, self.fragments[part.index], outer_grad)
        if not (all_finite(params) and all_finite(momentum)):
            raise FloatingPointError("the outer step would make a parameter infinite or NaN")
        return params, momentum

    def outer_step(self, part: Fragment, state: FragmentState, outer_grad: F32) -> tuple[F32, F32]:
        """The outer optimizer's step from `state`."""
        policy = self.policy
        optimizer = outer_optimizer(policy.optimizer, lr=policy.outer_lr, momentum=policy.momentum)
        return optimizer.step(state.global_, state.momentum, outer_grad)

    def published(
        self,
        part: Fragment,
        version: int,
        params: F32,
        momentum: F32,
        merged: MergeResult,
        weights: tuple[float, ...],
    ) -> Outcome:
        """Codes global - published copy; what the code drops stays in that difference. Changes
        nothing yet."""
        published = self.fragments[part.index].published
        advanced, rate = empty_f32(part.elements), self._rates[part.index]
        chunks = tuple(
            encode_step(
                part,
                params,
                published,
                codec_name=rate.codec,
                rho=rate.rho,
                chunk_elements=chunk_elements(self.told, rate.codec),
                advanced=advanced,
            )
        )
        ratio = 0.0
        if rate.target_bits is not None:
            ratio = error_ratio(part, chunks, lambda at: params[at] - advanced[at])
        digests = digest_of(params), digest_of(momentum), digest_of(advanced)
        after = FragmentState(version, digests[2], params, momentum, advanced)
        publication = EncodedVersion(version, digests[2], rate.codec, rate.rho, chunks)
        return Outcome(part.index, after, digests, publication, ratio, merged, weights)

    def install(self, outcome: Outcome) -> None:
        """Makes an outcome the current state."""
        assert outcome.state.version == self.fragments[outcome.fragment].version + 1
        self.fragments[outcome.fragment] = outcome.state
        rate = self._rates[outcome.fragment]
        rate.observe(outcome.publication.bits_per_param, outcome.error_ratio)
        kept = self._publications[outcome.fragment]
        kept[outcome.publication.version] = outcome.publication
        kept.pop(outcome.publication.version - PUBLICATIONS_KEPT, None)


def warm_up() -> None:
    """Compiles every kernel that a broker needs, or loads them from numba's cache."""
    for each in (codecs.warm_up, merge_module.warm_up, outer.warm_up):
        each()


def encode_state(part: Fragment, state: FragmentState, chunk_elements: int) -> EncodedVersion:
    """The published copy of a fragment, without loss."""
    chunks = encode_fragment(
        part,
        state.published,
        codec_name=STATE_CODEC,
        rho=1.0,
        chunk_elements=chunk_elements,
        reconstructed=empty_f32(part.elements),
    )
    return EncodedVersion(state.version, state.digest, STATE_CODEC, 0.0, tuple(chunks))


def version_zero(values: F32) -> FragmentState:
    """A fragment before its first outer step: nothing published differs from it."""
    return FragmentState(0, digest_of(values), values, np.zeros_like(values), values)


def from_chunks(
    table: Sequence[Fragment], handles: Sequence[Sequence[int]], chunks: Handles
) -> list[FragmentState]:
    """Version 0 from the founder's chunks."""
    return [
        version_zero(values_of(part, [chunks[handle] for handle in part_handles]))
        for part, part_handles in zip(table, handles, strict=True)
    ]
