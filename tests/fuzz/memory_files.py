"""The journal's files in memory, for reading only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from narrows.broker.storage.durable_files import Damaged


class MemoryFiles:
    """`broker.storage.disk.Files` over bytes."""

    def __init__(self, contents: Mapping[str, bytes]) -> None:
        self._contents = contents

    def names(self) -> list[str]:
        return list(self._contents)

    def size_bytes(self, name: str) -> int:
        return len(self._contents[name])

    def read(self, name: str, offset: int, target: memoryview) -> None:
        found = self._contents[name][offset : offset + len(target)]
        if len(found) < len(target):
            raise Damaged(f"{name}: ends too early")
        target[:] = found

    def create(self, name: str, size_bytes: int) -> int:
        raise AssertionError("a reader writes")

    def write(self, handle: int, parts: Sequence[bytes | memoryview]) -> None:
        raise AssertionError("a reader writes")

    def sync(self, handle: int) -> None:
        raise AssertionError("a reader writes")

    def close(self, handle: int) -> None:
        raise AssertionError("a reader writes")

    def unlink(self, name: str) -> None:
        raise AssertionError("a reader writes")

    def sync_directory(self) -> None:
        raise AssertionError("a reader writes")
