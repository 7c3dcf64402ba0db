"""Text that every machine has, as byte tokens: Python's own sources, or a folder of the user's.

A hash of the file's *name* says whether it is text to train on or to validate with. So machines
with the same files split them alike, and a file that changes stays on its side.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from narrows.proto.errors import ConfigError

Bytes: TypeAlias = NDArray[np.uint8]
Tokens: TypeAlias = NDArray[np.int64]

PACKAGES: Final = ("asyncio", "email", "json", "unittest", "xml")
"""Packages of the standard library that are read besides its top-level modules."""

TESTS: Final = frozenset({"test", "tests"})
"""Folders that are left out: tests repeat one idiom thousands of times."""

GENERATED: Final = ("_sysconfigdata", "keyword.py", "sitecustomize.py", "stringprep.py", "token.py")
"""Beginnings of the names of modules that a script wrote or that belong to one machine."""

SUFFIXES: Final = frozenset({".c", ".h", ".js", ".md", ".py", ".rs", ".rst", ".tex", ".txt"})
"""Suffixes of the text files in a user's folder."""

SECTION_BYTES: Final = 256 << 10
"""Longer files are cut into sections, each with a side of its own, so that one long book has both
sides."""

VALIDATION_PERCENT: Final = 5

SIDE_BYTES_MIN: Final = 20_000
"""Each side needs so many bytes: more than a batch of the largest preset."""


@dataclass(frozen=True)
class Text:
    """The text of a run, uint8 of one dimension on each side."""

    train: Bytes
    validation: Bytes
    files: int
    """Files, or sections of long ones."""

    def __str__(self) -> str:
        sizes = f"{len(self.train):,} bytes to train on, {len(self.validation):,} to validate"
        return f"text of {self.files} files: {sizes}"

    def tokens(
        self, *, batch: int, context: int, order: str, skip: int = 0
    ) -> Iterator[tuple[Tokens, Tokens]]:
        """Endless batches (x, y) of the train text, int64 (batch, context); y is x one byte later.

        Each pass over the text has an order of its own, drawn from the string `order`. The first
        `skip` batches are left out, so that a learner that returns does not begin again.
        """
        starts = np.arange((len(self.train) - 1) // context) * context
        per_pass = len(starts) // batch
        a_pass, first = divmod(skip, per_pass)
        while True:
            rng = np.random.default_rng([xxhash.xxh3_64_intdigest(order.encode()), a_pass])
            mixed = rng.permutation(starts)
            for index in range(first, per_pass):
                windows = self._cut(self.train, mixed[index * batch :][:batch], context)
                yield windows[:, :-1], windows[:, 1:]
            a_pass += 1
            first = 0

    def validation_windows(self, *, context: int, count: int = 512) -> Tokens:
        """Windows that are the same for every learner, int64 (at most count, context + 1), spread
        evenly over the text."""
        last = len(self.validation) - context - 1
        starts = np.linspace(0, last, min(count, 1 + last // context)).astype(np.int64)
        return self._cut(self.validation, starts, context)

    @staticmethod
    def _cut(text: Bytes, starts: Tokens, context: int) -> Tokens:
        windows: Tokens = text[starts[:, None] + np.arange(context + 1)].astype(np.int64)
        return windows


def load_text(folder: Path | None = None) -> Text:
    """The text files below `folder`, or the sources of the running Python's standard library.

    Raises ConfigError if there is too little text.
    """
    files = _library() if folder is None else _folder(folder)
    sides: tuple[list[bytes], list[bytes]] = ([], [])
    for name in sorted(files):
        is_validation = xxhash.xxh3_64_intdigest(name.encode()) % 100 < VALIDATION_PERCENT
        sides[is_validation].append(files[name])
    train, validation = (np.frombuffer(b"".join(side), np.uint8) for side in sides)
    if min(len(train), len(validation)) < SIDE_BYTES_MIN:
        raise ConfigError(
            f"too little text in {folder or 'the standard library'}",
            expected=f"{SIDE_BYTES_MIN} bytes to train on and as many to validate, in files"
            f" {' '.join(sorted(SUFFIXES))}, which are split by name",
            got=f"{len(train)} and {len(validation)} in {len(files)} files",
            remedy="use twenty files or more, or longer ones",
        )
    return Text(train, validation, len(files))


def _library() -> dict[str, bytes]:
    root = Path(sysconfig.get_path("stdlib"))
    files = dict[str, bytes]()
    for pattern in ("*.py", *(f"{package}/**/*.py" for package in PACKAGES)):
        for path in root.glob(pattern):
            place = path.relative_to(root)
            if not TESTS.intersection(place.parts) and not path.name.startswith(GENERATED):
                files[place.as_posix()] = path.read_bytes()
    return files


def _folder(folder: Path) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.suffix in SUFFIXES and path.is_file() and not name.startswith("."):
            whole = path.read_bytes()
            for index, start in enumerate(range(0, len(whole), SECTION_BYTES)):
                files[f"{name}#{index}" if index else name] = whole[start:][:SECTION_BYTES]
    return files
