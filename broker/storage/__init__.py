"""What the broker keeps on disk: journal, checkpoints, and the way back from them."""

from narrows.broker.storage.audit import Audit
from narrows.broker.storage.checkpoint import (
    CheckpointContent,
    StateDir,
    export_tensors,
    read_manifest,
)
from narrows.broker.storage.disk import DirectoryFiles
from narrows.broker.storage.history import (
    GAP,
    Changes,
    MergedAgain,
    check_whole,
    config_of,
    first_record,
    merge_again,
    model_digest,
    needed_journal,
    opened_run,
)
from narrows.broker.storage.initial import check_initial, read_initial
from narrows.broker.storage.journal import Journal
from narrows.broker.storage.manifest import MergedPush
from narrows.broker.storage.records import FateRecord, Head, LifeRecord, Mode, RoundRecord
from narrows.broker.storage.recovery import begin_epoch
from narrows.broker.storage.replay import History, read_records, recover
from narrows.broker.storage.writer import Chunk, Commits

__all__ = [
    "GAP",
    "Audit",
    "Changes",
    "CheckpointContent",
    "Chunk",
    "Commits",
    "DirectoryFiles",
    "FateRecord",
    "Head",
    "History",
    "Journal",
    "LifeRecord",
    "MergedAgain",
    "MergedPush",
    "Mode",
    "RoundRecord",
    "StateDir",
    "begin_epoch",
    "check_initial",
    "check_whole",
    "config_of",
    "export_tensors",
    "first_record",
    "merge_again",
    "model_digest",
    "needed_journal",
    "opened_run",
    "read_initial",
    "read_manifest",
    "read_records",
    "recover",
]
