"""The seals of a state directory beside the journal: `seal.json`, at its top and per checkpoint.

A seal file names every file beside it with the seal of its bytes, the run, and its own place; it is
sealed itself. So no file can be altered, left out, added, or brought from another place or run. The
files of a checkpoint are those that its folder holds when it is finished, whatever they are. At the
top they are those that are called `run.*`, and the segments from before the directory was sealed.

A file at the top is replaced while the broker lives. Both states are sealed before that and the new
one alone after it, so that a crash in between is no alteration.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta, Struct

from narrows.broker.storage.chain import Chain
from narrows.broker.storage.durable_files import (
    Damaged,
    StateError,
    directory,
    open_file,
    read_into,
    write_file,
)
from narrows.broker.storage.journal import Journal
from narrows.broker.storage.seal import SealKey, altered, unequal
from narrows.proto.errors import ErrorCode
from narrows.proto.messages import Count

FORMAT: Final = 1
SEAL_FILE: Final = "seal.json"
SEAL_FILE_BYTES_MAX: Final = 64 << 20
BLOCK_BYTES: Final = 1 << 22
MISSING: Final = ""
"""The seal of a file that is not there."""

_JOURNAL: Final = "journal/"
_TOP_FILE: Final = re.compile(r"run\.[a-z0-9.]+")
_MOVE: Final = "; if an older checkpoint is whole, move {0} out of the state directory instead"


Seal: TypeAlias = Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?\Z")]
"""A seal in hex, or MISSING."""

States: TypeAlias = Annotated[list[Seal], Meta(min_length=1)]
FileName: TypeAlias = Annotated[str, Meta(pattern="^[^\0]+\\Z")]


class SealFile(Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a seal file."""

    format: int
    run_id: str
    place: str
    """Name of the checkpoint's folder; empty at the top."""
    journal: tuple[Count, Seal]
    """A record of the journal and its seal: the newest in the checkpoint. Empty: unsealed."""
    files: dict[FileName, States]
    """Seals of the states that each file may be in, by name."""
    seal: Seal = ""
    """Seal of this with an empty seal."""


class DirectorySeal:
    """Makes and compares the seals in one state directory."""

    def __init__(self, path: Path, directory_fd: int, key: SealKey) -> None:
        self.path = path
        self.key = key
        self._fd = directory_fd
        self._top: dict[str, list[str]] = {}
        self._anchors: dict[int, bytes] = {}
        self._needed_from: int | None = None
        self._newest: tuple[int, str] = (0, "")
        """The newest record that a checkpoint holds, and the checkpoint's folder."""

    def check(
        self, run_id: str | None, places: Sequence[str], *, is_new: bool, but: str = ""
    ) -> None:
        """Compares every seal but those of the journal, and of the file `but` at the top.

        `places` are the folders of the checkpoints. Raises StateError for the first that differs.
        """
        if SEAL_FILE not in os.listdir(self._fd):
            if is_new:
                return
            raise StateError(
                ErrorCode.STATE_DAMAGED, f"{self.path}: it is not sealed, and a seal key is set",
                remedy="somebody may have taken the seals off. If it was never sealed, seal it as "
                f"it is: narrows journal seal {self.path} --seal-key FILE",
            )  # fmt: skip
        found = self._read(self._fd, "", run_id=None)
        self._top = found.files
        names = [name for name in os.listdir(self._fd) if _TOP_FILE.fullmatch(name)]
        listed = [name for name in found.files if not name.startswith(_JOURNAL)]
        self._compare(self._fd, "", found.files, {*names, *listed} - {but})
        held: list[tuple[int, str]] = []
        for place in places:
            with directory(self._fd, place) as fd:
                each = self._read(fd, place, run_id)
                names = [name for name in os.listdir(fd) if name != SEAL_FILE]
                if name := unequal(names, list(each.files)):
                    what = "was added" if name in names else "is missing"
                    raise altered(f"{place}/{name}", what)
                self._compare(fd, f"{place}/", each.files, set(names))
            number, seal = each.journal
            held.append((number, place))
            if seal:
                self._anchors[number] = bytes.fromhex(seal)
        self._needed_from = min(held, default=(0, ""))[0] + 1
        self._newest = max(held, default=(0, ""))

    def removed(self, journal: Journal | None) -> StateError | None:
        """The error for a journal without a record, as the last `check` found the checkpoints.

        It is legitimate after a rollback, and where the operator has moved the journal away.
        """
        number, place = self._newest
        if not number or (journal is not None and journal.newest):
            return None
        return StateError(
            ErrorCode.STATE_DAMAGED, f"{self.path}/journal: it holds no record",
            expected=f"record {number} at least, which {place} follows",
            got="no journal" if journal is None else "an empty journal",
            remedy="if you have just moved the journal away or rolled the run back, start the "
            "broker with its journal: it goes on behind that record. Else somebody has removed the "
            "journal and the rounds after that record: stop the broker and restore a backup",
        )  # fmt: skip

    def chain(self) -> Chain:
        """The chain of the journal, as the last `check` has found it."""
        adopted = {
            name.removeprefix(_JOURNAL): seals[0]
            for name, seals in self._top.items()
            if name.startswith(_JOURNAL)
        }
        return Chain(self.key, adopted, dict(self._anchors), self._needed_from)

    @contextmanager
    def replacing(self, run_id: str, contents: Mapping[str, bytes]) -> Generator[None]:
        """Seals files at the top which the caller replaces in the block, one after the other."""
        new = {name: self.key.seal("file", [data]).hex() for name, data in contents.items()}
        self._forget_removed()
        both = {name: [*self._top.get(name, [MISSING]), seal] for name, seal in new.items()}
        self._write_top(run_id, {**self._top, **both})
        yield
        self._write_top(run_id, {**self._top, **{name: [seal] for name, seal in new.items()}})

    def _forget_removed(self) -> None:
        """Forgets adopted segments that are gone, before a new segment can have such a name."""
        here = set[str]()
        if "journal" in os.listdir(self._fd):
            with directory(self._fd, "journal") as fd:
                here = {_JOURNAL + name for name in os.listdir(fd)}
        self._top = {
            name: seals
            for name, seals in self._top.items()
            if name in here or not name.startswith(_JOURNAL)
        }

    def seal_folder(self, fd: int, place: str, run_id: str, journal: tuple[int, bytes]) -> None:
        """Seals a finished folder as it is."""
        names = sorted(name for name in os.listdir(fd) if name != SEAL_FILE)
        seals = self._seals(fd, names)
        number, seal = journal
        anchor = number, seal.hex() if any(seal) else ""
        files = {name: [seals[name]] for name in names}
        write_file(fd, SEAL_FILE, [self._sealed(SealFile(FORMAT, run_id, place, anchor, files))])

    def adopt(self, run_id: str, journal: Mapping[str, int]) -> None:
        """Seals a directory that was not, as it is. `journal` has the newest record that each
        checkpoint holds, by the folder's name."""
        for place, number in journal.items():
            with directory(self._fd, place) as fd:
                if SEAL_FILE in os.listdir(fd):
                    os.unlink(SEAL_FILE, dir_fd=fd)
                self.seal_folder(fd, place, run_id, (number, b""))
                os.fsync(fd)
        names = [name for name in os.listdir(self._fd) if _TOP_FILE.fullmatch(name)]
        top = {name: [seal] for name, seal in self._seals(self._fd, names).items()}
        if "journal" in os.listdir(self._fd):
            with directory(self._fd, "journal") as fd:
                segments = self._seals(fd, sorted(os.listdir(fd)))
                top.update({_JOURNAL + name: [seal] for name, seal in segments.items()})
        self._write_top(run_id, top)

    # One file.

    def _write_top(self, run_id: str, files: dict[str, list[str]]) -> None:
        content = SealFile(FORMAT, run_id, "", (0, ""), files)
        temporary = f".new-{SEAL_FILE}"
        if temporary in os.listdir(self._fd):
            os.unlink(temporary, dir_fd=self._fd)
        write_file(self._fd, temporary, [self._sealed(content)])
        os.rename(temporary, SEAL_FILE, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        os.fsync(self._fd)
        self._top = files

    def _sealed(self, content: SealFile) -> bytes:
        seal = self.key.seal("seals", [msgspec.json.encode(content)]).hex()
        return msgspec.json.encode(msgspec.structs.replace(content, seal=seal))

    def _read(self, fd: int, place: str, run_id: str | None) -> SealFile:
        name = f"{place}/{SEAL_FILE}" if place else SEAL_FILE
        try:
            with open_file(fd, SEAL_FILE) as (file_fd, size_bytes):
                if size_bytes > SEAL_FILE_BYTES_MAX:
                    raise Damaged(f"{size_bytes} bytes")
                data = bytearray(size_bytes)
                read_into(file_fd, SEAL_FILE, memoryview(data))
            content = msgspec.json.decode(data, type=SealFile)
        except FileNotFoundError as error:
            raise altered(name, "it is missing" + _MOVE.format(place)) from error
        except (Damaged, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise altered(name, "it is no seal file", got=str(error)) from error
        if bytes(data) != self._sealed(msgspec.structs.replace(content, seal="")):
            raise altered(name, "does not match its own seal, or was made with another key")
        if content.place != place or (run_id is not None and content.run_id != run_id):
            got = f"{content.place or 'the top'} of run {content.run_id}"
            raise altered(name, "comes from another place", got=got)
        return content

    def _compare(
        self, fd: int, prefix: str, listed: Mapping[str, Sequence[str]], names: set[str]
    ) -> None:
        found = self._seals(fd, sorted(names))
        for name, seal in found.items():
            if name not in listed:
                raise altered(prefix + name, "was added")
            if seal not in listed[name]:
                what = "does not match its seal" if seal else "is missing"
                raise altered(prefix + name, what)

    def _seals(self, fd: int, names: Sequence[str]) -> dict[str, str]:
        """The seals of files; several are read at the same time."""
        work: Callable[[str], str] = lambda name: self._seal_of(fd, name)  # noqa: E731
        with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
            return dict(zip(names, pool.map(work, names), strict=True))

    def _seal_of(self, fd: int, name: str) -> str:
        try:
            with open_file(fd, name) as (file_fd, _):
                blocks = iter(lambda: os.read(file_fd, BLOCK_BYTES), b"")
                return self.key.seal("file", blocks).hex()
        except FileNotFoundError:
            return MISSING
        except (Damaged, OSError) as problem:
            raise altered(name, str(problem)) from problem


def is_sealed(directory_fd: int) -> bool:
    """True if the state directory says of itself that it is sealed."""
    try:
        return stat.S_ISREG(os.stat(SEAL_FILE, dir_fd=directory_fd, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False


def refuse_sealed(directory_fd: int, path: Path) -> None:
    """Raises StateError if the state directory is sealed: without the key it is not served."""
    if is_sealed(directory_fd):
        raise StateError(
            ErrorCode.STATE_DAMAGED, f"{path}: it is sealed, and no seal key is set",
            remedy="set security.seal_key to the file with the key. To give the seal up for ever,"
            f" move {path}/{SEAL_FILE} away",
        )  # fmt: skip
