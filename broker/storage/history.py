"""The history of a run in its state directory: opened, checked, and merged again."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import xxhash

from narrows.broker.config import BrokerConfig
from narrows.broker.merging import GlobalModel, Policy
from narrows.broker.storage import manifest
from narrows.broker.storage.checkpoint import (
    CheckpointContent,
    StateDir,
    generation_name,
    generations_in,
)
from narrows.broker.storage.disk import DirectoryFiles
from narrows.broker.storage.durable_files import Damaged, StateError, directory
from narrows.broker.storage.journal import Journal
from narrows.broker.storage.manifest import Manifest
from narrows.broker.storage.records import RoundRecord, payloads
from narrows.broker.storage.replay import merged_of, read_records, version_before
from narrows.proto.errors import ConfigError, ErrorCode, NarrowsError
from narrows.proto.fragments import build_table
from narrows.proto.units import counted

RULES = {"mean": "mean", "rda": "layout"}
"""The merge rule for each value of `--merge`."""

SEGMENT_BYTES = 1 << 20
"""A size that `Journal.open` asks for. No segment is written here."""


@dataclass(frozen=True)
class Changes:
    """The rules that a replay changes; None: as in the run."""

    merge: str | None = None
    optimizer: str | None = None
    outer_lr: float | None = None
    momentum: float | None = None

    def policy(self, own: Policy) -> Policy:
        """The run's policy with the changes."""
        changes: dict[str, object] = {}
        if self.merge is not None:
            if self.merge not in RULES:
                raise ConfigError("--merge", expected=" or ".join(RULES), got=self.merge)
            changes["merge_rule"] = RULES[self.merge]
        for name in ("optimizer", "outer_lr", "momentum"):
            if getattr(self, name) is not None:
                changes[name] = getattr(self, name)
        return msgspec.structs.replace(own, **changes)


@contextmanager
def opened_run(path: Path) -> Generator[tuple[StateDir, Journal | None]]:
    """A state directory and its journal, locked, for reading. Raises NarrowsError."""
    remedy = "see --state-dir of the broker"
    if not path.is_dir():
        raise ConfigError(f"{path} is no state directory", remedy=remedy)
    if not any((path / name).exists() for name in ("run.json", "run.copy.json")):
        raise ConfigError(f"{path} holds no run", remedy=remedy)
    try:
        state_dir = StateDir.open(path)
    except StateError as error:
        if error.code is not ErrorCode.STATE_LOCKED:
            raise
        raise StateError(
            error.code, f"a broker is running on {path}", got=error.got, remedy="stop it first"
        ) from error
    with state_dir:
        run = state_dir.run
        assert run is not None
        journal = None
        if state_dir.has_journal:
            files = DirectoryFiles(state_dir.journal_directory())
            journal = Journal.open(files, run_id=run.run_id, segment_bytes=SEGMENT_BYTES)
        yield state_dir, journal


def read_manifest(path: Path) -> Manifest:
    """Returns the newest manifest of a state directory, without its lock: a broker may be running.

    Raises ConfigError if there is none that is whole.
    """
    problems: list[str] = []
    try:
        with directory(None, str(path)) as parent_fd:
            for number in generations_in(parent_fd):
                try:
                    with directory(parent_fd, generation_name(number)) as fd:
                        return manifest.read_manifest(fd)
                except (OSError, Damaged) as problem:
                    problems.append(f"{generation_name(number)}: {problem}")
    except OSError as error:
        problems.append(error.strerror or str(error))
    raise ConfigError(
        f"{path}: no checkpoint can be read",
        expected="the state directory of a run that has its version 0",
        got="; ".join(problems) or "a directory without checkpoints",
        remedy="see --state-dir of the broker; start the learner that brings the model first",
    )


def model_digest(model: GlobalModel) -> str:
    """xxh3_128 (hex) over global parameters, momentum and published copies of all fragments."""
    hasher = xxhash.xxh3_128()
    for state in model.fragments:
        for array in (state.global_, state.momentum, state.published):
            hasher.update(array.data.cast("B"))
    return hasher.hexdigest()


@dataclass(frozen=True)
class MergedAgain:
    """A history under other rules."""

    model: GlobalModel
    rounds: int
    differs: str
    """The first round that came out differently; empty: none."""


def merge_again(
    config: BrokerConfig, oldest: CheckpointContent, journal: Journal, changes: Changes
) -> MergedAgain:
    """Merges the same contributions again, with changes. Raises NarrowsError."""
    model = GlobalModel(config, build_table(oldest.layout, len(oldest.fragments)), oldest.fragments)
    differs, rounds = "", 0
    for number, head, blobs in read_records(journal, oldest.journal + 1):
        if not isinstance(head, RoundRecord):
            continue
        before = version_before(model, head, number)
        if head.version <= before:
            continue
        check_whole(head.version - before - 1)
        rounds += 1
        published = _merge_again(model, head, blobs, changes, number)
        if published != head.digests[2] and not differs:
            differs = f"record {number}, version {head.version} of fragment {head.fragment}"
    return MergedAgain(model, rounds, differs)


def _merge_again(
    model: GlobalModel, head: RoundRecord, blobs: memoryview, changes: Changes, number: int
) -> int:
    """Installs the version that a round gives under the changes; the digest of its published
    copy."""
    fragment = model.table[head.fragment]
    if not head.contributions and changes.merge is not None:
        raise ConfigError(
            f"record {number} holds the merged outer gradient only",
            expected='journal = "full" in the run\'s settings, for another merge',
        )
    policy = changes.policy(head.policy)
    try:
        vectors = list(payloads([head.publication, *head.contributions], blobs))
        merged = merged_of(model, fragment, head, vectors, blobs, policy)
    except Damaged as problem:
        raise NarrowsError(ErrorCode.STATE_DAMAGED, f"record {number}: {problem}") from problem
    params, momentum = model.step(fragment, merged.outer_grad, policy)
    _code_as_then(model, head)
    weights = tuple(each.weight for each in head.contributors)
    outcome = model.published(fragment, head.version, params, momentum, merged, weights, policy)
    model.install(outcome)
    return outcome.state.digest


def _code_as_then(model: GlobalModel, head: RoundRecord) -> None:
    """Sets the coding of the round's publication: codec, step, cut into chunks.

    With another step the published copies would differ for a reason that nobody asked about.
    """
    codec = replace(
        model.config.codec,
        publish=head.publication.codec,
        publish_rho=head.publication.rho,
        chunk_elements=max(256, head.publication.chunks[0][1]),
    )
    model.configure(replace(model.config, codec=codec))


def config_of(snapshot: CheckpointContent) -> BrokerConfig:
    """A configuration that reads any history: records bring their policy and their codec.

    Gaps are counted and reported, so that a reader of a run need not decide anything.
    """
    config = BrokerConfig()
    fragments = replace(config.fragments, count=snapshot.fragment_count)
    return replace(
        config, fragments=fragments, broker=replace(config.broker, journal_errors="serve")
    )


GAP = "of the journal came after one that was published and never written"
"""The gap that `journal_errors = "serve"` may leave behind, as the end of a sentence."""


def check_whole(gaps: int) -> None:
    """Raises NarrowsError if rounds are missing: the rounds after them cannot be made again."""
    if gaps:
        raise NarrowsError(
            ErrorCode.STATE_DAMAGED, f"{counted(gaps, 'round')} {GAP}: they cannot be made again",
            remedy="`narrows export` writes the newest model all the same",
        )  # fmt: skip


def needed_journal(journal: Journal | None, path: Path) -> Journal:
    """The journal. Raises ConfigError if there is none."""
    if journal is None:
        raise ConfigError(f"{path} holds no journal", remedy='was the run\'s broker.journal "off"?')
    return journal


def first_record(journal: Journal | None) -> int:
    """Number of the oldest record that is kept."""
    return journal.first if journal is not None else 1
