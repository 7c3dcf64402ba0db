"""Results of the benches as the report reads them: a folder of JSON files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from narrows.proto.errors import ConfigError

Row: TypeAlias = dict[str, Any]

BENCHES: Final = (
    "quality", "bandwidth", "goodput", "chaos", "wan", "wan-budget", "wan-training", "peers",
    "codec", "merge", "loop", "journal", "demo",
)  # fmt: skip
"""Benches in the order of the report."""

OTHERS: Final = ("attack-poison", "attack-poison-honest", "attack-revoke", "attack-wire", "fuzz")
"""Results that are no bench's: their own pages show them."""

NO_RESULT: Final = "no result of a bench"


@dataclass(frozen=True)
class ResultFile:
    """One file that a bench wrote with --json."""

    file: str
    bench: str
    data: Row

    def rows(self, key: str = "rows") -> list[Row]:
        """The list under `key`; [] without it. A file without rows is itself one row."""
        if key == "rows" and "rows" not in self.data:
            return [self.data]
        listed: list[Row] = self.data.get(key, [])
        return listed

    def find(self, key: str = "rows", **wanted: object) -> tuple[str, Row] | None:
        """The first row with these values, and its place in the file.

        None without such a row; rows that were skipped or failed do not count.
        """
        for number, row in enumerate(self.rows(key)):
            if not {"skipped", "failed"} & row.keys() and wanted.items() <= _flat(row).items():
                place = f"{key}[{number}]" if key in self.data else ""
                return f"{self.file} {place}".strip(), row
        return None

    @property
    def title(self) -> str:
        return self.bench.replace("-", " ").capitalize()

    @property
    def origin(self) -> str:
        """Machine, and every commit that rows were measured at."""
        machine = self.data.get("machine")
        computer = "machine not recorded"
        if machine:
            cores = f"{machine['cores']} cores, Python {machine['python']}"
            computer = f"{machine['processor']}, {cores}"
        commits = dict.fromkeys(row["commit"] for row in self.rows() if row.get("commit"))
        listed = ", ".join(commits) or self.data.get("commit") or "not recorded"
        return f"{computer}; commit {listed}"


@dataclass(frozen=True)
class Folder:
    """The contents of a folder."""

    results: Sequence[ResultFile]
    """In the order of BENCHES, then by name."""
    unread: Sequence[str]
    """Files that are no results, each with the reason."""

    @property
    def missing(self) -> list[str]:
        """Benches without a file."""
        present = {result.bench for result in self.results}
        return [bench for bench in BENCHES if bench not in present]


def read_folder(folder: Path) -> Folder:
    """All `*.json` in it. Raises ConfigError if there is no such folder."""
    if not folder.is_dir():
        raise ConfigError(
            f"{folder} is no folder",
            expected="a folder of JSON files",
            remedy="run `narrows bench all`, or a bench with --json FOLDER/NAME.json",
        )
    results, unread = list[ResultFile](), list[str]()
    for path in sorted(folder.glob("*.json")):
        try:
            if path.stem not in OTHERS:
                results.append(_read(path))
        except ValueError as error:
            unread.append(f"{path.name}: {error}")
    results.sort(key=lambda result: BENCHES.index(result.bench))
    return Folder(results, unread)


def _read(path: Path) -> ResultFile:
    """Raises ValueError for what is no result of a bench that is known."""
    data = json.loads(path.read_text())
    if not isinstance(data, dict):
        raise ValueError(NO_RESULT)
    result: Row = data
    listed: Any = result.get("rows", [])
    objects: list[Any] = [
        result.get("machine", {}),
        *(listed if isinstance(listed, list) else [listed]),
    ]
    if not all(isinstance(each, dict) for each in objects):
        raise ValueError(NO_RESULT)
    bench = str(result.get("bench", path.stem))
    if bench not in BENCHES:
        raise ValueError(f"no such bench: {bench}")
    return ResultFile(path.name, bench, result)


def _flat(row: Row) -> Row:
    """Only what can be looked for."""
    return {key: value for key, value in row.items() if isinstance(value, str | int | float)}
