"""The durable part of a run: facts in SQLite, payload bytes in packs, whole states in files.

Store(folder, ...)     the broker's: recover, seed, commit, snapshot, end, published_digest
DiskFull               an OSError: nothing has changed, try again later
History(folder)        read only: rounds, replay, states, audit, rollback
read_initial, export_model     safetensors files of users
"""

from narrows.broker.records import Recovered
from narrows.broker.store.files import DiskFull, export_model, read_initial
from narrows.broker.store.history import CurvePoint, History, RoundRow
from narrows.broker.store.store import Store

__all__ = [
    "CurvePoint",
    "DiskFull",
    "History",
    "Recovered",
    "RoundRow",
    "Store",
    "export_model",
    "read_initial",
]
