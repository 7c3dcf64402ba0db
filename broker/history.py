"""`narrows journal` and `narrows export`: what a state directory tells of its run."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import xxhash

from narrows.broker.audit import Audit
from narrows.broker.checkpoint import FragmentState, Snapshot, StateDir, export
from narrows.broker.config import BrokerConfig
from narrows.broker.durable import Damaged, StateError
from narrows.broker.files import DirectoryFiles
from narrows.broker.journal import Journal
from narrows.broker.model import GlobalModel
from narrows.broker.records import Began, Committed, Fate, Head, Policy, payloads
from narrows.broker.replay import History, merged_of, read, recover
from narrows.broker.tables import Line, show_lines, terminal, width_of, wrapped
from narrows.proto.errors import ConfigError, ErrorCode, NarrowsError
from narrows.proto.fragments import build_table
from narrows.proto.units import counted, format_bytes

LAWS = {"avg": "mean", "rda": "layout"}
"""What `--merge` may say, and the merge law that it means."""

SEGMENT_BYTES = 1 << 20
"""Only read here; nothing is written."""


@dataclass(frozen=True)
class Changes:
    """What a replay does otherwise than the run; None: as the run did."""

    merge: str | None = None
    optimizer: str | None = None
    rate: float | None = None
    momentum: float | None = None

    def policy(self, own: Policy) -> Policy:
        """The run's policy with the changes."""
        changes: dict[str, object] = {}
        if self.merge is not None:
            if self.merge not in LAWS:
                raise ConfigError("--merge", expected=" or ".join(LAWS), got=self.merge)
            changes["law"] = LAWS[self.merge]
        for name in ("optimizer", "rate", "momentum"):
            if getattr(self, name) is not None:
                changes[name] = getattr(self, name)
        return msgspec.structs.replace(own, **changes)


@contextmanager
def opened(path: Path) -> Generator[tuple[StateDir, Journal | None]]:
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


def show(path: Path) -> None:
    """Prints the journal, a line per record; a narrow terminal gets it broken and indented."""
    console = terminal()
    with opened(path) as (_, journal):
        for number, head, blobs in read(_needed(journal, path), _first(journal)):
            text = f"{number:8d}  {_line(head, len(blobs))}"
            show_lines(console, map(Line, wrapped(text, width_of(console), more=" " * 10)))
        _warn(journal)


def audit(path: Path) -> None:
    """Checks what the records must add up to. Raises NarrowsError naming what does not."""
    found = Audit()
    with opened(path) as (_, journal):
        first = _first(journal)
        for number, head, _blobs in read(_needed(journal, path), first):
            found.take(number, head)
        _warn(journal)
    if first > 1:
        print(f"from record {first} on: earlier ones were cut back, see broker.journal_keep")
    fates = ", ".join(f"{count} {what}" for what, count in sorted(found.fates.items()))
    print(
        f"{counted(found.rounds, 'round')}, {counted(found.contributions, 'contribution')}, "
        f"{counted(len(found.epochs), 'start')} of the broker{'; ' if fates else ''}{fates}"
    )
    if found.problems:
        raise NarrowsError(
            ErrorCode.STATE_DAMAGED, f"{counted(len(found.problems), 'error')} in the journal",
            got="; ".join(found.problems[:5]),
        )  # fmt: skip
    if found.rounds:
        print("every version once and in order, every push at most once, all weights sum to 1")


def replay(path: Path, changes: Changes, target: Path | None = None) -> None:
    """Makes the versions again from the oldest checkpoint on, as they were or with changes; the
    model that comes out is written to `target`."""
    check_target(target)
    with opened(path) as (state_dir, journal):
        oldest, newest = state_dir.load_oldest(), state_dir.load()
        if oldest is None or newest is None:
            raise ConfigError(f"{path}: no checkpoint to begin with")
        journal = _needed(journal, path)
        config = _config(oldest)
        as_run = recover(config, newest, journal)
        print(f"from versions {_versions(oldest.fragments)} on")
        if changes == Changes():
            again = recover(config, oldest, journal)
            _tell_equal(again, as_run)
            model = again.model
        else:
            model = _tell_different(config, oldest, journal, changes, as_run)
        _warn(journal)
    if target is not None:
        export(replace(newest, fragments=tuple(model.fragments)), target)


def export_model(path: Path, target: Path) -> None:
    """Writes the newest global model as safetensors under the names of its tensors."""
    check_target(target)
    with opened(path) as (state_dir, journal):
        snapshot = state_dir.load()
        if snapshot is None:
            raise ConfigError(f"{path}: no checkpoint yet")
        history = recover(_config(snapshot), snapshot, journal)
        _warn(journal)
        if history.gaps:
            print(f"warning: {counted(history.gaps, 'round')} {_GAP}: left out")
    export(replace(snapshot, fragments=tuple(history.model.fragments)), target)
    versions = _versions(history.model.fragments)
    print(f"{target}: versions {versions}, {counted(history.replayed, 'round')} from the journal")


def check_target(target: Path | None) -> None:
    """Raises ConfigError if no file can be written there."""
    if target is not None and target.is_dir():
        raise ConfigError(f"{target} is a directory", expected="the name of a file")
    if target is not None and not target.parent.is_dir():
        raise ConfigError(f"{target.parent} is no directory", remedy="make it first")


def _versions(fragments: Sequence[FragmentState]) -> str:
    versions = [state.version for state in fragments]
    return f"{min(versions)}..{max(versions)}"


def model_digest(model: GlobalModel) -> str:
    """xxh3_128 (hex) over global parameters, momentum and published copies of all fragments."""
    hasher = xxhash.xxh3_128()
    for state in model.fragments:
        for array in (state.global_, state.momentum, state.published):
            hasher.update(array.data.cast("B"))
    return hasher.hexdigest()


def _tell_equal(again: History, as_run: History) -> None:
    _check_whole(again.gaps)
    print(f"{counted(again.replayed, 'round')} replayed, every digest as it was")
    print(f"model {model_digest(again.model)}")
    if model_digest(again.model) != model_digest(as_run.model):
        raise NarrowsError(
            ErrorCode.STATE_DAMAGED, "the newest checkpoint is another model",
            expected=model_digest(again.model), got=model_digest(as_run.model),
        )  # fmt: skip
    print("equal to the newest checkpoint and the rounds after it")


def _tell_different(
    config: BrokerConfig, oldest: Snapshot, journal: Journal, changes: Changes, as_run: History
) -> GlobalModel:
    """The same contributions merged under another policy."""
    model = GlobalModel(config, build_table(oldest.layout, len(oldest.fragments)), oldest.fragments)
    differs, rounds = "", 0
    for number, head, blobs in read(journal, oldest.journal + 1):
        if not isinstance(head, Committed):
            continue
        before = model.fragments[head.fragment].version
        if head.version <= before:
            continue
        _check_whole(head.version - before - 1)
        rounds += 1
        published = _merge_again(model, head, blobs, changes, number)
        if published != head.digests[2] and not differs:
            differs = f"record {number}, version {head.version} of fragment {head.fragment}"
    print(f"{counted(rounds, 'round')} merged again")
    print(f"model {model_digest(model)}, of the run {model_digest(as_run.model)}")
    print(f"different from {differs} on" if differs else "no difference")
    return model


def _merge_again(
    model: GlobalModel, head: Committed, blobs: memoryview, changes: Changes, number: int
) -> int:
    """Installs the version that the changes make of a round; the digest of its published copy."""
    part = model.table[head.fragment]
    if not head.contributions and changes.merge is not None:
        raise ConfigError(
            f"record {number} holds the merged outer gradient only",
            expected='journal = "full" in the run\'s settings, for another merge',
        )
    model.policy = changes.policy(head.policy)
    try:
        vectors = list(payloads([head.publication, *head.contributions], blobs))
        merged = merged_of(model, part, head, vectors, blobs)
    except Damaged as problem:
        raise NarrowsError(ErrorCode.STATE_DAMAGED, f"record {number}: {problem}") from problem
    params, momentum = model.step(part, merged.outer_grad)
    _code_as_then(model, head)
    weights = tuple(each.weight for each in head.contributors)
    outcome = model.published(part, head.version, params, momentum, merged, weights)
    model.install(outcome)
    return outcome.state.digest


def _code_as_then(model: GlobalModel, head: Committed) -> None:
    """The publication is coded as the round's was: codec, step, cut into chunks."""
    codec = replace(
        model.config.codec,
        publish=head.publication.codec,
        publish_rho=head.publication.rho,
        chunk_elements=max(256, head.publication.chunks[0][1]),
    )
    model.configure(replace(model.config, codec=codec))


def _config(snapshot: Snapshot) -> BrokerConfig:
    """Records bring their own policy, and publications their codec. Gaps are counted: who looks at
    a run is told of them, and need not decide anything."""
    config = BrokerConfig()
    fragments = replace(config.fragments, count=snapshot.fragment_count)
    return replace(
        config, fragments=fragments, broker=replace(config.broker, journal_errors="serve")
    )


_GAP = "of the journal came after one that was published and never written"
"""What `journal_errors = "serve"` may leave behind."""


def _check_whole(gaps: int) -> None:
    if gaps:
        raise NarrowsError(
            ErrorCode.STATE_DAMAGED, f"{counted(gaps, 'round')} {_GAP}: they cannot be made again",
            remedy="`narrows export` writes the newest model all the same",
        )  # fmt: skip


def _needed(journal: Journal | None, path: Path) -> Journal:
    if journal is None:
        raise ConfigError(f"{path} holds no journal", remedy='was the run\'s broker.journal "off"?')
    return journal


def _first(journal: Journal | None) -> int:
    return journal.first if journal is not None else 1


def _warn(journal: Journal | None) -> None:
    for warning in journal.warnings if journal is not None else []:
        print(f"warning: {warning}")


def _line(head: Head, blob_bytes: int) -> str:
    at = datetime.fromtimestamp(head.at, UTC).strftime("%Y-%m-%d %H:%M:%S")
    if isinstance(head, Began):
        return f"{at}  epoch {head.epoch[0]}.{head.epoch[1]} begins"
    if isinstance(head, Fate):
        where = f", push {head.push_id} of fragment {head.fragment}" if head.push_id else ""
        why = f": {head.reason}" if head.reason not in ("", head.what) else ""
        return f"{at}  {head.learner} {head.what}{where}{why}"
    who = ", ".join(f"{c.learner} {c.weight:.0%}" for c in head.contributors)
    return (
        f"{at}  fragment {head.fragment} version {head.version} from {who} ({head.reason});"
        f" {head.policy.optimizer} {head.policy.rate:g}/{head.policy.momentum:g},"
        f" {format_bytes(blob_bytes)}, published {head.digests[2]:016x}"
    )
