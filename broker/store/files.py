"""The files beside the database: payloads in packs, whole states and models as safetensors.

Payloads are megabytes and facts are bytes, so they are kept apart: a payload is written once, and
a pack is removed whole when no start needs it any more.

Other programs can read all safetensors files. The library checks what is read. What is written is
laid out here, because the library cannot make bfloat16 from numpy and hides why a disk refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray
from safetensors import SafetensorError, deserialize, safe_open

from narrows.broker.records import Digests, FragmentState
from narrows.proto.codec import F32, all_finite, round_to_dtype
from narrows.proto.errors import ConfigError, ErrorCode, StateError
from narrows.proto.layout import Fragment, element_count
from narrows.proto.messages import DtypeName, Layout, LayoutEntry

PACK_BYTES: Final = 256 << 20
"""A pack is closed once it has as many bytes."""

_NAMES: Final = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_STORED: Final = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
"""How numpy reads and writes the elements of a safetensors file, by its names of dtypes."""

_ARRAYS: Final = ("global", "momentum", "published")
"""The tensors of a state file."""

REMEDY: Final = (
    "Put a backup of the directory in its place. If the database can still be read, `narrows "
    "journal audit` finds what is whole, and `narrows journal rollback` makes a new directory of it"
)


class NotWritten(OSError):
    """The bytes were not taken. Nothing has changed; try again later."""

    def __init__(
        self,
        file: object,
        error: object,
        remedy: str = "Make room on that disk; if it has room, check it",
    ) -> None:
        super().__init__(f"{file} cannot be written: {error}. {remedy}")


class DiskFull(NotWritten):
    """The disk did not take the bytes."""


def damaged(file: Path, *, expected: str, got: str) -> StateError:
    """The error for a file of a state directory that is not as it was written."""
    return StateError(
        ErrorCode.STATE_DAMAGED, f"{file} is damaged", expected=expected, got=got, remedy=REMEDY
    )


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder durable; before that, a new file may be gone after a crash."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class Place(NamedTuple):
    """Where the chunks of a contribution lie, one after another."""

    digest: str
    pack: int | None
    """Number of the pack. None, as are `offset` and `sizes`, once no start needs the chunks."""
    offset: int
    sizes: str
    """Bytes of each chunk, as JSON."""


@dataclass(eq=False)
class Packs:
    """The packs of one state directory: `packs/00000012.pack`.

    A process never appends to a pack that it finds at its start, nor to one that has failed: after
    a failed fsync the end of a pack may be in the page cache only, and the next fsync would succeed
    without it.
    """

    folder: Path
    durable: bool
    """False: without fsync, for simulations."""
    number: int = 0
    """Number of the pack that was opened last; 0: none yet."""
    _fd: int = -1
    """The descriptor of that pack; -1: none is open."""
    _begin: int = 0
    """Offset of the newest append in that pack."""

    def append(self, payloads: Sequence[Sequence[bytes]]) -> list[Place]:
        """Writes the chunks of each payload; they are durable when it returns. Raises DiskFull."""
        places: list[Place] = []
        try:
            if self._fd < 0 or os.fstat(self._fd).st_size >= PACK_BYTES:
                self._open_next()
            self._begin = os.fstat(self._fd).st_size
            end = self._begin
            for chunks in payloads:
                sizes = [len(chunk) for chunk in chunks]
                text = msgspec.json.encode(sizes).decode()
                places.append(Place(payload_digest(chunks), self.number, end, text))
                end += sum(sizes)
                for chunk in chunks:
                    view = memoryview(chunk)
                    while view:
                        view = view[os.write(self._fd, view) :]
            if self.durable:
                os.fdatasync(self._fd)
        except OSError as error:
            self.take_back()
            raise DiskFull(self.folder, error) from error
        return places

    def take_back(self) -> None:
        """Frees the newest append, which may be what fills the disk: it is not durable, or its row
        is not. The same payloads come again, in another pack."""
        with suppress(OSError):
            if self._fd >= 0 and self._begin:
                os.ftruncate(self._fd, self._begin)
            elif self._fd >= 0:
                self.path(self.number).unlink()
        with suppress(OSError):
            self.close()

    def read(self, place: Place, whose: str) -> tuple[bytes, ...]:
        """The chunks at a place; `whose` tells in a StateError which payload is damaged."""
        if place.pack is None:
            raise damaged(self.folder, expected=whose, got="a row that says it is not needed")
        path = self.path(place.pack)
        try:
            sizes = msgspec.json.decode(place.sizes, type=list[int])
            with path.open("rb") as file:
                file.seek(place.offset)
                chunks = tuple(file.read(size) for size in sizes)
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            raise damaged(path, expected=whose, got=str(error)) from error
        got = payload_digest(chunks)
        if got != place.digest:
            raise damaged(
                path,
                expected=f"{whose}, at {place.offset} with digest {place.digest}",
                got=got,
            )
        return chunks

    def path(self, number: int) -> Path:
        """The file of a pack."""
        return self.folder / f"{number:08d}.pack"

    def close(self) -> None:
        """Closes the pack that is being written; the next append opens another one."""
        if self._fd >= 0:
            fd = self._fd
            # A close that fails leaves no descriptor either.
            self._fd = -1
            os.close(fd)

    def _open_next(self) -> None:
        self.close()
        # A number that was set aside is not used again: that pack may be put back.
        aside = self.folder.parent.glob("newer-*/*.pack")
        numbers = [int(path.stem) for path in (*self.folder.glob("*.pack"), *aside)]
        self.number = 1 + max(numbers, default=self.number)
        self._begin = 0
        self._fd = os.open(
            self.path(self.number), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600
        )
        if self.durable:
            sync_folder(self.folder)


def payload_digest(chunks: Iterable[bytes]) -> str:
    """xxh3_64 over the size of each chunk, in 8 bytes, and its bytes; 16 hex digits."""
    hasher = xxhash.xxh3_64()
    for chunk in chunks:
        hasher.update(len(chunk).to_bytes(8, "little"))
        hasher.update(chunk)
    return hasher.hexdigest()


def state_path(folder: Path, index: int, version: int) -> Path:
    """The file of a fragment's state in a state directory."""
    return folder / "fragments" / f"{index}-{version}.safetensors"


def write_states(
    folder: Path, states: Iterable[FragmentState], *, durable: bool = True
) -> list[tuple[int, int]]:
    """Writes whole states and returns their (fragment, version). Their names are durable then, so
    that rows may refer to them. Raises DiskFull."""
    written: list[tuple[int, int]] = []
    for state in states:
        arrays = {
            "global": state.global_,
            "momentum": state.momentum,
            "published": state.published,
        }
        entries = [
            LayoutEntry(name, array.shape, "float32", "mean") for name, array in arrays.items()
        ]
        path = state_path(folder, state.fragment, state.version)
        _write(path, entries, arrays.values(), {}, durable)
        written.append((state.fragment, state.version))
    if durable:
        sync_folder(folder / "fragments")
    return written


def read_state(folder: Path, index: int, version: int, digests: Digests) -> FragmentState:
    """Reads what `write_states` wrote. Raises StateError if the file is missing, unreadable, or its
    arrays have other digests."""
    path = state_path(folder, index, version)
    try:
        with safe_open(path, framework="numpy") as file:
            arrays: dict[str, F32] = {name: file.get_tensor(name) for name in _ARRAYS}
    except (OSError, SafetensorError) as error:
        raise damaged(path, expected="the state of a fragment", got=str(error)) from error
    if any(array.dtype != np.float32 or array.ndim != 1 for array in arrays.values()):
        raise damaged(path, expected="float32 vectors", got="other tensors")
    state = FragmentState.of(
        index, version, arrays["global"], arrays["momentum"], arrays["published"]
    )
    if state.digests != digests:
        raise damaged(path, expected=f"digests {digests}", got=str(state.digests))
    return state


def read_initial(path: Path, layout: Layout, table: Sequence[Fragment]) -> list[FragmentState]:
    """Version 0 from float32, float16 or bfloat16 tensors with the layout's names and shapes.

    Tensors that the layout does not name are skipped. Raises ConfigError if the file cannot be
    read, or a tensor is missing, has another shape or dtype, or is not finite.
    """
    try:
        stored = dict(deserialize(path.read_bytes()))  # type: ignore[no-untyped-call]
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"{path}",
            expected="a safetensors file",
            got=str(error),
            remedy="Correct broker.init, or leave it out:"
            " the first learner's parameters begin then",
        ) from error
    tensors = [_stored_tensor(path, stored, entry) for entry in layout.entries]
    states: list[FragmentState] = []
    for fragment in table:
        values = np.empty(fragment.elements, np.float32)
        for piece in fragment.pieces:
            found = tensors[piece.tensor][piece.start : piece.start + piece.count]
            if found.dtype == np.uint16:
                # A bfloat16 is the upper half of a float32.
                found = (found.astype(np.uint32) << np.uint32(16)).view(np.float32)
            own = values[piece.offset : piece.offset + piece.count]
            own[:] = found
            if not all_finite(own):
                name = layout.entries[piece.tensor].name
                raise ConfigError(f"{path}: {name}", expected="finite values", got="others")
        states.append(FragmentState.of(fragment.index, 0, values, np.zeros_like(values), values))
    return states


def _stored_tensor(path: Path, stored: Mapping[str, Any], entry: LayoutEntry) -> NDArray[Any]:
    """The elements of the tensor that a layout entry names, as the file has them."""
    tensor = stored.get(entry.name, {"shape": "no such tensor", "dtype": ""})
    # A scalar may stand in the file with no dimension and in the layout with one.
    same = (tuple(tensor["shape"]) or (1,)) == (entry.shape or (1,))
    if not same or tensor["dtype"] not in _STORED:
        raise ConfigError(
            f"{path} does not fit the model",
            expected=f"{entry.name} of shape {list(entry.shape)}, {' or '.join(_STORED)}",
            got=f"{tensor['shape']} {tensor['dtype']}".strip(),
        )
    return np.frombuffer(tensor["data"], _STORED[tensor["dtype"]])


def export_model(
    path: Path,
    layout: Layout,
    table: Sequence[Fragment],
    values: Sequence[F32],
    metadata: Mapping[str, str],
) -> None:
    """Writes the model, given per fragment as float32 (n,), with the layout's names, shapes and
    dtypes. Tied names and buffers are not in it: the broker does not know them. Raises DiskFull.
    """
    # The file has the tensors in the layout's order, whichever fragments their pieces are in.
    pieces = {
        (piece.tensor, piece.start): values[fragment.index][
            piece.offset : piece.offset + piece.count
        ]
        for fragment in table
        for piece in fragment.pieces
    }
    parts = (
        _as_dtype(pieces[tensor, start], layout.entries[tensor].dtype)
        for tensor, start in sorted(pieces)
    )
    _write(path, layout.entries, parts, {"format": "pt", **metadata}, durable=True)
    sync_folder(path.parent)


def _as_dtype(values: F32, dtype: DtypeName) -> NDArray[Any]:
    """Values (n,) as a tensor of that dtype stores them, rounded half to even."""
    if dtype == "float32":
        return values
    rounded = np.empty_like(values)
    round_to_dtype(values, dtype, rounded)
    if dtype == "float16":
        return rounded.astype(np.float16)
    return (rounded.view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def _write(
    path: Path,
    entries: Sequence[LayoutEntry],
    parts: Iterable[NDArray[Any]],
    metadata: Mapping[str, str],
    durable: bool,
) -> None:
    """Writes the elements of tensors, one after another, to a new file that then takes the name:
    it appears whole or not at all."""
    header: dict[str, object] = {"__metadata__": metadata}
    start = 0
    for entry in entries:
        name = _NAMES[entry.dtype]
        end = start + element_count(entry) * np.dtype(_STORED[name]).itemsize
        header[entry.name] = {"dtype": name, "shape": entry.shape, "data_offsets": (start, end)}
        start = end
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)  # Blanks align the data, as the format asks.
    unfinished = path.with_name(f"{path.name}.new")
    try:
        with unfinished.open("wb") as file:
            file.writelines([len(text).to_bytes(8, "little"), text])
            file.writelines(part.data for part in parts)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        unfinished.rename(path)
    except OSError as error:
        with suppress(OSError):
            unfinished.unlink()
        raise DiskFull(path, error) from error
