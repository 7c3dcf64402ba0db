"""A run's rounds without the contributions of some learners."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import msgspec

from narrows.broker.storage.manifest import CheckpointContent
from narrows.broker.storage.records import RoundRecord
from narrows.proto.errors import ConfigError

NAMES_SHOWN_MAX = 20
"""Names that an error lists."""

Payloads: TypeAlias = list[tuple[int, int, bytes]]
"""Offset, elements and payload of a vector's chunks."""


def left_out(
    contributions: Mapping[str, int], without: Sequence[str], oldest: CheckpointContent
) -> dict[str, int]:
    """How many contributions were left out. Raises ConfigError for a name that has none."""
    begins_at = sum(state.version for state in oldest.fragments)
    for name in without:
        if not contributions.get(name):
            known = ", ".join(sorted(contributions)[:NAMES_SHOWN_MAX]) or "nobody"
            older = f" Contributions up to version {begins_at}, the oldest checkpoint, stay in it"
            raise ConfigError(
                f"--without {name}: no contribution of that learner is in the journal",
                expected=f"one of {known}", got=name,
                remedy="`narrows journal show` prints the names." + (older if begins_at else ""),
            )  # fmt: skip
    return {name: contributions[name] for name in without}


def left_over(
    head: RoundRecord, vectors: list[Payloads], without: Sequence[str]
) -> tuple[RoundRecord, list[Payloads]]:
    """A round and its payloads without the contributions of some learners.

    The others' weights keep their proportions and sum to 1.
    """
    kept = [i for i, who in enumerate(head.contributors) if who.learner not in without]
    if len(kept) == len(head.contributors):
        return head, vectors
    total = math.fsum(head.contributors[i].weight for i in kept)
    weights = [head.contributors[i].weight / total if total else 1 / len(kept) for i in kept]
    contributors = tuple(
        msgspec.structs.replace(head.contributors[i], weight=weight)
        for i, weight in zip(kept, weights, strict=True)
    )
    contributions = tuple(head.contributions[i] for i in kept)
    changed = msgspec.structs.replace(head, contributors=contributors, contributions=contributions)
    return changed, [vectors[0], *(vectors[1 + i] for i in kept)]
