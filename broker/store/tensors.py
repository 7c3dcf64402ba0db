"""Tensors as safetensors files: whole fragment states, version 0 to begin with, the export.

Other programs can read all of them. The library checks what is read. What is written is laid out
here, because the library cannot make bfloat16 from numpy and hides why a disk refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from narrows.broker.records import Digests, FragmentState
from narrows.broker.store.packs import DiskFull, damaged, sync_folder
from narrows.proto.codec import F32, all_finite, round_to_dtype
from narrows.proto.errors import ConfigError
from narrows.proto.layout import Fragment, element_count
from narrows.proto.messages import DtypeName, Layout, LayoutEntry

_NAMES: Final = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_STORED: Final[dict[str, np.dtype[Any]]] = {
    name: np.dtype(stored) for name, stored in (("F32", "<f4"), ("F16", "<f2"), ("BF16", "<u2"))
}
"""How the elements of a safetensors file are read and written, by its names of dtypes."""

_ARRAYS: Final = ("global", "momentum", "published")


def state_path(folder: Path, fragment: int, version: int) -> Path:
    """The file of a fragment's state in a state directory."""
    return folder / "fragments" / f"{fragment}-{version}.safetensors"


def write_state(folder: Path, state: FragmentState, *, durable: bool = True) -> None:
    """Writes the three arrays of a fragment, each float32 (n,). The file appears whole or not at
    all; its name is durable once the caller has synced its folder. Raises DiskFull."""
    arrays = (state.global_, state.momentum, state.published)
    entries = [LayoutEntry(name, state.global_.shape, "float32", "mean") for name in _ARRAYS]
    metadata = {"fragment": str(state.fragment), "version": str(state.version)}
    parts = ((tensor, 0, values) for tensor, values in enumerate(arrays))
    path = state_path(folder, state.fragment, state.version)
    _write(path, entries, parts, metadata, durable)


def read_state(folder: Path, fragment: int, version: int, digests: Digests) -> FragmentState:
    """Reads what `write_state` wrote. Raises StateError if the file is missing, unreadable, or its
    arrays have other digests."""
    path = state_path(folder, fragment, version)
    try:
        with safe_open(path, framework="numpy") as file:
            arrays: list[F32] = [file.get_tensor(name) for name in _ARRAYS]
    except (OSError, SafetensorError) as error:
        raise damaged(path, expected="the state of a fragment", got=str(error)) from error
    if any(array.dtype != np.float32 or array.ndim != 1 for array in arrays):
        raise damaged(path, expected="float32 vectors", got="other tensors")
    state = FragmentState.of(fragment, version, *arrays)
    if state.digests != digests:
        raise damaged(path, expected=f"digests {digests}", got=str(state.digests))
    return state


def read_initial(path: Path, layout: Layout, table: Sequence[Fragment]) -> list[FragmentState]:
    """Version 0 from float32, float16 or bfloat16 tensors with the layout's names and shapes.

    Tensors that the layout does not name are skipped. Raises ConfigError if the file cannot be
    read, or a tensor is missing, has another shape or dtype, or is not finite.
    """
    tensors = _find(path, layout)
    states: list[FragmentState] = []
    for fragment in table:
        values = np.empty(fragment.elements, np.float32)
        for piece in fragment.pieces:
            stored, start = tensors[piece.tensor]
            start += piece.start * stored.itemsize
            found = np.fromfile(path, stored, piece.count, offset=start)
            if stored == _STORED["BF16"]:
                found = (found.astype(np.uint32) << np.uint32(16)).view(np.float32)
            part = values[piece.offset : piece.offset + piece.count]
            part[:] = found
            if not all_finite(part):
                name = layout.entries[piece.tensor].name
                raise ConfigError(f"{path}: {name}", expected="finite values", got="others")
        states.append(FragmentState.of(fragment.index, 0, values, np.zeros_like(values), values))
    return states


def export_model(
    path: Path,
    layout: Layout,
    table: Sequence[Fragment],
    values: Sequence[F32],
    metadata: Mapping[str, str],
) -> None:
    """Writes the model, given per fragment as float32 (n,), with the layout's names, shapes and
    dtypes. Tied names and buffers are not in it: the broker does not know them. Raises OSError.
    """
    parts = (
        (piece.tensor, piece.start, each[piece.offset : piece.offset + piece.count])
        for fragment, each in zip(table, values, strict=True)
        for piece in fragment.pieces
    )
    _write(path, layout.entries, parts, {"format": "pt", **metadata}, durable=True)
    sync_folder(path.parent)


def _write(
    path: Path,
    entries: Sequence[LayoutEntry],
    parts: Iterable[tuple[int, int, F32]],
    metadata: Mapping[str, str],
    durable: bool,
) -> None:
    """Writes tensors from parts, each (tensor, its first element there, values (n,)), to a new file
    that then takes the name."""
    header: dict[str, object] = {"__metadata__": metadata}
    starts = [0]
    for entry in entries:
        name = _NAMES[entry.dtype]
        starts.append(starts[-1] + element_count(entry) * _STORED[name].itemsize)
        header[entry.name] = {"dtype": name, "shape": entry.shape, "data_offsets": starts[-2:]}
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)  # Blanks align the data, as the format asks.
    unfinished = path.with_name(f"{path.name}.new")
    try:
        with unfinished.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for tensor, first, values in parts:
                stored = _as_dtype(values, entries[tensor].dtype)
                file.seek(8 + len(text) + starts[tensor] + first * stored.itemsize)
                file.write(stored.data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        unfinished.rename(path)
    except OSError as error:
        with suppress(OSError):
            unfinished.unlink()
        raise DiskFull(error.errno, f"{path}: {error.strerror}") from error


def _as_dtype(values: F32, dtype: DtypeName) -> NDArray[Any]:
    """Values (n,) as a tensor of that dtype stores them, rounded half to even."""
    if dtype == "float32":
        return np.ascontiguousarray(values, _STORED["F32"])
    rounded = np.empty_like(values)
    round_to_dtype(values, dtype, rounded)
    if dtype == "float16":
        return rounded.astype(_STORED["F16"])
    return (rounded.view(np.uint32) >> np.uint32(16)).astype(_STORED["BF16"])


def _find(path: Path, layout: Layout) -> list[tuple[np.dtype[Any], int]]:
    """How and where each tensor of the layout is stored in a file: the elements, the first byte."""
    try:
        # The library checks the header and the length of the file.
        with safe_open(path, framework="numpy"), path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = msgspec.json.decode(file.read(length))
    except (OSError, SafetensorError) as error:
        remedy = "Correct broker.init, or leave it out: the first learner's parameters begin then"
        raise ConfigError(
            f"{path}", expected="a safetensors file", got=str(error), remedy=remedy
        ) from error
    found: list[tuple[np.dtype[Any], int]] = []
    for entry in layout.entries:
        tensor = header.get(entry.name, {"shape": "no such tensor", "dtype": ""})
        # A scalar may stand in the file with no dimension and in the layout with one.
        same = (tuple(tensor["shape"]) or (1,)) == (entry.shape or (1,))
        if not same or tensor["dtype"] not in _STORED:
            raise ConfigError(
                f"{path} does not fit the model",
                expected=f"{entry.name} of shape {list(entry.shape)}, {' or '.join(_STORED)}",
                got=f"{tensor['shape']} {tensor['dtype']}".strip(),
            )
        found.append((_STORED[tensor["dtype"]], 8 + length + tensor["data_offsets"][0]))
    return found
