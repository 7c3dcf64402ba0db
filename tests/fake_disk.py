"""A disk in memory that forgets what was not synced, fails and crashes where a test wants it.

A process that dies is one that does not use the disk any more: what it wrote can still be read.

Every call has a number, from 1 on. A call may raise an OSError, before or after it has done part
of its work, or be the last one of all: then the power is gone, and `survivors` yields what may be
on the disk afterwards.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final

from narrows.broker.storage.durable_files import Damaged

BLOCK_BYTES: Final = 16
"""Size of the blocks that reach the disk in any order; small, so that small writes are torn in many
ways."""


class Crash(BaseException):
    """The power is gone: no handler may see it and tidy up."""


@dataclass
class Write:
    """Bytes that may be on the disk, in part or not at all."""

    offset: int
    data: bytes


@dataclass(eq=False)
class File:
    """One file. Programs see `data`; the disk may hold something else."""

    data: bytearray = field(default_factory=bytearray)
    stable: bytes = b""
    pending: list[Write] = field(default_factory=list[Write])
    """The next sync makes them durable."""
    dropped: list[Write] = field(default_factory=list[Write])
    """Writes whose sync has failed. They can be read, but no later sync makes them durable."""

    def write(self, offset: int, data: bytes) -> None:
        self.data.extend(bytes(max(0, offset - len(self.data))))
        self.data[offset : offset + len(data)] = data
        self.pending.append(Write(offset, data))

    def sync(self) -> None:
        self.stable = replayed(self.stable, self.pending)
        self.pending = []

    def fail_to_sync(self) -> None:
        self.dropped += self.pending
        self.pending = []


def replayed(content: bytes, writes: Sequence[Write]) -> bytes:
    target = bytearray(content)
    for write in writes:
        target.extend(bytes(max(0, write.offset - len(target))))
        target[write.offset : write.offset + len(write.data)] = write.data
    return bytes(target)


class FakeDisk:
    """`Files` in memory."""

    def __init__(self, files: dict[str, bytes] | None = None) -> None:
        self.calls: list[str] = []
        """Names of the calls so far."""
        self.errors: dict[int, OSError] = {}
        """Raised by the calls with these numbers."""
        self.crash_at = 0
        """The number of the last call; 0: none."""
        self.preallocates = True
        self._names = {
            name: File(bytearray(content), content) for name, content in (files or {}).items()
        }
        self._stable_names = dict(self._names)
        self._handles: dict[int, tuple[File, int]] = {}
        self._failed: set[int] = set()

    # The primitives.

    def names(self) -> list[str]:
        self._call("names")
        return list(self._names)

    def size_bytes(self, name: str) -> int:
        self._call("size")
        return len(self._file(name).data)

    def read(self, name: str, offset: int, target: memoryview) -> None:
        self._call("read")
        content = self._file(name).data[offset : offset + len(target)]
        if len(content) < len(target):
            raise Damaged(f"{name}: ends too early")
        target[:] = content

    def create(self, name: str, size_bytes: int) -> int:
        error = self._begin("create")
        if name in self._names:
            raise FileExistsError(errno.EEXIST, "exists", name)
        file = self._names[name] = File()
        if self.preallocates:
            file.write(0, bytes(size_bytes // 2 if error else size_bytes))
        self._end(error)
        handle = len(self.calls)
        self._handles[handle] = (file, 0)
        return handle

    def write(self, handle: int, parts: Sequence[bytes | memoryview]) -> None:
        error = self._begin("write")
        file, offset = self._handles[handle]
        data = b"".join(parts)
        if error:
            data = data[: len(data) // 2]
        file.write(offset, data)
        self._handles[handle] = (file, offset + len(data))
        self._end(error)

    def sync(self, handle: int) -> None:
        file, _ = self._handles[handle]
        assert handle not in self._failed, "a descriptor is synced again after a failure"
        error = self._begin("sync")
        if error:
            self._failed.add(handle)
            file.fail_to_sync()
        self._end(error)
        file.sync()

    def close(self, handle: int) -> None:
        error = self._begin("close")
        del self._handles[handle]
        self._end(error)

    def unlink(self, name: str) -> None:
        error = self._begin("unlink")
        if not error:
            if name not in self._names:
                raise FileNotFoundError(errno.ENOENT, "missing", name)
            del self._names[name]
        self._end(error)

    def sync_directory(self) -> None:
        self._end(self._begin("sync_directory"))
        self._stable_names = dict(self._names)

    # What goes wrong.

    def _begin(self, call: str) -> OSError | None:
        if len(self.calls) == self.crash_at > 0:
            raise Crash
        self.calls.append(call)
        return self.errors.get(len(self.calls))

    def _end(self, error: OSError | None) -> None:
        """Ends the process. Data that was written or named before a crash may be on the disk; a
        sync was in vain."""
        if len(self.calls) == self.crash_at:
            raise Crash
        if error:
            raise error

    def _call(self, call: str) -> None:
        self._end(self._begin(call))

    def _file(self, name: str) -> File:
        if name not in self._names:
            raise FileNotFoundError(errno.ENOENT, "missing", name)
        return self._names[name]

    # What comes after.

    def contents(self) -> dict[str, bytes]:
        """The files as programs see them."""
        return {name: bytes(file.data) for name, file in self._names.items()}

    def survivors(self, random: Random, count_max: int) -> Iterator[dict[str, bytes]]:
        """Possible contents of the disk after the power went, each at most once.

        All contents that a single torn write or missing name can cause, if these are not more than
        `count_max`; otherwise a choice of them. Then combinations, at random.
        """
        seen: set[tuple[tuple[str, bytes], ...]] = set()
        for files in self._choices(random, count_max):
            key = tuple(sorted(files.items()))
            if key not in seen:
                seen.add(key)
                yield files
            if len(seen) == count_max:
                return

    def _choices(self, random: Random, count: int) -> Iterator[dict[str, bytes]]:
        old, new = self._stable_names, self._names
        everything = {name: replayed(file.stable, unsynced(file)) for name, file in new.items()}
        yield everything
        yield {name: file.stable for name, file in old.items()}
        single = [
            everything | {name: content}
            for name, file in new.items()
            for content in torn(file.stable, unsynced(file))
        ]
        single += [without(everything, name) for name in new.keys() - old.keys()]
        single += [everything | {name: old[name].stable} for name in old.keys() - new.keys()]
        random.shuffle(single)
        yield from single
        for _ in range(count):
            names = {name: random.choice((old, new)).get(name) for name in old | new}
            yield {name: scattered(file, random) for name, file in names.items() if file}


def without(files: dict[str, bytes], name: str) -> dict[str, bytes]:
    return {each: content for each, content in files.items() if each != name}


def unsynced(file: File) -> list[Write]:
    return [*file.dropped, *file.pending]


def torn(content: bytes, writes: Sequence[Write]) -> Iterator[bytes]:
    """Cut off after every byte of every write; and each block and each write alone missing."""
    for index, write in enumerate(writes):
        before = replayed(content, writes[:index])
        zeros = not any(write.data)
        for length in (0, 1, len(write.data) - 1) if zeros else range(len(write.data)):
            yield replayed(before, [Write(write.offset, write.data[:length])])
        yield replayed(content, [*writes[:index], *writes[index + 1 :]])
        for block in [] if zeros else blocks(write):
            rest = [each for each in blocks(write) if each.offset != block.offset]
            yield replayed(content, [*writes[:index], *rest, *writes[index + 1 :]])


def blocks(write: Write) -> list[Write]:
    starts = range(0, len(write.data), BLOCK_BYTES)
    return [Write(write.offset + at, write.data[at : at + BLOCK_BYTES]) for at in starts]


def scattered(file: File, random: Random) -> bytes:
    """Any of the blocks that were not synced, and perhaps one in part."""
    odds = random.random()
    chosen = [
        block for write in unsynced(file) for block in blocks(write) if random.random() < odds
    ]
    if chosen and random.random() < 0.5:
        at = random.randrange(len(chosen))
        data = chosen[at].data
        chosen[at] = Write(chosen[at].offset, data[: random.randrange(len(data) + 1)])
    return replayed(file.stable, chosen)
