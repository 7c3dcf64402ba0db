"""The manifest of a checkpoint, and the record of a run. Both carry a digest of themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias, TypeVar

import msgspec
from msgspec import Struct

from narrows.broker.merging import ROWS_MAX, UNWATCHED, FragmentState, Watch
from narrows.broker.storage.durable_files import (
    Damaged,
    StateError,
    open_file,
    read_into,
)
from narrows.broker.storage.fragment_file import (
    ARRAYS,
    NORMS,
    FragmentEntry,
    RoundEntry,
    blocks_of,
    norms_of,
)
from narrows.broker.storage.safetensors_format import bytes_of
from narrows.proto.errors import ErrorCode, NarrowsError
from narrows.proto.fragments import build_table
from narrows.proto.frames import digest
from narrows.proto.layout import check_layout
from narrows.proto.limits import (
    FRAGMENTS_MAX,
    LAYOUT_PART_BYTES_MAX,
    LAYOUT_PARTS_MAX,
    LEARNERS_MAX,
)
from narrows.proto.messages import Count, LayoutEntry, Phase

FORMAT: Final = 2
"""Format of everything in a state directory. 2 added the history of norms, the watch, and the
parts of tokens that the clock counts; the clock of format 1 counted what learners reported."""


FORMATS_READ: Final = (1, FORMAT)
"""Formats that are read. Others are refused by their number."""

RUN_FORMAT: Final = 2
"""Format of run.json, whose fields are those of format 1: since 2 the run has a secret."""

PUSH_BYTES_MAX: Final = 256
"""Bytes of a merged push in a manifest."""

ROW_BYTES_MAX: Final = 160
"""Bytes of a row of norms in a manifest: its process, and its round if it is alone in it."""

FRAGMENT_BYTES_MAX: Final = 512
"""Bytes of a fragment in a manifest beside those."""

WATCHED_BYTES_MAX: Final = 1024
"""Bytes of a name in the watch."""

LAYOUT_BYTES_MAX: Final = 6 * LAYOUT_PARTS_MAX * LAYOUT_PART_BYTES_MAX
"""Bytes of a layout: JSON escapes a byte of a name with six."""

JSON_BYTES_MAX: Final = (
    FRAGMENTS_MAX * (2 * LEARNERS_MAX * PUSH_BYTES_MAX + ROWS_MAX * ROW_BYTES_MAX)
    + FRAGMENTS_MAX * FRAGMENT_BYTES_MAX
    + LEARNERS_MAX * WATCHED_BYTES_MAX
    + LAYOUT_BYTES_MAX
    + (64 << 10)
)
"""Largest JSON file that is read. No manifest is longer: each has at most what the limits of the
protocol allow, for as many learners that are gone as there may be. Most have some kilobytes."""

MANIFEST: Final = "manifest.json"

Sealed = TypeVar("Sealed", "RunRecord", "Manifest")

Start: TypeAlias = tuple[Count, Count]
"""(term, life): an epoch as files have it. Only peers see the nonce. It tells the lives of this
directory from those of its copies, and a copied file could not."""


RUN_FILES: Final = ("run.copy.json", "run.json")
"""Names of the run's record and of its copy; the copy is written first."""


class RunRecord(Struct, frozen=True, forbid_unknown_fields=True):
    """Which run this directory belongs to, and its newest epoch."""

    format: int
    run_id: str
    epoch: Start
    config_digest: str
    """Digest of the configuration that the epoch began with. It is for people; nothing checks
    it."""
    digest: str = ""
    """xxh3_64 (hex) of this record with an empty digest."""


class MergedPush(Struct, frozen=True, forbid_unknown_fields=True):
    """The last push of a learner's process that is merged into a fragment, and all tokens of it."""

    learner: str
    incarnation: str
    fragment: int
    push_id: int
    tokens: int


class Manifest(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Everything in a checkpoint but its arrays; the fields mean the same."""

    format: int
    run_id: str
    epoch: Start
    phase: Phase
    run_tokens: int
    frozen_digest: int
    fragments: tuple[FragmentEntry, ...]
    layout: tuple[LayoutEntry, ...]
    journal: int
    merged_pushes: tuple[MergedPush, ...]
    digest: str
    """xxh3_64 (hex) of this manifest with an empty digest."""
    token_parts: int = 0
    """Part of the run's clock beyond run_tokens, in units of a P-th token for P fragments."""
    watch: Watch = UNWATCHED


@dataclass(frozen=True)
class CheckpointContent:
    """Everything that a checkpoint holds."""

    run_id: str
    epoch: Start
    layout: tuple[LayoutEntry, ...]
    frozen_digest: int
    fragment_count: int
    run_tokens: int
    phase: Phase
    fragments: tuple[FragmentState, ...]
    journal: int = 0
    """The newest record of the journal whose round is in here."""
    merged_pushes: tuple[MergedPush, ...] = ()
    token_parts: int = 0
    journal_seal: bytes = b""
    """The seal of that record, for a sealed journal. It is in no manifest: see sealed.SealFile."""
    watch: Watch = UNWATCHED


def manifest_of(snapshot: CheckpointContent) -> Manifest:
    """The sealed manifest of a snapshot.

    Raises StateError if the snapshot does not fit together: damaged memory must not become a
    checkpoint.
    """
    entries: list[FragmentEntry] = []
    for index, state in enumerate(snapshot.fragments):
        digests = [digest(block) for block in blocks_of(state)]
        sizes = {len(block) for block in blocks_of(state)}
        if sizes != {4 * state.global_.size} or digests[-1] != state.digest:
            raise StateError(
                ErrorCode.STATE_DAMAGED, f"fragment {index} in memory",
                expected=f"three float32 arrays of one size, published with {state.digest:016x}",
                got=f"{sorted(sizes)} bytes, {digests[-1]:016x}",
            )  # fmt: skip
        named = {name: f"{value:016x}" for name, value in zip(ARRAYS, digests, strict=True)}
        norms = norms_of(state)
        if norms.size:
            named[NORMS] = f"{digest(bytes_of(norms)):016x}"
        rounds = tuple(RoundEntry(each.version, each.processes) for each in state.history.rounds)
        size, pieces = state.global_.size, norms.shape[1]
        entries.append(FragmentEntry(state.version, size, named, pieces, rounds))
    return sealed(
        Manifest(
            FORMAT, snapshot.run_id, snapshot.epoch, snapshot.phase, snapshot.run_tokens,
            snapshot.frozen_digest, tuple(entries), snapshot.layout, snapshot.journal,
            snapshot.merged_pushes, "", snapshot.token_parts, snapshot.watch,
        )
    )  # fmt: skip


def snapshot_of(manifest: Manifest, fragments: list[FragmentState]) -> CheckpointContent:
    """The snapshot that a manifest describes."""
    return CheckpointContent(
        run_id=manifest.run_id,
        epoch=manifest.epoch,
        layout=manifest.layout,
        frozen_digest=manifest.frozen_digest,
        fragment_count=len(fragments),
        run_tokens=manifest.run_tokens,
        phase=manifest.phase,
        fragments=tuple(fragments),
        journal=manifest.journal,
        merged_pushes=manifest.merged_pushes,
        token_parts=manifest.token_parts,
        watch=manifest.watch,
    )


def sealed(content: Sealed) -> Sealed:
    """The same content with its own digest in it."""
    empty = msgspec.structs.replace(content, digest="")
    return msgspec.structs.replace(empty, digest=f"{digest(msgspec.json.encode(empty)):016x}")


def read_sealed(directory_fd: int, name: str, kind: type[Sealed]) -> Sealed:
    """A JSON file as it was sealed. Raises FileNotFoundError, Damaged, and StateError if it is of
    another format and whole."""
    with open_file(directory_fd, name) as (fd, size_bytes):
        if size_bytes > JSON_BYTES_MAX:
            raise Damaged(f"{name}: {size_bytes} bytes")
        data = bytearray(size_bytes)
        read_into(fd, name, memoryview(data))
    try:
        content = msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        _refuse_other_format(name, data)
        raise Damaged(f"{name}: {error}") from error
    if content.format not in FORMATS_READ:
        _refuse_other_format(name, data)
    if content.digest != _seal_of(data):
        raise Damaged(f"{name}: does not match its digest")
    return content


def _seal_of(data: bytearray) -> str:
    """The digest that whole content would carry: an older format has other fields."""
    fields = msgspec.json.decode(data, type=dict[str, object])
    return f"{digest(msgspec.json.encode(fields | {'digest': ''})):016x}"


def read_run(directory_fd: int) -> tuple[list[RunRecord], list[str]]:
    """The run's records that are whole, and what is wrong with the others."""
    records: list[RunRecord] = []
    problems: list[str] = []
    for name in RUN_FILES:
        try:
            records.append(read_sealed(directory_fd, name, RunRecord))
        except FileNotFoundError:
            continue
        except Damaged as problem:
            problems.append(str(problem))
    return records, problems


def _refuse_other_format(name: str, data: bytearray) -> None:
    """Raises StateError if another version of Narrows has sealed this.

    Such a file is not damaged, so neither a second copy nor an older checkpoint may take its place.
    """
    try:
        fields = msgspec.json.decode(data, type=dict[str, object])
        seal = digest(msgspec.json.encode(fields | {"digest": ""}))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError):
        return
    if fields.get("format") not in FORMATS_READ and fields.get("digest") == f"{seal:016x}":
        raise StateError(
            ErrorCode.STATE_DAMAGED, f"{name} cannot be read",
            expected=f"format {' or '.join(map(str, FORMATS_READ))}",
            got=f"format {fields.get('format')}",
            remedy="use the version of Narrows that wrote it",
        )  # fmt: skip


def read_manifest(directory_fd: int) -> Manifest:
    """The manifest of a generation. Raises FileNotFoundError, Damaged, StateError."""
    manifest = read_sealed(directory_fd, MANIFEST, Manifest)
    try:
        check_layout(manifest.layout)
        table = build_table(manifest.layout, len(manifest.fragments))
    except NarrowsError as error:
        raise Damaged(f"{MANIFEST}: {error}") from error
    if [part.elements for part in table] != [each.elements for each in manifest.fragments]:
        raise Damaged(f"{MANIFEST}: the fragments are not those of its layout")
    for part, each in zip(table, manifest.fragments, strict=True):
        if each.pieces != (len(part.pieces) if each.rows else 0) or each.rows > ROWS_MAX:
            raise Damaged(f"{MANIFEST}: the norms are not those of its layout")
    return manifest
