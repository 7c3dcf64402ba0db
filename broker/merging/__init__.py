"""The arithmetic of a round: contributions in, the next version of a fragment out. [pure]

`GlobalModel` holds the parameters, the momentum and the published copies. `GlobalModel.merge` takes
decoded contributions and a `Policy`, and makes an `Outcome`; `install` makes it the current state.
The names below are all that other districts may import:

- `broker/process` merges on its workers and serves `EncodedVersion`s;
- `broker/storage` makes the same versions again from its records, by the policy of each record;
- `broker/syncer` knows a `Contribution` by its handles alone and never sees an array;
- `bench` measures the parts (`merge_vectors`, `outer_optimizer`) and derives variants.

The bits of a merge are promised: see merge.py before changing the order of any sum.
"""

from narrows.broker.merging.contribution import Contribution
from narrows.broker.merging.evidence import PushEvidence
from narrows.broker.merging.history import (
    ROWS_MAX,
    NormHistory,
    Process,
    RoundNorms,
)
from narrows.broker.merging.merge import MergeResult, merge_vectors
from narrows.broker.merging.model import (
    EncodedVersion,
    FragmentState,
    GlobalModel,
    Outcome,
    encode_state,
    from_chunks,
    remembered,
    version_zero,
    warm_up,
)
from narrows.broker.merging.outer import outer_optimizer
from narrows.broker.merging.policy import Policy, policy_of
from narrows.broker.merging.sums import DecodedVector, weighted_sums
from narrows.broker.merging.watch import UNWATCHED, Watch

__all__ = [
    "ROWS_MAX",
    "UNWATCHED",
    "Contribution",
    "DecodedVector",
    "EncodedVersion",
    "FragmentState",
    "GlobalModel",
    "MergeResult",
    "NormHistory",
    "Outcome",
    "Policy",
    "Process",
    "PushEvidence",
    "RoundNorms",
    "Watch",
    "encode_state",
    "from_chunks",
    "merge_vectors",
    "outer_optimizer",
    "policy_of",
    "remembered",
    "version_zero",
    "warm_up",
    "weighted_sums",
]
