"""Reads text that every machine has: Python's own sources, or a folder, as byte tokens.

The files are split by a hash of their *name*, so every machine with the same files gets the same
train, validation and test text, and a file that changes stays on its side.  `corpus_digest` says
whether two machines read the same bytes.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from narrows.proto.errors import ConfigError

Bytes: TypeAlias = NDArray[np.uint8]

STDLIB_PACKAGES = ("asyncio", "email", "json", "unittest", "xml")
"""Packages of the standard library that are read besides its top-level modules."""

EXCLUDED_FOLDERS = frozenset({"test", "tests", "__pycache__"})
"""Tests repeat one idiom thousands of times; caches are no text."""

GENERATED_MODULES = (
    "_sysconfigdata",
    "keyword.py",
    "sitecustomize.py",
    "stringprep.py",
    "token.py",
)
"""Beginnings of the names of modules that a script wrote or that belong to one machine."""

TEXT_SUFFIXES = frozenset({".c", ".h", ".js", ".md", ".py", ".rs", ".rst", ".tex", ".txt"})
"""Suffixes of the text files in a folder given by the user."""

SECTION_BYTES = 256 << 10
"""Longer files are cut into sections of this size and split by section name: one long book still
has a validation part. No module of the standard library is that long."""

SHINGLE_BYTES = 32
"""Length of the byte strings by which held-out text is compared with the train text."""

SHARED_MAX = 0.1
"""Held-out files with a larger share of their shingles in the train text are dropped. Two modules
of the library share 1-5% (idioms, licence lines); a copied module shares half and more."""

VALIDATION_PERCENT = 5
TEST_PERCENT = 5


@dataclass(frozen=True)
class Corpus:
    """Text of one run, each part uint8 of one dimension, and the files that it was made of."""

    train: Bytes
    validation: Bytes
    test: Bytes
    files: int
    """Files (or sections of long files) that are in one of the three texts."""
    dropped: tuple[str, ...]
    """Held-out files left out because they share too much with the train text."""
    corpus_digest: str
    """xxh3_128 (hex) over names and bytes of all files in name order, dropped ones included."""

    def describe(self) -> str:
        """One line for a log."""
        sizes = " / ".join(f"{len(text):,}" for text in (self.train, self.validation, self.test))
        return (
            f"corpus {self.corpus_digest}: {self.files} files, {sizes} bytes of train / validation"
            f" / test text, {len(self.dropped)} dropped for overlap"
        )


def load_corpus(data: Path | None = None) -> Corpus:
    """Text below the folder `data`, or the sources of the running Python's standard library.

    Raises ConfigError when there is too little text for a train and a validation part.
    """
    return build_corpus(stdlib_files() if data is None else folder_files(data))


def build_corpus(files: Mapping[str, bytes]) -> Corpus:
    """Split named texts by name, drop held-out ones that the train text contains."""
    digest = xxhash.xxh3_128()
    sides: dict[str, list[str]] = {"train": [], "validation": [], "test": []}
    for name in sorted(files):
        # The lengths keep a byte from wandering between name and text unnoticed.
        digest.update(f"{len(name)}:{name}:{len(files[name])}:".encode() + files[name])
        sides[side_of(name)].append(name)
    train = _joined(files, sides["train"])
    # Sorted and without repeats, so that each held-out file costs one binary search per shingle.
    known = np.unique(_shingles(train))
    held_out = sides["validation"] + sides["test"]
    dropped = tuple(n for n in held_out if shared_fraction(files[n], known) > SHARED_MAX)
    kept = {side: [n for n in names if n not in dropped] for side, names in sides.items()}
    return Corpus(
        train=_nonempty(train, "train"),
        validation=_nonempty(_joined(files, kept["validation"]), "validation"),
        test=_joined(files, kept["test"]),
        files=sum(map(len, kept.values())),
        dropped=dropped,
        corpus_digest=digest.hexdigest(),
    )


def side_of(name: str) -> str:
    """`train`, `validation` or `test`, from the file's name alone (about 90/5/5 of the files)."""
    percent = xxhash.xxh3_64_intdigest(name.encode()) % 100
    if percent < VALIDATION_PERCENT:
        return "validation"
    return "test" if percent < VALIDATION_PERCENT + TEST_PERCENT else "train"


def shared_fraction(text: bytes, known: NDArray[np.uint64]) -> float:
    """Share of the text's sampled shingles that are in `known` (sorted hashes), 0 to 1."""
    own = _shingles(np.frombuffer(text, np.uint8))
    if not len(own) or not len(known):
        return 0.0
    places = np.minimum(np.searchsorted(known, own), len(known) - 1)
    return int(np.count_nonzero(known[places] == own)) / len(own)


def stdlib_files() -> dict[str, bytes]:
    """Top-level modules and STDLIB_PACKAGES of the running Python by relative path."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = list(root.glob("*.py"))
    for package in STDLIB_PACKAGES:
        paths += (root / package).rglob("*.py")
    files = {path.relative_to(root).as_posix(): path for path in paths}
    return {name: path.read_bytes() for name, path in files.items() if _wanted(name)}


def folder_files(folder: Path) -> dict[str, bytes]:
    """Text files below `folder` by relative path, long ones in sections; ConfigError if none."""
    files: dict[str, bytes] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.suffix in TEXT_SUFFIXES and path.is_file() and not name.startswith("."):
            files.update(_sections(name, path.read_bytes()))
    if not files:
        suffixes = " ".join(sorted(TEXT_SUFFIXES))
        raise ConfigError(f"no text below {folder}", expected=f"files that end in {suffixes}")
    return files


class Reader:
    """Endless batches of windows in an order of this reader's own.

    The text is cut into windows of `context` bytes; reader `part = (i, n)`, 1 <= i <= n, has every
    n-th of them, so parts are disjoint (but for the one target byte that a window shares with the
    next) and alike.  The order is a fresh permutation for each pass, drawn from name and seed.
    Yields (x, y), uint8 of shape (batch, context) each; y is x one byte later.
    """

    def __init__(
        self,
        text: Bytes,
        *,
        batch: int,
        context: int,
        name: str,
        seed: int = 0,
        part: tuple[int, int] = (1, 1),
        start_batch: int = 0,
    ) -> None:
        """`start_batch`: batches to pass over, so that a learner that returns goes on, not back."""
        # Every n-th window and not one stretch: parts of a text would differ in subject.
        i, n = part
        if not 1 <= i <= n:
            raise ConfigError("this part does not exist", expected="1 <= i <= n", got=f"{i}/{n}")
        window_count = (len(text) - 1) // context
        self._starts = np.arange(i - 1, window_count, n, dtype=np.int64) * context
        if len(self._starts) < batch:
            raise ConfigError(
                "the text is too short",
                expected=f"{batch * n * context} bytes for batch x parts x context",
                got=f"{len(text)}",
                remedy="use more text, a smaller batch or fewer parts",
            )
        self._text, self._batch, self._offsets = text, batch, np.arange(context + 1)
        self._seed = xxhash.xxh3_64_intdigest(f"{seed}:{name}".encode())
        self._next_batch = start_batch
        self._order: tuple[int, NDArray[np.int64]] = (-1, self._starts)

    def __iter__(self) -> Iterator[tuple[Bytes, Bytes]]:
        return self

    def __next__(self) -> tuple[Bytes, Bytes]:
        # A remainder smaller than a batch is left out of its pass.
        a_pass, index = divmod(self._next_batch, len(self._starts) // self._batch)
        self._next_batch += 1
        starts = self._pass_order(a_pass)[index * self._batch : (index + 1) * self._batch]
        windows = self._text[starts[:, None] + self._offsets]
        return windows[:, :-1], windows[:, 1:]

    def _pass_order(self, a_pass: int) -> NDArray[np.int64]:
        if self._order[0] != a_pass:
            rng = np.random.default_rng([self._seed, a_pass])
            self._order = (a_pass, rng.permutation(self._starts))
        return self._order[1]


def fixed_windows(text: Bytes, *, context: int, count: int = 512) -> Bytes:
    """The same windows for everybody: uint8 (at most count, context + 1), spread over the text.

    Raises ConfigError when the text is shorter than one window.
    """
    last_start = len(text) - context - 1
    if last_start < 0:
        raise ConfigError(
            "the validation text is too short",
            expected=f"{context + 1} bytes",
            got=f"{len(text)}",
            remedy="use more or larger files",
        )
    count = min(count, 1 + last_start // context)
    starts = np.linspace(0, last_start, count).astype(np.int64)
    windows: Bytes = text[starts[:, None] + np.arange(context + 1)]
    return windows


def _wanted(name: str) -> bool:
    *folders, file = name.split("/")
    return not EXCLUDED_FOLDERS.intersection(folders) and not file.startswith(GENERATED_MODULES)


def _sections(name: str, text: bytes) -> dict[str, bytes]:
    if len(text) <= SECTION_BYTES:
        return {name: text}
    starts = range(0, len(text), SECTION_BYTES)
    return {f"{name}#{i}": text[at : at + SECTION_BYTES] for i, at in enumerate(starts)}


def _joined(files: Mapping[str, bytes], names: list[str]) -> Bytes:
    return np.frombuffer(b"".join(files[name] for name in names), np.uint8)


def _nonempty(text: Bytes, side: str) -> Bytes:
    if not len(text):
        raise ConfigError(
            f"the {side} text is empty",
            expected="some files on each side of the split by name",
            remedy="use more files (about twenty) or longer ones",
        )
    return text


def _shingles(text: Bytes) -> NDArray[np.uint64]:
    """Polynomial hashes of all SHINGLE_BYTES-long strings of which a fixed eighth is kept.

    The hash modulo 2^64 of 2k bytes follows from those of k bytes: five doublings give 32.
    """
    hashes = text.astype(np.uint64) + np.uint64(1)
    power, length = 0x9E3779B97F4A7C15, 1
    while length < SHINGLE_BYTES and len(hashes) > length:
        hashes = hashes[:-length] * np.uint64(power) + hashes[length:]
        power, length = power * power % (1 << 64), 2 * length
    if length < SHINGLE_BYTES:
        return hashes[:0]
    # The upper bits depend on every byte; both sides keep the same eighth of all strings.
    sample: NDArray[np.uint64] = hashes[hashes >> np.uint64(61) == 0]
    return sample
