"""Proposals from elsewhere, and attacks: variants that only the bench has.

A variant changes one thing of the broker's GlobalModel, the coding of steps in both directions, or
the snapshot of one learner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from random import Random
from typing import Final

import numpy as np

from narrows.bench.codec.codings import CODINGS, OF_PUSHES, Coding
from narrows.bench.sim.trained import ModelMaker, Poison
from narrows.broker.config import BrokerConfig
from narrows.broker.merging import (
    DecodedVector,
    EncodedVersion,
    FragmentState,
    GlobalModel,
    MergeResult,
    Outcome,
    Policy,
    outer_optimizer,
)
from narrows.proto.codec import F32, EncodedChunk, digest_of, values_of
from narrows.proto.fragments import Fragment


class _Variant(GlobalModel):
    """A GlobalModel that has the run's length in versions, for rules that change with time."""

    versions = 1


class MomentumWarmUp(_Variant):
    """The outer momentum rises linearly over the first fifth of the run."""

    def outer_step(
        self, fragment: Fragment, before: FragmentState, outer_grad: F32, policy: Policy
    ) -> tuple[F32, F32]:
        outer = self.config.outer
        share = min(1.0, (before.version + 1) / (0.2 * self.versions))
        optimizer = outer_optimizer(outer.optimizer, lr=outer.lr, momentum=outer.momentum * share)
        return optimizer.step(before.global_, before.momentum, outer_grad)


class MomentumRestart(_Variant):
    """The outer momentum is forgotten four times in the run (arXiv 2605.28585)."""

    def outer_step(
        self, fragment: Fragment, before: FragmentState, outer_grad: F32, policy: Policy
    ) -> tuple[F32, F32]:
        if before.version and before.version % max(1, self.versions // 5) == 0:
            before = replace(before, momentum=np.zeros_like(before.momentum))
        return super().outer_step(fragment, before, outer_grad, policy)


class OuterDecay(_Variant):
    """The outer learning rate falls linearly to a third of itself."""

    def outer_step(
        self, fragment: Fragment, before: FragmentState, outer_grad: F32, policy: Policy
    ) -> tuple[F32, F32]:
        outer = self.config.outer
        share = 1.0 - (2 / 3) * min(1.0, before.version / self.versions)
        optimizer = outer_optimizer(outer.optimizer, lr=outer.lr * share, momentum=outer.momentum)
        return optimizer.step(before.global_, before.momentum, outer_grad)


class DelayedNesterov(_Variant):
    """Every merge steps by 1 / M of its outer gradient; the momentum of M merges is added to the
    last of them, M learners (arXiv 2401.09135, algorithm 3 with c = 0, where a merge is one push).
    """

    def __init__(
        self, config: BrokerConfig, table: Sequence[Fragment], states: Sequence[FragmentState]
    ) -> None:
        super().__init__(config, table, states)
        self._sums = [np.zeros_like(state.global_) for state in states]

    def outer_step(
        self, fragment: Fragment, before: FragmentState, outer_grad: F32, policy: Policy
    ) -> tuple[F32, F32]:
        learners = np.float32(self.config.run.learners_at_start)
        lr, beta = np.float32(self.config.outer.lr), np.float32(self.config.outer.momentum)
        step, momentum = outer_grad / learners, before.momentum
        total = self._sums[fragment.index]
        total += outer_grad
        if (before.version + 1) % int(learners) == 0:
            momentum = (beta * momentum + total / learners).astype(np.float32, copy=False)
            step += beta * momentum
            total[:] = 0.0
        params: F32 = (before.global_ - lr * step).astype(np.float32, copy=False)
        return params, momentum


class Heloco(_Variant):
    """Per piece, the fragment of the outer gradient that opposes the momentum is halved
    (HeLoCo, arXiv 2606.00271, the rule for negative cosines)."""

    def outer_step(
        self, fragment: Fragment, before: FragmentState, outer_grad: F32, policy: Policy
    ) -> tuple[F32, F32]:
        corrected = outer_grad.copy()
        for piece in fragment.pieces:
            where = slice(piece.offset, piece.offset + piece.count)
            momentum, own = before.momentum[where], corrected[where]
            dot, squares = float(own @ momentum), float(momentum @ momentum)
            if dot < 0 < squares:
                corrected[where] = own - 0.5 * dot / squares * momentum
        return super().outer_step(fragment, before, corrected, policy)


class Median(_Variant):
    """Coordinate-wise median of the contributions."""

    def merged(
        self,
        fragment: Fragment,
        contributions: Sequence[DecodedVector],
        weights: Sequence[float],
        policy: Policy,
    ) -> MergeResult:
        values = np.stack([values_of(fragment, each.chunks) for each in contributions])
        empty = np.zeros((len(fragment.pieces), len(contributions)))
        return MergeResult(np.median(values, axis=0).astype(np.float32), 0, empty)


class TrimmedMean(_Variant):
    """Coordinate-wise mean without the largest and the smallest value, from three on."""

    def merged(
        self,
        fragment: Fragment,
        contributions: Sequence[DecodedVector],
        weights: Sequence[float],
        policy: Policy,
    ) -> MergeResult:
        values = np.sort(
            np.stack([values_of(fragment, each.chunks) for each in contributions]), axis=0
        )
        kept = values[1:-1] if len(values) > 2 else values
        empty = np.zeros((len(fragment.pieces), len(contributions)))
        return MergeResult(kept.mean(axis=0, dtype=np.float32), 0, empty)


class Coded(_Variant):
    """Publications with another coding. The part that it drops stays in global - published copy."""

    coding: Coding

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
        copy = self.fragments[fragment.index].published
        sent, size = self.coding(fragment, params - copy)
        advanced = copy + sent
        digests = digest_of(params), digest_of(momentum), digest_of(advanced)
        # Nobody decodes it: the simulated learners take the copy from the shelf.
        chunk = EncodedChunk(0, fragment.elements, bytes(size), 0)
        publication = EncodedVersion(version, digests[2], "raw32", 0.0, (chunk,))
        after = FragmentState(version, digests[2], params, momentum, advanced)
        index = fragment.index
        return Outcome(index, after, digests, publication, 0.0, merged, weights, policy)


VARIANTS: Final[dict[str, type[_Variant]]] = {
    "": _Variant,
    "momentum warm-up": MomentumWarmUp,
    "momentum restart": MomentumRestart,
    "outer decay": OuterDecay,
    "delayed nesterov": DelayedNesterov,
    "heloco": Heloco,
    "median": Median,
    "trimmed mean": TrimmedMean,
    **dict.fromkeys(CODINGS, Coded),
    **dict.fromkeys(OF_PUSHES, _Variant),
}


def model_maker(variant: str, versions: int) -> ModelMaker:
    """Makes the global model of a variant for a run of so many versions per fragment."""

    def make(
        config: BrokerConfig, table: Sequence[Fragment], states: Sequence[FragmentState]
    ) -> GlobalModel:
        model = VARIANTS[variant](config, table, states)
        model.versions = max(1, versions)
        if isinstance(model, Coded):
            model.coding = CODINGS[variant]
        return model

    return make


def _noise(base: F32, local: F32, random: Random) -> F32:
    """Noise as long as the honest outer gradient, in a random direction."""
    rng = np.random.default_rng(random.getrandbits(64))
    drawn = rng.standard_normal(base.size).astype(np.float32)
    length = float(np.linalg.norm(base - local)) / max(float(np.linalg.norm(drawn)), 1e-30)
    poisoned: F32 = (base - length * drawn).astype(np.float32)
    return poisoned


def _scaled(factor: float, base: F32, local: F32, random: Random) -> F32:
    poisoned: F32 = (base - factor * (base - local)).astype(np.float32)
    return poisoned


POISONS: Final[dict[str, Poison]] = {
    "noise": _noise,
    "sign-flipped": partial(_scaled, -1.0),
    "100x": partial(_scaled, 100.0),
    "-100x": partial(_scaled, -100.0),
}
