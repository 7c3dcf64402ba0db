"""The content of a checkpoint: three arrays per fragment and a manifest with their digests.

A fragment is a safetensors file of `global`, `momentum` and `published`, each float32 (n,), so that
other programs can read a checkpoint. JSON files are sealed: they carry a digest of themselves.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypeAlias, TypeVar

import msgspec
import numpy as np
from msgspec import Struct

from narrows.broker.merging import FragmentState
from narrows.broker.storage.durable_files import (
    Damaged,
    StateError,
    directory,
    open_file,
    read_into,
    write_file,
)
from narrows.proto.codec import F32, round_to_dtype
from narrows.proto.errors import ErrorCode, NarrowsError
from narrows.proto.fragments import build_table
from narrows.proto.frames import digest
from narrows.proto.layout import check_layout
from narrows.proto.messages import Count, DtypeName, LayoutEntry, Phase

FORMAT: Final = 1
"""Format of everything in a state directory. Other formats are refused by their number."""

RUN_FORMAT: Final = 2
"""Format of run.json, whose fields are those of format 1: since 2 the run has a secret."""

JSON_BYTES_MAX: Final = 64 << 20
"""Largest JSON file that is read. The manifest of the longest layout takes a quarter of it."""

MANIFEST: Final = "manifest.json"

_ARRAYS: Final = ("global", "momentum", "published")
_DTYPES: Final[Mapping[DtypeName, tuple[str, int]]] = {
    "float32": ("F32", 4), "bfloat16": ("BF16", 2), "float16": ("F16", 2),
}  # fmt: skip
"""Name in safetensors, and bytes per element, of each dtype."""

NO_METADATA: Final[Mapping[str, str]] = MappingProxyType({})

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


class FragmentEntry(Struct, frozen=True, forbid_unknown_fields=True):
    """One fragment in a manifest."""

    version: int
    elements: int
    digests: dict[str, str]
    """xxh3_64 (hex) per array."""


class MergedPush(Struct, frozen=True, forbid_unknown_fields=True):
    """The last push of a learner's process that is merged into a fragment, and all tokens of it."""

    learner: str
    incarnation: str
    fragment: int
    push_id: int
    tokens: int


class Manifest(Struct, frozen=True, forbid_unknown_fields=True):
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
    digest: str = ""
    """xxh3_64 (hex) of this manifest with an empty digest."""


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


def fragment_name(index: int) -> str:
    """Name of a fragment's file."""
    return f"fragment-{index:05d}.safetensors"


def fragment_header(elements: int) -> bytes:
    """The bytes in front of the arrays in a fragment's file."""
    return _safetensors_header([(name, "float32", (elements,)) for name in _ARRAYS])


def _safetensors_header(
    tensors: Sequence[tuple[str, DtypeName, tuple[int, ...]]],
    metadata: Mapping[str, str] = NO_METADATA,
) -> bytes:
    """Length and JSON of a safetensors file whose data follow in this order without gaps."""
    header: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    end = 0
    for name, dtype, shape in tensors:
        code, item_bytes = _DTYPES[dtype]
        start, end = end, end + math.prod(shape) * item_bytes
        header[name] = {"dtype": code, "shape": shape, "data_offsets": (start, end)}
    text = msgspec.json.encode(header)
    # Blanks after the JSON align the data, as the format asks for.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes_of(array: F32) -> memoryview:
    return np.ascontiguousarray(array).data.cast("B")


def blocks_of(state: FragmentState) -> list[memoryview]:
    """The bytes of a fragment's arrays, in the order of the file."""
    return [_bytes_of(array) for array in (state.global_, state.momentum, state.published)]


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
        entries.append(FragmentEntry(state.version, state.global_.size, named))
    return sealed(
        Manifest(
            FORMAT, snapshot.run_id, snapshot.epoch, snapshot.phase, snapshot.run_tokens,
            snapshot.frozen_digest, tuple(entries), snapshot.layout, snapshot.journal,
            snapshot.merged_pushes,
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
    if content.format not in (FORMAT, RUN_FORMAT if kind is RunRecord else FORMAT):
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
    if fields.get("format") != FORMAT and fields.get("digest") == f"{seal:016x}":
        raise StateError(
            ErrorCode.STATE_DAMAGED, f"{name} cannot be read",
            expected=f"format {FORMAT}", got=f"format {fields.get('format')}",
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
    return manifest


def read_fragment(directory_fd: int, index: int, entry: FragmentEntry) -> FragmentState:
    """A fragment as the manifest describes it. Raises FileNotFoundError, Damaged."""
    name, header = fragment_name(index), fragment_header(entry.elements)
    with open_file(directory_fd, name) as (fd, size_bytes):
        if size_bytes != len(header) + 4 * entry.elements * len(_ARRAYS):
            raise Damaged(f"{name}: {size_bytes} bytes")
        arrays = {array: np.empty(entry.elements, np.float32) for array in _ARRAYS}
        # The manifest says which header the file must have, so there is nothing to parse.
        read_header = bytearray(len(header))
        read_into(fd, name, memoryview(read_header))
        if bytes(read_header) != header:
            raise Damaged(f"{name}: another header than was written")
        for values in arrays.values():
            read_into(fd, name, _bytes_of(values))
    digests = {array: digest(_bytes_of(values)) for array, values in arrays.items()}
    for array, value in digests.items():
        if entry.digests.get(array) != f"{value:016x}":
            raise Damaged(f"{name}: {array} does not match its digest")
    return FragmentState(
        entry.version, digests["published"], arrays["global"], arrays["momentum"],
        arrays["published"],
    )  # fmt: skip


def export_tensors(
    snapshot: CheckpointContent, path: Path, metadata: Mapping[str, str] = NO_METADATA
) -> None:
    """Writes the global fragments as safetensors with the layout's names, shapes and dtypes.

    `metadata` goes into the file's header. The file appears whole or not at all. Tied names and
    buffers are not in it: the broker does not know them. Raises OSError.
    """
    layout, table = snapshot.layout, build_table(snapshot.layout, snapshot.fragment_count)
    pieces_of: list[list[tuple[int, F32]]] = [[] for _ in layout]
    for fragment, state in zip(table, snapshot.fragments, strict=True):
        for piece in fragment.pieces:
            values = state.global_[piece.offset : piece.offset + piece.count]
            pieces_of[piece.tensor].append((piece.start, values))

    def blocks() -> Iterator[bytes | memoryview]:
        yield _safetensors_header(
            [(each.name, each.dtype, each.shape) for each in layout], metadata
        )
        for entry, pieces in zip(layout, pieces_of, strict=True):
            for _, values in sorted(pieces, key=lambda piece: piece[0]):
                yield _as_dtype(values, entry.dtype)

    with directory(None, str(path.parent)) as fd:
        unfinished = f".new-{path.name}"
        with suppress(FileNotFoundError):
            os.unlink(unfinished, dir_fd=fd)
        try:
            write_file(fd, unfinished, blocks())
            os.rename(unfinished, path.name, src_dir_fd=fd, dst_dir_fd=fd)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(unfinished, dir_fd=fd)
            raise
        os.fsync(fd)


def _as_dtype(values: F32, dtype: DtypeName) -> bytes | memoryview:
    """The bytes of `values` as a tensor of that dtype, rounded half to even."""
    if dtype == "float16":
        return values.astype(np.float16).tobytes()
    if dtype == "float32":
        return _bytes_of(values)
    rounded = np.empty_like(values)
    round_to_dtype(values, dtype, rounded)
    return (rounded.view(np.uint32) >> np.uint32(16)).astype(np.uint16).tobytes()
