"""Evidence of a run in its files: the journal of the broker, and the versions that learners
installed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from narrows.bench.kit.rows import read_rows
from narrows.broker.config import BrokerConfig
from narrows.broker.storage import (
    Audit,
    RoundRecord,
    memory_digest,
    model_digest,
    opened_run,
    read_records,
    recover,
)
from narrows.proto.config import override
from narrows.proto.errors import ErrorCode, NarrowsError

VersionKey: TypeAlias = tuple[int, int]
"""(fragment, version)"""


@dataclass(frozen=True)
class Evidence:
    """The journal of a run from its first checkpoint on."""

    audit: Audit
    rounds: tuple[RoundRecord, ...]
    digests: dict[VersionKey, str]
    """Digests of the published copies: the oldest checkpoint's and those of all rounds after it."""
    replay_equal: bool
    """True if the replay from the oldest checkpoint ends with the bits of the newest one, and with
    the same memory of norms and suspects."""


def read_evidence(state_dir: Path, *, fragments: int) -> Evidence:
    """Reads and replays the journal of a broker that has ended. The journal needs `journal_keep`.

    Raises NarrowsError if there is nothing to read.
    """
    audit, rounds, digests = Audit(), list[RoundRecord](), dict[VersionKey, str]()
    with opened_run(state_dir) as (checkpoints, journal):
        oldest, newest = checkpoints.load_oldest(), checkpoints.load()
        if journal is None or oldest is None or newest is None:
            raise NarrowsError(ErrorCode.STATE_DAMAGED, f"{state_dir} has no journal of a run")
        for fragment, state in enumerate(oldest.fragments):
            digests[fragment, state.version] = f"{state.digest:016x}"
        for number, head, _ in read_records(journal, oldest.journal + 1):
            audit.take(number, head)
            if isinstance(head, RoundRecord):
                rounds.append(head)
                digests[head.fragment, head.version] = f"{head.digests[2]:016x}"
        config = override(BrokerConfig(), {"fragments.count": fragments})
        again, as_run = recover(config, oldest, journal), recover(config, newest, journal)
    equal = model_digest(again.model) == model_digest(as_run.model)
    equal = equal and memory_digest(again.model) == memory_digest(as_run.model)
    return Evidence(audit, tuple(rounds), digests, equal)


@dataclass(frozen=True)
class Digests:
    """Published copies that learners installed, beside the broker's."""

    compared: int = 0
    different: int = 0
    unknown: int = 0
    """Installed versions that the broker's journal does not have."""


def compare_digests(published: Mapping[VersionKey, str], files: Iterable[Path]) -> Digests:
    """Compares every installation in the learners' events files with the published digests."""
    compared = different = unknown = 0
    for key, digest in _installations(files):
        expected = published.get(key)
        compared += expected is not None
        unknown += expected is None
        different += expected not in (None, digest)
    return Digests(compared, different, unknown)


def installed(files: Iterable[Path]) -> dict[VersionKey, set[str]]:
    """The digests under which learners installed each version."""
    seen: dict[VersionKey, set[str]] = {}
    for key, digest in _installations(files):
        seen.setdefault(key, set()).add(digest)
    return seen


def _installations(files: Iterable[Path]) -> Iterator[tuple[VersionKey, str]]:
    for path in files:
        for record in read_rows(path):
            if record["event"] == "installed":
                yield (record["fragment"], record["version"]), record["digest"]
