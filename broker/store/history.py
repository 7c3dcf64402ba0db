"""A state directory read from outside: what was merged, whether it is whole, what if, and a way
back. It may be read while its broker runs; nothing here changes it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from narrows.broker.merging import merge
from narrows.broker.rounds import FragmentState, Policy, Version
from narrows.broker.store.packs import Packs, sync_folder
from narrows.broker.store.recover import (
    DATABASE,
    NEWEST,
    RoundRow,
    count_again,
    database_errors,
    first_whole,
    kept_rows,
    read_only,
    read_rounds,
    read_run,
    replay,
    snapshot_path,
    snapshot_rows,
)
from narrows.broker.store.tensors import write_state
from narrows.proto.errors import ConfigError, StateError
from narrows.proto.layout import Fragment, build_table
from narrows.proto.messages import Phase


@dataclass(frozen=True)
class Audit:
    """The findings of an audit."""

    rounds: int
    """Rows with the facts that were written."""
    replayed: int
    """Versions merged again to the same three digests."""
    problems: tuple[str, ...]


class History:
    """The rounds of a state directory. Raises StateError where something is not as written."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.file = folder, folder / DATABASE
        if not self.file.exists():
            raise ConfigError(
                f"{folder} holds no run",
                expected=f"the state directory of a broker, with its {DATABASE}",
                got=f"a folder without {DATABASE}" if folder.is_dir() else "no such folder",
            )
        self._packs = Packs(folder / "packs")
        with database_errors(self.file):
            self._db = read_only(self.file)
            self.run = read_run(self._db, self.file)
        entries = self.run.layout.entries if self.run.layout else ()
        self.table = build_table(entries, self.run.fragments) if entries else ()

    def rounds(self, condition: str = "seq > ?", *arguments: int) -> Iterator[RoundRow]:
        """The rounds that fulfil a condition in SQL, in the order in which they became durable."""
        return read_rounds(self._db, self.file, condition, arguments or (0,))

    def states(self, until: int = NEWEST) -> Iterator[FragmentState]:
        """Each fragment as it was after round `until` (its seq); else at the newest version that a
        start could go on from. Raises ConfigError if that is not kept."""
        for fragment in self.table:
            reached, wanted = -1, self._version(fragment.index, until)
            newest_first = snapshot_rows(self._db, self.file, fragment.index, until)[::-1]
            if newest_first:
                state, _ = first_whole(self.folder, fragment.index, newest_first)
                for version in self._replay(fragment, state, until):
                    state = version.state
                reached = wanted if until == NEWEST else state.version
            if reached < wanted:
                raise ConfigError(
                    f"fragment {fragment.index} cannot go back to round {until}",
                    expected=f"a snapshot before version {wanted} and the payloads up to it",
                    got="none that old" if reached < 0 else f"payloads up to version {reached}",
                    remedy="Choose a later round. With broker.keep_history all of them are kept",
                )
            yield state

    def merged_otherwise(
        self, policy: Policy | None = None, without: Collection[str] = ()
    ) -> Iterator[FragmentState]:
        """Each fragment as it would be, had its rounds been merged by `policy`, or without the
        pushes of some learners, from the oldest snapshot on. A round that has none left changes
        nothing. Learners would have pushed other gradients then; this takes those they pushed."""
        for fragment in self.table:
            rows = snapshot_rows(self._db, self.file, fragment.index)
            state, _ = first_whole(self.folder, fragment.index, rows)
            for row in self._after(state):
                round_ = row.load(self._packs)
                left = tuple(each for each in round_.contributions if each.learner not in without)
                if left:
                    rules = policy or round_.policy
                    round_ = replace(round_, contributions=left, policy=rules)
                    state = merge(fragment, state, round_).state
                else:
                    state = replace(state, version=round_.version)
            yield state

    def audit(self) -> Audit:
        """Looks at every byte that a start, a replay or a rollback would rely on."""
        counted, replayed = 0, 0
        problems: list[str] = []
        with database_errors(self.file):
            ((verdict,),) = self._db.execute("PRAGMA integrity_check(1)").fetchall()
            total = "SELECT clock, (SELECT coalesce(sum(tokens), 0) FROM contributions) FROM run"
            ((clock, tokens),) = self._db.execute(total).fetchall()
            numbers = self._db.execute("SELECT seq FROM rounds").fetchall()
        if verdict != "ok":
            problems.append(f"{self.file}: {verdict}")
        if tokens != clock:
            problems.append(f"{self.file}: clock {clock}, but {tokens} tokens merged")
        for seq in numbers:
            try:
                counted += len(list(self.rounds("seq = ?", *seq)))
            except StateError as error:
                problems.append(str(error))
        for fragment in self.table:
            try:
                rows = snapshot_rows(self._db, self.file, fragment.index)
                for row in rows:
                    _, errors = first_whole(self.folder, fragment.index, [row, *rows])
                    problems += map(str, errors)
                state, _ = first_whole(self.folder, fragment.index, rows)
                replayed += sum(1 for _ in self._replay(fragment, state))
            except StateError as error:
                problems.append(str(error))
        return Audit(counted, replayed, tuple(dict.fromkeys(problems)))

    def rollback(self, until: int, target: Path) -> None:
        """Makes a new state directory as of round `until` (its seq): a broker goes on from there.

        The rows up to there go with it, the payloads do not. The directory of this history stays
        as it is. Raises ConfigError if `target` exists, OSError if the disk is full.
        """
        if target.exists():
            raise ConfigError(f"{target} exists", expected="a new directory", got="an old one")
        ((newest,),) = self._db.execute("SELECT coalesce(max(seq), 0) FROM rounds").fetchall()
        if not 0 < until <= newest:
            raise ConfigError(
                f"there is no round {until}",
                expected=f"1 to {newest}",
                got=str(until),
                remedy="`narrows journal show` lists the rounds",
            )
        with TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
            folder = Path(scratch) / target.name
            for each in (folder / "packs", folder / "fragments"):
                each.mkdir(mode=0o700, parents=True)
            heads: list[tuple[int, int]] = []
            for state in self.states(until):
                write_state(snapshot_path(folder, state.fragment, state.version), state)
                heads.append((state.fragment, state.version))
            with (
                database_errors(folder / DATABASE),
                closing(sqlite3.connect(folder / DATABASE)) as db,
                db,
            ):
                self._db.backup(db)
                db.execute("DELETE FROM contributions WHERE seq > ?", (until,))
                db.execute("DELETE FROM snapshots")
                db.execute("DELETE FROM rounds WHERE seq > ?", (until,))
                db.execute("UPDATE contributions SET pack = NULL, offset = NULL, sizes = NULL")
                db.executemany("INSERT INTO snapshots VALUES (?, ?)", heads)
                db.execute("UPDATE run SET phase = ?", (Phase.RUNNING,))
                count_again(db)
            for each in (folder / "fragments", folder):
                sync_folder(each)
            folder.rename(target)
        sync_folder(target.absolute().parent)

    def close(self) -> None:
        self._db.close()

    def _version(self, fragment: int, until: int) -> int:
        query = "SELECT max(version) FROM rounds WHERE fragment = ? AND seq <= ?"
        with database_errors(self.file):
            ((version,),) = self._db.execute(query, (fragment, until)).fetchall()
        return 0 if version is None else int(version)

    def _after(self, state: FragmentState, until: int = NEWEST) -> Iterator[RoundRow]:
        """The rounds of a fragment after a state, up to round `until`, whose payloads are kept."""
        condition = "fragment = ? AND version > ? AND seq <= ?"
        return kept_rows(self.rounds(condition, state.fragment, state.version, until))

    def _replay(
        self, fragment: Fragment, state: FragmentState, until: int = NEWEST
    ) -> Iterator[Version]:
        return replay(fragment, state, self._after(state, until), self._packs, self.file)
