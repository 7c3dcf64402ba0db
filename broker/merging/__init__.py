"""The arithmetic of a round: contributions in, the next version of a fragment out. [pure]"""

from narrows.broker.merging.contribution import Contribution
from narrows.broker.merging.merge import DecodedVector, MergeResult, merge_vectors, weighted_sums
from narrows.broker.merging.model import (
    EncodedVersion,
    FragmentState,
    GlobalModel,
    Outcome,
    encode_state,
    from_chunks,
    version_zero,
    warm_up,
)
from narrows.broker.merging.outer import outer_optimizer
from narrows.broker.merging.policy import Policy

__all__ = [
    "Contribution",
    "DecodedVector",
    "EncodedVersion",
    "FragmentState",
    "GlobalModel",
    "MergeResult",
    "Outcome",
    "Policy",
    "encode_state",
    "from_chunks",
    "merge_vectors",
    "outer_optimizer",
    "version_zero",
    "warm_up",
    "weighted_sums",
]
