"""The texts of `narrows journal`, `narrows export` and `narrows layout`."""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from narrows.broker.cli.tables import TextLine, show_lines, terminal, width_of, wrapped
from narrows.broker.merging import FragmentState, GlobalModel
from narrows.broker.storage import (
    GAP,
    NO_SEAL,
    Audit,
    Changes,
    CheckpointContent,
    FateRecord,
    Head,
    History,
    Journal,
    LifeRecord,
    MergedAgain,
    RoundRecord,
    SealRecord,
    StateDir,
    check_whole,
    config_of,
    export_tensors,
    first_record,
    is_sealed,
    merge_again,
    model_digest,
    needed_journal,
    oldest_versions,
    opened_run,
    read_manifest,
    read_records,
    read_seal_key,
    recover,
    version_sum_of,
)
from narrows.proto.errors import ConfigError, ErrorCode, NarrowsError, printable
from narrows.proto.layout import fingerprint
from narrows.proto.messages import Phase
from narrows.proto.units import counted, format_bytes


@contextmanager
def opened(path: Path, seal_key: Path | None) -> Generator[tuple[StateDir, Journal | None]]:
    """A run for reading, with all seals compared if there is a key; else it says that none was."""
    key = read_seal_key(seal_key, path) if seal_key is not None else None
    with opened_run(path, key) as (state_dir, journal):
        if key is None and is_sealed(state_dir.directory_fd):
            print("note: it is sealed; without --seal-key the seals were not compared")
        yield state_dir, journal


def show(path: Path, *, seal_key: Path | None = None) -> None:
    """Prints the journal, a line per record. A narrow terminal gets long lines broken and
    indented."""
    console = terminal()
    with opened(path, seal_key) as (state_dir, journal):
        held, versions = oldest_versions(state_dir)
        for number, head, blobs in read_records(
            needed_journal(journal, path), first_record(journal)
        ):
            total = ""
            if isinstance(head, RoundRecord) and number > held and versions:
                versions[head.fragment] = head.version
                total = f" ({sum(versions)} in all)"
            text = f"{number:8d}  {_line(head, len(blobs), total)}"
            show_lines(console, map(TextLine, wrapped(text, width_of(console), more=" " * 10)))
        _warn(journal)


def audit(path: Path, seal_key: Path | None = None, holds: str = "") -> None:
    """Checks the sums and orders of the records, and all seals with a key. Raises NarrowsError that
    names the errors."""
    result = Audit()
    with opened(path, seal_key) as (state_dir, journal):
        if state_dir.seal is not None:
            _tell_sealed(state_dir, journal, holds)
            if journal is None:
                return
        first = first_record(journal)
        for number, head, _blobs in read_records(needed_journal(journal, path), first):
            result.take(number, head)
        _warn(journal)
    if first > 1:
        print(f"from record {first} on: earlier ones were cut back, see broker.journal_keep")
    fates = ", ".join(f"{count} {what}" for what, count in sorted(result.fates.items()))
    print(
        f"{counted(result.rounds, 'round')}, {counted(result.contributions, 'contribution')}, "
        f"{counted(len(result.epochs), 'start')} of the broker{'; ' if fates else ''}{fates}"
    )
    if result.problems:
        raise NarrowsError(
            ErrorCode.STATE_DAMAGED, f"{counted(len(result.problems), 'error')} in the journal",
            got="; ".join(result.problems[:5]),
        )  # fmt: skip
    if result.rounds:
        print("every version once and in order, every push at most once, all weights sum to 1")


def _tell_sealed(state_dir: StateDir, journal: Journal | None, holds: str) -> None:
    """Says what is sealed. Raises NarrowsError if records are missing, or the one of `holds`."""
    number, _, seal = holds.partition(":")
    if journal is not None:
        # What was cut off from the front is missed by the oldest checkpoint.
        journal.records(state_dir.journal_needed_from())
        for damage in journal.damage:
            print(f"note: {damage}; a write that was cut short looks like this. It is not used")
        newest = journal.seal_of(journal.newest)
        print(
            f"every seal of what is used is as it was; the newest is "
            f"{journal.newest}:{newest.hex()}"
        )
    else:
        print("every seal is as it was; there is no journal")
    if not holds:
        return
    if not number.isdecimal() or not re.fullmatch("[0-9a-f]{16,64}", seal):
        expected = "NUMBER:SEAL with at least 16 digits of the seal"
        raise ConfigError("--holds", expected=expected, got=holds)
    found = (journal.seal_of(int(number)) if journal is not None else NO_SEAL).hex()
    if not found.startswith(seal):
        raise NarrowsError(
            ErrorCode.STATE_DAMAGED, f"record {number} with seal {seal} is not here",
            got=f"seal {found[:16]}" if int(found, 16) else "no such record",
            remedy="this is an older copy, or its end was cut off: restore a newer backup",
        )  # fmt: skip
    print(f"record {number} is here with its seal")


def replay(
    path: Path, changes: Changes, target: Path | None = None, *, seal_key: Path | None = None
) -> None:
    """Makes the versions again from the oldest checkpoint on, as they were or with changes.

    The resulting model is written to `target`.
    """
    check_target(target)
    with opened(path, seal_key) as (state_dir, journal):
        oldest, newest = state_dir.load_oldest(), state_dir.load()
        if oldest is None or newest is None:
            raise ConfigError(f"{path}: no checkpoint to begin with")
        journal = needed_journal(journal, path)
        config = config_of(oldest)
        as_run = recover(config, newest, journal)
        print(f"from versions {_versions(oldest.fragments)} on")
        is_same = changes == Changes()
        if is_same:
            replayed = recover(config, oldest, journal)
            _tell_equal(replayed, as_run)
            model = replayed.model
        else:
            again = merge_again(config, oldest, journal, changes)
            model = _tell_different(again, as_run, version_sum_of(oldest.fragments))
        _warn(journal)
    if target is not None:
        content = replace(newest, fragments=tuple(model.fragments))
        export_tensors(content, target, _standing(content, as_run, is_same=is_same))


def export_model(path: Path, target: Path, *, seal_key: Path | None = None) -> None:
    """Writes the newest global model as safetensors under the names of its tensors."""
    check_target(target)
    with opened(path, seal_key) as (state_dir, journal):
        snapshot = state_dir.load()
        if snapshot is None:
            raise ConfigError(f"{path}: no checkpoint yet")
        history = recover(config_of(snapshot), snapshot, journal)
        _warn(journal)
        if history.gaps:
            print(f"warning: {counted(history.gaps, 'round')} {GAP}: left out")
    exported = replace(snapshot, fragments=tuple(history.model.fragments))
    export_tensors(exported, target, _standing(exported, history))
    versions = _versions(history.model.fragments)
    print(f"{target}: versions {versions}, {counted(history.replayed, 'round')} from the journal")


def show_layout(path: Path) -> None:
    """Prints layout, frozen digest and the fingerprint of both as JSON, a line per tensor."""
    manifest = read_manifest(path)
    entries = ",\n".join(msgspec.json.encode(entry).decode() for entry in manifest.layout)
    told = fingerprint(manifest.layout, manifest.frozen_digest)
    head = f'"fingerprint": "{told}", "frozen_digest": {manifest.frozen_digest}'
    print(f'{{{head}, "layout": [\n{entries}\n]}}')


def _standing(
    content: CheckpointContent, history: History, *, is_same: bool = True
) -> dict[str, str]:
    """The keys that `Learner.save` writes as well, and which copy of the parameters the file holds.

    `is_same`: the rounds were merged by the run's own rules. Only then can it be the final model.
    """
    is_final = is_same and history.phase is Phase.ENDED and not history.gaps
    return {
        "narrows.final": str(is_final).lower(),
        "narrows.parameters": "global",
        "narrows.run": content.run_id,
        "narrows.versions": json.dumps([state.version for state in content.fragments]),
        "narrows.run_tokens": str(history.run_tokens),
    }


def check_target(target: Path | None) -> None:
    """Raises ConfigError if no file can be written there."""
    if target is not None and target.is_dir():
        raise ConfigError(f"{target} is a directory", expected="the name of a file")
    if target is not None and not target.parent.is_dir():
        raise ConfigError(f"{target.parent} is no directory", remedy="make it first")


def _tell_equal(again: History, as_run: History) -> None:
    check_whole(again.gaps)
    print(f"{counted(again.replayed, 'round')} replayed, every digest as it was")
    print(f"model {model_digest(again.model)}")
    if model_digest(again.model) != model_digest(as_run.model):
        raise NarrowsError(
            ErrorCode.STATE_DAMAGED, "the newest checkpoint is another model",
            expected=model_digest(again.model), got=model_digest(as_run.model),
        )  # fmt: skip
    print("equal to the newest checkpoint and the rounds after it")


def _versions(fragments: Sequence[FragmentState]) -> str:
    versions = [state.version for state in fragments]
    return f"{min(versions)}..{max(versions)}"


def _warn(journal: Journal | None) -> None:
    for warning in journal.warnings if journal is not None else []:
        print(f"warning: {warning}")


def _line(head: Head, blob_bytes: int, total: str) -> str:
    at = datetime.fromtimestamp(head.at, UTC).strftime("%Y-%m-%d %H:%M:%S")
    if isinstance(head, LifeRecord):
        return f"{at}  epoch {head.epoch[0]}.{head.epoch[1]} begins"
    if isinstance(head, SealRecord):
        return f"{at}  sealed from here on with the key {head.key}"
    if isinstance(head, FateRecord):
        where = f", push {head.push_id} of fragment {head.fragment}" if head.push_id else ""
        why = f": {head.reason}" if head.reason not in ("", head.what) else ""
        return f"{at}  {head.learner} {head.what}{where}{printable(why)}"
    who = ", ".join(f"{c.learner} {c.weight:.0%}" for c in head.contributors)
    return (
        f"{at}  fragment {head.fragment} version {head.version}{total} from {who} ({head.reason});"
        f" {head.policy.optimizer} {head.policy.outer_lr:g}/{head.policy.momentum:g},"
        f" {format_bytes(blob_bytes)}, published {head.digests[2]:016x}"
    )


def _tell_different(again: MergedAgain, as_run: History, begins_at: int) -> GlobalModel:
    print(f"{counted(again.rounds, 'round')} merged again")
    print(f"model {model_digest(again.model)}, of the run {model_digest(as_run.model)}")
    for name, count in again.left_out.items():
        print(f"without {counted(count, 'contribution')} of {name}")
    if again.left_out and begins_at:
        print(
            f"warning: what they contributed up to version {begins_at}, the oldest checkpoint, is"
            " still in this model: the journal was cut back, see broker.journal_keep"
        )
    print(f"different from {again.differs} on" if again.differs else "no difference")
    return again.model
