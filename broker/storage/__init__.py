"""The broker's disk: journal, checkpoints, and recovery from them.

`StateDir` is a run's directory with its lock, epoch and checkpoints. `Journal` makes numbered
records durable; `Commits` writes rounds to it from a thread of its own. `begin_epoch` recovers all
of that for a start of the broker. `recover`, `merge_again` and `Audit` read a history for
`narrows journal`, `narrows export` and the benches. Others import the names below; files, formats
and system calls stay in here. Whatever is read back is compared with a digest.
"""

from narrows.broker.storage.audit import Audit
from narrows.broker.storage.chain import Chain
from narrows.broker.storage.checkpoint import CheckpointContent, StateDir
from narrows.broker.storage.disk import DirectoryFiles
from narrows.broker.storage.export import export_tensors
from narrows.broker.storage.history import (
    GAP,
    Changes,
    MergedAgain,
    check_whole,
    config_of,
    first_record,
    memory_digest,
    merge_again,
    model_digest,
    needed_journal,
    oldest_versions,
    opened_run,
    read_manifest,
    seal_run,
)
from narrows.broker.storage.initial import check_initial, read_initial
from narrows.broker.storage.journal import Journal
from narrows.broker.storage.manifest import MergedPush
from narrows.broker.storage.records import (
    FateRecord,
    Head,
    LifeRecord,
    Mode,
    RoundRecord,
    SealRecord,
)
from narrows.broker.storage.recovery import Begun, begin_epoch, open_state_dir
from narrows.broker.storage.replay import History, read_records, recover, version_sum_of
from narrows.broker.storage.seal import NO_SEAL, SealKey, new_seal_key, read_seal_key
from narrows.broker.storage.sealed import is_sealed
from narrows.broker.storage.writer import Chunk, Commits

__all__ = [
    "GAP",
    "NO_SEAL",
    "Audit",
    "Begun",
    "Chain",
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
    "SealKey",
    "SealRecord",
    "StateDir",
    "begin_epoch",
    "check_initial",
    "check_whole",
    "config_of",
    "export_tensors",
    "first_record",
    "is_sealed",
    "memory_digest",
    "merge_again",
    "model_digest",
    "needed_journal",
    "new_seal_key",
    "oldest_versions",
    "open_state_dir",
    "opened_run",
    "read_initial",
    "read_manifest",
    "read_records",
    "read_seal_key",
    "recover",
    "seal_run",
    "version_sum_of",
]
