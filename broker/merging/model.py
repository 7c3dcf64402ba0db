"""The global model in memory: parameters, momentum, published copies, recent publications. [pure]

A version is made in two steps: `merge` computes an Outcome on a worker and changes nothing, and
`install` makes it the current state once it is durable.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from narrows.broker.config import BrokerConfig
from narrows.broker.merging import merge as merge_module
from narrows.broker.merging import outer
from narrows.broker.merging.contribution import Contribution
from narrows.broker.merging.history import EMPTY, NormHistory, Process
from narrows.broker.merging.merge import MergeResult, merge_vectors
from narrows.broker.merging.outer import outer_optimizer
from narrows.broker.merging.policy import Policy
from narrows.broker.merging.sums import DecodedVector
from narrows.broker.merging.watch import UNWATCHED, Watch
from narrows.broker.merging.weights import token_weights
from narrows.broker.shared_settings import settings
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
    history: NormHistory = EMPTY
    """The norms that its newest rounds applied."""

    def __post_init__(self) -> None:
        assert self.version >= 0
        assert self.global_.shape == self.momentum.shape == self.published.shape


@dataclass(frozen=True)
class EncodedVersion:
    """A version of a fragment as it travels.

    A publication is the step from the version before; a state is the whole published copy.
    """

    version: int
    digest: int
    codec: str
    rho: float
    chunks: tuple[EncodedChunk, ...]

    @property
    def bits_per_param(self) -> float:
        """Bits on the wire, without headers, per parameter."""
        elements = sum(chunk.count for chunk in self.chunks)
        assert elements > 0
        return 8 * sum(len(chunk.payload) for chunk in self.chunks) / elements


@dataclass(frozen=True)
class Outcome:
    """The next version of a fragment; nothing is changed until it is installed."""

    fragment: int
    state: FragmentState
    digests: tuple[int, int, int]
    """xxh3_64 of the state's `global`, `momentum` and `published`. A worker makes them, because a
    fragment of many GB takes longer than the loop's thread may stand still."""
    publication: EncodedVersion
    error_ratio: float
    """See transfer.error_ratio; 0 unless the codec follows a rate."""
    merged: MergeResult
    weights: tuple[float, ...]
    """Weight of each contribution, in learner-name order."""
    policy: Policy
    """Rules by which it was made."""


class GlobalModel:
    """The only authoritative parameters. Arrays are replaced, never changed in place: a
    checkpoint or a transfer may hold the old ones while the next version is made."""

    def __init__(
        self,
        config: BrokerConfig,
        table: Sequence[Fragment],
        fragments: Sequence[FragmentState],
        watch: Watch = UNWATCHED,
    ) -> None:
        self.table = tuple(table)
        self.fragments = list(fragments)
        self.watch = watch
        """Judges the learners by the rounds that were installed."""
        sizes = [state.published.size for state in self.fragments]
        assert sizes == [fragment.elements for fragment in self.table]
        self.configure(config)
        self._publications: list[dict[int, EncodedVersion]] = [{} for _ in self.table]

    def configure(self, config: BrokerConfig) -> None:
        """Takes the codec of publications from a configuration."""
        self.config, codec = config, config.codec
        self.settings = settings(config)
        self._rates = [
            make_bit_control(codec.publish, rho=codec.publish_rho, bits=codec.publish_bits)
            for _ in self.table
        ]

    def follow(self, settings: RunSettings) -> None:
        """Takes the settings that follow the budget: sizes of messages, bits of codec auto."""
        self.settings = settings
        for rate in self._rates:
            rate.aim(settings.publish_bits)

    def forget_publications(self) -> None:
        """Drops the publications that a replay made: learners that were there fetch states."""
        self._publications = [{} for _ in self.table]

    def set_rate(self, fragment: int, codec: str, rho: float) -> None:
        """Lets the bit control of a fragment go on from where it was."""
        assert rho > 0.0
        self._rates[fragment].resume(codec, rho)

    def publication(self, fragment: int, version: int) -> EncodedVersion | None:
        """Returns a publication, or None if it is not kept any more."""
        kept = self._publications[fragment].get(version)
        assert kept is None or kept.version == version
        return kept

    def newest_version(self, fragment: int) -> int:
        """Version of the published copy."""
        return self.fragments[fragment].version

    def merge(
        self,
        index: int,
        version: int,
        contributed: Sequence[Contribution],
        chunks: Handles,
        policy: Policy,
    ) -> Outcome:
        """Merges contributions (in learner-name order) to a fragment and makes its next version.

        Runs on a worker thread; reads the current state and changes nothing.
        Raises FloatingPointError if a parameter would not be finite.
        """
        assert [each.learner for each in contributed] == sorted({c.learner for c in contributed})
        fragment = self.table[index]
        contributions = [
            DecodedVector(each.learner, [chunks[handle] for handle in each.handles])
            for each in contributed
        ]
        weights = token_weights(
            [(each.weighing, each.steps) for each in contributed],
            rule=policy.weights,
            share_max=policy.share_max,
        )
        merged = self.merged(fragment, contributions, weights, policy)
        params, momentum = self.step(fragment, merged.outer_grad, policy)
        outcome = self.published(
            fragment, version, params, momentum, merged, tuple(weights), policy
        )
        processes = [(each.learner, each.incarnation) for each in contributed]
        state = remembered(self.fragments[index], outcome.state, processes, merged)
        return replace(outcome, state=state)

    def merged(
        self,
        fragment: Fragment,
        contributions: Sequence[DecodedVector],
        weights: Sequence[float],
        policy: Policy,
    ) -> MergeResult:
        """Merged outer gradient of contributions."""
        before = self.fragments[fragment.index]
        # The outer momentum is the sum of the last aggregates; so much of it is their mean.
        share = np.float32(1.0 - policy.momentum)
        merged = merge_vectors(
            fragment, contributions, weights,
            clip_ratio=policy.clip_ratio, rule=policy.merge_rule, norm_limit=policy.norm_limit,
            robust=policy.robust, history=before.history,
            center=before.momentum * share if policy.robust == "centered" else None,
        )  # fmt: skip
        # The journal keeps the rounded gradient alone; a replay must step from the same bits.
        if policy.is_rounded:
            round_to_dtype(merged.outer_grad, "bfloat16", merged.outer_grad)
        return merged

    def step(self, fragment: Fragment, outer_grad: F32, policy: Policy) -> tuple[F32, F32]:
        """New parameters and momentum of a fragment. Raises FloatingPointError unless finite."""
        before = self.fragments[fragment.index]
        params, momentum = self.outer_step(fragment, before, outer_grad, policy)
        assert params.size == momentum.size == fragment.elements
        # One NaN would spread to every learner with the next publication.
        if not (all_finite(params) and all_finite(momentum)):
            raise FloatingPointError("the outer step would make a parameter infinite or NaN")
        return params, momentum

    def outer_step(
        self, fragment: Fragment, before: FragmentState, outer_grad: F32, policy: Policy
    ) -> tuple[F32, F32]:
        """Takes the outer optimizer's step from `before`."""
        assert outer_grad.size == fragment.elements
        optimizer = outer_optimizer(policy.optimizer, lr=policy.outer_lr, momentum=policy.momentum)
        return optimizer.step(before.global_, before.momentum, outer_grad)

    def published(
        self,
        fragment: Fragment,
        version: int,
        params: F32,
        momentum: F32,
        merged: MergeResult,
        weights: tuple[float, ...],
        policy: Policy,
    ) -> Outcome:
        """Codes the step from the published copy to the new parameters; changes nothing yet.

        The part that the code drops stays in global - published copy, and so in the next step.
        """
        before = self.fragments[fragment.index]
        assert version == before.version + 1, "versions rise by one"
        assert abs(math.fsum(weights) - 1.0) < 1e-9
        advanced, rate = empty_f32(fragment.elements), self._rates[fragment.index]
        chunks = tuple(
            encode_step(
                fragment,
                params,
                before.published,
                codec_name=rate.codec,
                rho=rate.rho,
                chunk_elements=chunk_elements(self.settings, rate.codec),
                advanced=advanced,
            )
        )
        assert sum(chunk.count for chunk in chunks) == fragment.elements
        # Measuring the error costs a pass over the fragment, so only codec auto pays for it.
        ratio = 0.0
        if rate.target_bits is not None:
            ratio = error_ratio(fragment, chunks, lambda at: params[at] - advanced[at])
        digests = digest_of(params), digest_of(momentum), digest_of(advanced)
        after = FragmentState(version, digests[2], params, momentum, advanced)
        publication = EncodedVersion(version, digests[2], rate.codec, rate.rho, chunks)
        index = fragment.index
        return Outcome(index, after, digests, publication, ratio, merged, weights, policy)

    def install(self, outcome: Outcome) -> None:
        """Makes an outcome the current state."""
        assert outcome.state.version == self.fragments[outcome.fragment].version + 1
        assert outcome.publication.version == outcome.state.version
        assert outcome.publication.digest == outcome.state.digest == outcome.digests[2]
        # One assignment: a worker reads the old state or the new one, never a mixture.
        self.fragments[outcome.fragment] = outcome.state
        self.watch = self.watch.after(outcome.merged.evidence)
        rate = self._rates[outcome.fragment]
        rate.observe(outcome.publication.bits_per_param, outcome.error_ratio)
        # Kept for repair and for learners that missed a few; older gaps are filled with states.
        kept = self._publications[outcome.fragment]
        kept[outcome.publication.version] = outcome.publication
        kept.pop(outcome.publication.version - PUBLICATIONS_KEPT, None)
        assert len(kept) <= PUBLICATIONS_KEPT

    def stand_still(self, fragment: int, version: int) -> int:
        """Gives the state of a fragment the number of its next version, for a round in which
        nobody's contribution is left; the digest of its published copy."""
        state = self.fragments[fragment]
        assert version == state.version + 1, "versions rise by one"
        self.fragments[fragment] = replace(state, version=version)
        return state.digest


def remembered(
    before: FragmentState, after: FragmentState, processes: Sequence[Process], merged: MergeResult
) -> FragmentState:
    """The state `after` a round, whose applied norms, if it has any, join the history `before`."""
    history = before.history
    if len(merged.applied) == len(processes):
        history = history.after(after.version, processes, merged.applied)
    return replace(after, history=history)


def warm_up() -> None:
    """Compiles every kernel that a broker needs, or loads them from numba's cache."""
    for each in (codecs.warm_up, merge_module.warm_up, outer.warm_up):
        each()


def encode_state(fragment: Fragment, state: FragmentState, chunk_elements: int) -> EncodedVersion:
    """Encodes the published copy of a fragment without loss."""
    assert state.published.size == fragment.elements
    chunks = encode_fragment(
        fragment,
        state.published,
        codec_name=STATE_CODEC,
        rho=1.0,
        chunk_elements=chunk_elements,
        reconstructed=empty_f32(fragment.elements),
    )
    return EncodedVersion(state.version, state.digest, STATE_CODEC, 0.0, tuple(chunks))


def version_zero(values: F32) -> FragmentState:
    """Makes a fragment before its first outer step: the published copy is the same."""
    assert values.ndim == 1 and values.dtype == np.float32
    return FragmentState(0, digest_of(values), values, np.zeros_like(values), values)


def from_chunks(
    table: Sequence[Fragment], handles: Sequence[Sequence[int]], chunks: Handles
) -> list[FragmentState]:
    """Makes version 0 from the founder's chunks."""
    assert len(table) == len(handles)
    return [
        version_zero(values_of(fragment, [chunks[handle] for handle in own]))
        for fragment, own in zip(table, handles, strict=True)
    ]
