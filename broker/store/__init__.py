"""The durable part of a run: facts in SQLite, payload bytes in packs, whole states in files.

Store(folder, ...)     the broker's: recover, seed, commit, snapshot, end, published_digest
Recovered, FragmentRecord.replay(fragment) -> Version...     what a life begins with
DiskFull               an OSError: nothing has changed, try again later
History(folder)        read only: rounds, states, merged_otherwise, audit, rollback
read_initial, export_model     safetensors files of users
"""

from narrows.broker.store.history import Audit, History
from narrows.broker.store.packs import DiskFull
from narrows.broker.store.recover import FragmentRecord, Recovered, RoundRow, Run
from narrows.broker.store.store import Store
from narrows.broker.store.tensors import export_model, read_initial

__all__ = [
    "Audit",
    "DiskFull",
    "FragmentRecord",
    "History",
    "Recovered",
    "RoundRow",
    "Run",
    "Store",
    "export_model",
    "read_initial",
]
