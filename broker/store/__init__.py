"""The durable part of a run: facts in SQLite, payload bytes in packs, whole states in files.

Store(folder, ...)     the broker's: recover, seed, commit, snapshot, end, published_digest
Recovered, FragmentRecord.replay(fragment) -> Version...     what a life begins with
DiskFull               an OSError: nothing has changed, try again later
History(folder)        read only: rounds, states, merged_otherwise, audit, rollback
read_initial, export_model     safetensors files of users
"""

from narrows.broker.store.history import History, Recovered, RoundRow
from narrows.broker.store.packs import DiskFull
from narrows.broker.store.store import Store
from narrows.broker.store.tensors import export_model, read_initial

__all__ = ["DiskFull", "History", "Recovered", "RoundRow", "Store", "export_model", "read_initial"]
