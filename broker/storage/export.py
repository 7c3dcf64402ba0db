"""A model as a file of tensors, with the layout's names, shapes and dtypes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np

from narrows.broker.storage.durable_files import directory, write_file
from narrows.broker.storage.manifest import CheckpointContent
from narrows.broker.storage.safetensors_format import NO_METADATA, bytes_of, safetensors_header
from narrows.proto.codec import F32, round_to_dtype
from narrows.proto.fragments import build_table
from narrows.proto.messages import DtypeName


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
        yield safetensors_header([(each.name, each.dtype, each.shape) for each in layout], metadata)
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
        return bytes_of(values)
    rounded = np.empty_like(values)
    round_to_dtype(values, dtype, rounded)
    return (rounded.view(np.uint32) >> np.uint32(16)).astype(np.uint16).tobytes()
