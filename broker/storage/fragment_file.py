"""The file of one fragment in a checkpoint: three arrays, and the norms that the merge remembers.

It is a safetensors file, so that other programs can read a checkpoint.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from msgspec import Struct

from narrows.broker.merging import (
    FragmentState,
    NormHistory,
    RoundNorms,
)
from narrows.broker.storage.durable_files import Damaged, open_file, read_into
from narrows.broker.storage.safetensors_format import bytes_of, safetensors_header
from narrows.proto.codec import F32
from narrows.proto.frames import digest
from narrows.proto.messages import DtypeName

ARRAYS: Final = ("global", "momentum", "published")
NORMS: Final = "norms"


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


def fragment_name(index: int) -> str:
    """Name of a fragment's file."""
    return f"fragment-{index:05d}.safetensors"


def fragment_header(elements: int, rows: int, pieces: int) -> bytes:
    """The bytes in front of the arrays in a fragment's file; `rows` of norms come last."""
    arrays: list[tuple[str, DtypeName, tuple[int, ...]]] = [
        (name, "float32", (elements,)) for name in ARRAYS
    ]
    if rows:
        arrays.append((NORMS, "float32", (rows, pieces)))
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


def read_fragment(directory_fd: int, index: int, entry: FragmentEntry) -> FragmentState:
    """A fragment as the manifest describes it. Raises FileNotFoundError, Damaged."""
    name, rows = fragment_name(index), entry.rows
    header = fragment_header(entry.elements, rows, entry.pieces)
    with open_file(directory_fd, name) as (fd, size_bytes):
        if size_bytes != len(header) + 4 * (entry.elements * len(ARRAYS) + rows * entry.pieces):
            raise Damaged(f"{name}: {size_bytes} bytes")
        arrays: dict[str, F32] = {array: np.empty(entry.elements, np.float32) for array in ARRAYS}
        if rows:
            arrays[NORMS] = np.empty((rows, entry.pieces), np.float32)
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
        arrays["published"], _history(entry, arrays.get(NORMS)),
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
