"""The syncer decides: who takes part, which round is open, when it is merged. [pure]

`Syncer` is the state machine of the broker. It takes events (`events`) with the time, and returns
effects for a shell to perform; it owns no socket, clock, thread or tensor. The names below are all
that other districts may import:

- `broker/process` and `bench/sim` drive a `Syncer`, perform its effects and show `status_of` it;
- `broker/storage` starts one (`Resumed`) and reads its `RunState` for records;
- nothing in here imports them back. `events` comes as a module, to be used as `ev.Merged` etc.

Other districts read the state and never write it: they send an event instead.
"""

from narrows.broker.syncer import events
from narrows.broker.syncer.data_path import Deaf
from narrows.broker.syncer.events import Publish, StartMerge
from narrows.broker.syncer.founding import check_founder
from narrows.broker.syncer.machine import Resumed, Syncer
from narrows.broker.syncer.phases import RunPhase, Turn
from narrows.broker.syncer.quotas import Excess, Quotas
from narrows.broker.syncer.repeats import Repeats, with_count
from narrows.broker.syncer.run import MergedPushes, RunState, refusal
from narrows.broker.syncer.run_secret import SECRET_BYTES, RunSecret
from narrows.broker.syncer.status import status_for, status_of

__all__ = [
    "SECRET_BYTES",
    "Deaf",
    "Excess",
    "MergedPushes",
    "Publish",
    "Quotas",
    "Repeats",
    "Resumed",
    "RunPhase",
    "RunSecret",
    "RunState",
    "StartMerge",
    "Syncer",
    "Turn",
    "check_founder",
    "events",
    "refusal",
    "status_for",
    "status_of",
    "with_count",
]
