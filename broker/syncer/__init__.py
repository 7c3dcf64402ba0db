"""The syncer decides: who takes part, which round is open, when it is merged. [pure]"""

from narrows.broker.syncer import events
from narrows.broker.syncer.data_path import Deaf
from narrows.broker.syncer.events import Publish, StartMerge
from narrows.broker.syncer.machine import Resumed, Syncer
from narrows.broker.syncer.run import MergedPushes, RunState, refusal
from narrows.broker.syncer.status import status_of

__all__ = [
    "Deaf",
    "MergedPushes",
    "Publish",
    "Resumed",
    "RunState",
    "StartMerge",
    "Syncer",
    "events",
    "refusal",
    "status_of",
]
