"""The content of a checkpoint: three arrays per fragment and a manifest with their digests.

A fragment is a safetensors file of `global`, `momentum` and `published`, each float32 (n,), so that
other programs can read a checkpoint. JSON files are sealed: they carry a digest of themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias, TypeVar

import msgspec
import numpy as np
from msgspec import Struct

from narrows.broker.merging import (
    NAMES_KEPT,
    UNWATCHED,
    VERSIONS_KEPT,
    FragmentState,
    NormHistory,
    RoundNorms,
    Watch,
)
from narrows.broker.storage.durable_files import (
    Damaged,
    StateError,
    open_file,
    read_into,
)
from narrows.broker.storage.safetensors_format import bytes_of, safetensors_header
from narrows.proto.codec import F32
from narrows.proto.errors import ErrorCode, NarrowsError
from narrows.proto.fragments import build_table
from narrows.proto.frames import digest
from narrows.proto.layout import check_layout
from narrows.proto.messages import Count, DtypeName, LayoutEntry, Phase

FORMAT: Final = 2
"""Format of everything in a state directory. 2 added the history of norms and the watch."""

READABLE: Final = (1, 2)
"""Formats that are read. Others are refused by their number."""

RUN_FORMAT: Final = 2
"""Format of run.json, whose fields are those of format 1: since 2 the run has a secret."""

JSON_BYTES_MAX: Final = 64 << 20
"""Largest JSON file that is read. The manifest of the longest layout takes a quarter of it."""

MANIFEST: Final = "manifest.json"

ROWS_MAX: Final = VERSIONS_KEPT * NAMES_KEPT
"""Most rows of norms that a fragment has."""

_ARRAYS: Final = ("global", "momentum", "published")
_NORMS: Final = "norms"
Sealed = TypeVar("Sealed", "RunRecord", "Manifest")

Start: TypeAlias = tuple[Count, Count]
"""(term, life): an epoch as files have it. Only peers see the nonce. It tells the lives of this
directory from those of its copies, and a copied file could not."""


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


class RoundEntry(Struct, frozen=True, forbid_unknown_fields=True):
    """One round in the history of norms, whose norms stand in the fragment's file."""

    version: int
    processes: tuple[tuple[str, str], ...]
    """(name, incarnation) of each contributor, in the order of the rows of norms."""


class FragmentEntry(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One fragment in a manifest."""

    version: int
    elements: int
    digests: dict[str, str]
    """xxh3_64 (hex) per array."""
    pieces: int = 0
    """Columns of the norms; 0: there are none."""
    history: tuple[RoundEntry, ...] = ()
    """Oldest first."""

    @property
    def rows(self) -> int:
        """Rows of the norms."""
        return sum(len(each.processes) for each in self.history)


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
    watch: Watch = UNWATCHED


def fragment_name(index: int) -> str:
    """Name of a fragment's file."""
    return f"fragment-{index:05d}.safetensors"


def fragment_header(elements: int, rows: int, pieces: int) -> bytes:
    """The bytes in front of the arrays in a fragment's file; `rows` of norms come last."""
    arrays: list[tuple[str, DtypeName, tuple[int, ...]]] = [
        (name, "float32", (elements,)) for name in _ARRAYS
    ]
    if rows:
        arrays.append((_NORMS, "float32", (rows, pieces)))
    return safetensors_header(arrays)


def blocks_of(state: FragmentState) -> list[memoryview]:
    """The bytes of a fragment's arrays, in the order of the file, without the norms."""
    return [bytes_of(array) for array in (state.global_, state.momentum, state.published)]


def file_of(state: FragmentState) -> list[bytes | memoryview]:
    """The content of a fragment's file."""
    norms = norms_of(state)
    header = fragment_header(state.global_.size, *norms.shape)
    return [header, *blocks_of(state), norms.tobytes()]


def norms_of(state: FragmentState) -> F32:
    """The norms (r, k) of a fragment's history, a row per contribution."""
    rounds = [each.norms for each in state.history.rounds]
    return np.concatenate(rounds) if rounds else np.zeros((0, 0), np.float32)


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
        named = {name: f"{value:016x}" for name, value in zip(_ARRAYS, digests, strict=True)}
        norms = norms_of(state)
        if norms.size:
            named[_NORMS] = f"{digest(bytes_of(norms)):016x}"
        rounds = tuple(RoundEntry(each.version, each.processes) for each in state.history.rounds)
        size, pieces = state.global_.size, norms.shape[1]
        entries.append(FragmentEntry(state.version, size, named, pieces, rounds))
    return sealed(
        Manifest(
            FORMAT, snapshot.run_id, snapshot.epoch, snapshot.phase, snapshot.run_tokens,
            snapshot.frozen_digest, tuple(entries), snapshot.layout, snapshot.journal,
            snapshot.merged_pushes, "", snapshot.watch,
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
    if content.format not in READABLE:
        _refuse_other_format(name, data)
    if content != sealed(content):
        raise Damaged(f"{name}: does not match its digest")
    return content


def _refuse_other_format(name: str, data: bytearray) -> None:
    """Raises StateError if another version of Narrows has sealed this.

    Such a file is not damaged, so neither a second copy nor an older checkpoint may take its place.
    """
    try:
        fields = msgspec.json.decode(data, type=dict[str, object])
        seal = digest(msgspec.json.encode(fields | {"digest": ""}))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError):
        return
    if fields.get("format") not in READABLE and fields.get("digest") == f"{seal:016x}":
        raise StateError(
            ErrorCode.STATE_DAMAGED, f"{name} cannot be read",
            expected=f"format {' or '.join(map(str, READABLE))}",
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


def read_fragment(directory_fd: int, index: int, entry: FragmentEntry) -> FragmentState:
    """A fragment as the manifest describes it. Raises FileNotFoundError, Damaged."""
    name, rows = fragment_name(index), entry.rows
    header = fragment_header(entry.elements, rows, entry.pieces)
    with open_file(directory_fd, name) as (fd, size_bytes):
        if size_bytes != len(header) + 4 * (entry.elements * len(_ARRAYS) + rows * entry.pieces):
            raise Damaged(f"{name}: {size_bytes} bytes")
        arrays: dict[str, F32] = {array: np.empty(entry.elements, np.float32) for array in _ARRAYS}
        if rows:
            arrays[_NORMS] = np.empty((rows, entry.pieces), np.float32)
        # The manifest says which header the file must have, so there is nothing to parse.
        read_header = bytearray(len(header))
        read_into(fd, name, memoryview(read_header))
        if bytes(read_header) != header:
            raise Damaged(f"{name}: another header than was written")
        for values in arrays.values():
            read_into(fd, name, bytes_of(values))
    digests = {array: digest(bytes_of(values)) for array, values in arrays.items()}
    for array, value in digests.items():
        if entry.digests.get(array) != f"{value:016x}":
            raise Damaged(f"{name}: {array} does not match its digest")
    return FragmentState(
        entry.version, digests["published"], arrays["global"], arrays["momentum"],
        arrays["published"], _history(entry, arrays.get(_NORMS)),
    )  # fmt: skip


def _history(entry: FragmentEntry, norms: F32 | None) -> NormHistory:
    """The history that a manifest and the norms of a fragment's file give together."""
    rounds, start = list[RoundNorms](), 0
    if norms is None:
        return NormHistory()
    for each in entry.history:
        end = start + len(each.processes)
        rounds.append(RoundNorms(each.version, each.processes, norms[start:end]))
        start = end
    return NormHistory(tuple(rounds))
