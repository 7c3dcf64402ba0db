"""Reads a state directory: rounds, and each fragment's state by replay; audits and rolls back.

A fragment's state is its newest whole snapshot and the rounds after it, merged again as they were
merged first. Three digests of each version must agree with its row, so a start cannot go on from
anything but the bits that learners have seen.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

import msgspec
import xxhash

from narrows.broker.merging import merge
from narrows.broker.records import (
    Contribution,
    Digests,
    FragmentState,
    Policy,
    Round,
    RunRow,
    Version,
)
from narrows.broker.store import files
from narrows.proto.errors import ConfigError, NarrowsError, StateError
from narrows.proto.layout import Fragment, build_table, fingerprint
from narrows.proto.messages import Layout, Phase

DATABASE: Final = "run.db"

PUSH_COLUMNS: Final = (
    "learner", "incarnation", "push_id", "base", "tokens", "steps", "codec", "chunk_elements",
)  # fmt: skip
"""Columns of a contribution that are the fields of `records.Contribution`."""

# The digest of a row is taken over these columns in this order: a column that moves makes every
# row of an old directory damaged.
ROUND_FACTS: Final = (
    "seq", "fragment", "version", "at", "clock", "policy", "period_s", "reason",
    "global", "momentum", "published",
)  # fmt: skip
CONTRIBUTION_FACTS: Final = ("seq", "fragment", *PUSH_COLUMNS, "weight", "norm", "digest")

LOSS: Final = "loss"
"""Column of a contribution that a database of schema 1 has not. A loss counts in the digest of its
row where there is one, so that older rows keep theirs."""

CURVE_ROUNDS: Final = 256
"""Rounds whose pushes are in the memory at once while a curve is read."""

SNAPSHOTS: Final = "SELECT version FROM snapshots WHERE fragment = :index"
"""The versions of a fragment whose states are kept whole."""

INSERT_SNAPSHOT: Final = "INSERT OR IGNORE INTO snapshots (fragment, version) VALUES (?, ?)"
"""Its values are the pairs that `files.write_states` returns."""

PRIMARY_CODE: Final = 0xFF
"""Bits of an error code of SQLite that name its kind; the others say more."""

REFUSED_WRITES: Final = (
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR_WRITE,
    sqlite3.SQLITE_IOERR_SHMSIZE,
)
"""Codes of a write that failed, because of a full disk, a quota, or a limit on files, and left the
log as it was. A failed fsync is not among them: nobody knows what is durable then."""

Facts: TypeAlias = sqlite3.Row | Mapping[str, Any]
"""A row by the names of its columns, as it was read or as it will be written."""

Seen = TypeVar("Seen")


class RoundRow(NamedTuple):
    """A durable round. Version 0 is a round without contributions, whose reason is "seed"."""

    seq: int
    """Counts the rounds of all fragments, in the order in which they became durable."""
    at_unix: float
    round_: Round
    """Its contributions have no chunks: `History.load` reads them."""
    digests: Digests
    places: tuple[files.Place, ...]
    """Where the chunks of each contribution lie."""


class CurvePoint(NamedTuple):
    """A merged push, as a point of its learner's training curve."""

    round: int
    at_unix: float
    run_tokens: int
    """Tokens of the run when the round was durable."""
    fragment: int
    version: int
    learner: str
    steps: int
    """Steps that the push has taken."""
    tokens: int
    loss: float | None
    """Mean training loss over them; None: none was logged."""


class Audit(NamedTuple):
    """The findings of an audit."""

    rounds: int
    """Rows with the facts that were written."""
    replayed: int
    """Versions merged again to the same three digests."""
    problems: tuple[str, ...]


class History:
    """The facts of a state directory, over a connection that cannot write; its broker may run.

    Raises StateError where something is not as it was written.
    """

    def __init__(self, folder: Path, file: Path | None = None, *, durable: bool = True) -> None:
        """`file` is another database than the directory's own, with some of its rows."""
        self.folder = folder
        self.file = file or folder / DATABASE
        if not self.file.exists():
            raise ConfigError(
                f"{folder} holds no run",
                expected=f"the state directory of a broker, with its {DATABASE}",
                got=f"a folder without {DATABASE}" if folder.is_dir() else "no such folder",
            )
        self._packs = files.Packs(folder / "packs", durable)
        uri = f"{self.file.absolute().as_uri()}?mode=ro"
        with database_errors(self.file):
            self._reader = sqlite3.connect(uri, uri=True, check_same_thread=False)
        self._reader.row_factory = sqlite3.Row

    def close(self) -> None:
        self._reader.close()

    def query(self, sql: str, **named: object) -> list[sqlite3.Row]:
        """All rows of an answer, so that no cursor stays open between two of them."""
        with database_errors(self.file):
            return self._reader.execute(sql, named).fetchall()

    @property
    def run(self) -> RunRow:
        """The row of the run."""
        try:
            (row,) = self.query("SELECT * FROM run")
            layout = None
            if row["layout"] is not None:
                layout = msgspec.json.decode(row["layout"], type=Layout)
                if fingerprint(layout) != row["fingerprint"]:
                    raise ValueError(f"a layout that is not {row['fingerprint']}")
            return RunRow(
                run_id=row["run_id"],
                phase=Phase(row["phase"]),
                clock=row["clock"],
                fragments=row["fragments"],
                layout=layout,
            )
        except (ValueError, msgspec.MsgspecError) as error:
            raise files.damaged(self.file, expected="the row of a run", got=str(error)) from error

    @property
    def table(self) -> tuple[Fragment, ...]:
        """The fragments; empty before version 0."""
        run = self.run
        if run.layout is None:
            return ()
        return build_table(run.layout.entries, run.fragments)

    def rounds(self, condition: str = "TRUE", **named: int) -> Iterator[RoundRow]:
        """The rounds that fulfil a condition in SQL, in the order in which they became durable."""
        for row in self.query(f"SELECT seq FROM rounds WHERE {condition} ORDER BY seq", **named):
            yield self._round(row["seq"])

    def curve(self) -> Iterator[CurvePoint]:
        """Every merged push with the facts of a chart, in the order of the rounds. A long history
        is read in parts."""
        fragments = max(1, self.run.fragments)
        (newest,) = self.query("SELECT coalesce(max(seq), 0) AS seq FROM rounds")
        for after in range(0, newest["seq"], CURVE_ROUNDS):
            rows = self.query(
                "SELECT contributions.*, at, clock, version FROM contributions"
                " JOIN rounds USING (seq) WHERE seq > :after AND seq <= :until"
                " ORDER BY seq, learner, incarnation",
                after=after,
                until=after + CURVE_ROUNDS,
            )
            for row in rows:
                facts = dict(row)
                yield CurvePoint(
                    round=facts["seq"],
                    at_unix=facts["at"],
                    run_tokens=facts["clock"] // fragments,
                    fragment=facts["fragment"],
                    version=facts["version"],
                    learner=facts["learner"],
                    steps=facts["steps"],
                    tokens=facts["tokens"],
                    loss=facts.get(LOSS),
                )

    def _round(self, seq: int) -> RoundRow:
        """One round and its contributions, whose facts must have the digest that was written."""
        (row,) = self.query("SELECT * FROM rounds WHERE seq = :seq", seq=seq)
        parts = self.query(
            "SELECT * FROM contributions WHERE seq = :seq ORDER BY learner, incarnation", seq=seq
        )
        digest = row_digest(row, parts)
        if digest != row["digest"]:
            raise files.damaged(
                self.file,
                expected=f"round {seq}, version {row['version']} of fragment {row['fragment']}"
                f" with digest {row['digest']}",
                got=digest,
            )
        round_ = Round(
            fragment=row["fragment"],
            version=row["version"],
            contributions=tuple(
                Contribution(
                    **{name: part[name] for name in PUSH_COLUMNS}, loss=dict(part).get(LOSS)
                )
                for part in parts
            ),
            policy=msgspec.json.decode(row["policy"], type=Policy),
            period_s=row["period_s"],
            reason=row["reason"],
        )
        return RoundRow(
            seq=seq,
            at_unix=row["at"],
            round_=round_,
            digests=Digests(
                global_=int(row["global"], 16),
                momentum=int(row["momentum"], 16),
                published=int(row["published"], 16),
            ),
            places=tuple(
                files.Place(**{name: part[name] for name in files.Place._fields}) for part in parts
            ),
        )

    def snapshots(self, index: int) -> list[RoundRow]:
        """The rounds of a fragment whose states are kept whole, oldest first; at least one."""
        rows = list(
            self.rounds(
                f"fragment = :index AND version IN ({SNAPSHOTS})",
                index=index,
            )
        )
        if not rows:
            raise files.damaged(self.file, expected=f"a snapshot of fragment {index}", got="none")
        return rows

    def whole(self, row: RoundRow) -> FragmentState:
        """The state that a snapshot holds."""
        return files.read_state(self.folder, row.round_.fragment, row.round_.version, row.digests)

    def newest_whole(self, index: int) -> tuple[FragmentState, list[StateError]]:
        """The newest snapshot that is as it was written, and the errors of newer ones."""
        errors: list[StateError] = []
        for row in reversed(self.snapshots(index)):
            try:
                return self.whole(row), errors
            except StateError as error:
                errors.append(error)
        raise errors[0]

    def load(self, row: RoundRow) -> Round:
        """A round with its chunks."""
        pushes = tuple(
            replace(
                push,
                chunks=self._packs.read(place, f"the payload of {push.learner} in round {row.seq}"),
            )
            for push, place in zip(row.round_.contributions, row.places, strict=True)
        )
        return replace(row.round_, contributions=pushes)

    def replay(self, fragment: Fragment, state: FragmentState) -> Iterator[Version]:
        """Merges the rounds after a state again; every version must have the three digests in its
        row."""
        later = self.rounds(
            "fragment = :index AND version > :version", index=fragment.index, version=state.version
        )
        for row in later:
            what = f"version {state.version + 1} of fragment {fragment.index}"
            if row.round_.version != state.version + 1:
                raise files.damaged(self.file, expected=what, got=f"version {row.round_.version}")
            round_ = self.load(row)
            expected = f"{what} with digests {row.digests}"
            try:
                version = merge(fragment, state, round_)
            except (FloatingPointError, NarrowsError) as error:
                raise files.damaged(self.file, expected=expected, got=str(error)) from error
            state = version.state
            if state.digests != row.digests:
                raise files.damaged(self.file, expected=expected, got=str(state.digests))
            yield version

    def state(self, fragment: Fragment) -> FragmentState:
        """A fragment at its newest version."""
        state, _ = self.newest_whole(fragment.index)
        for version in self.replay(fragment, state):
            state = version.state
        return state

    def states(self) -> Iterator[FragmentState]:
        """Each fragment at its newest version, as a start would find it."""
        return (self._steadily(fragment, self.state) for fragment in self.table)

    def audit(self) -> Audit:
        """Looks at every byte that a start, a replay or a rollback would rely on; tells the first
        damage of each round and fragment."""
        problems: list[str] = []
        (check,) = self.query("PRAGMA integrity_check(1)")
        if check["integrity_check"] != "ok":
            problems.append(f"{self.file}: {check['integrity_check']}")

        (tokens,) = self.query(
            "SELECT clock, (SELECT coalesce(sum(tokens), 0) FROM contributions) AS merged FROM run"
        )
        if tokens["merged"] != tokens["clock"]:
            problems.append(
                f"{self.file}: clock {tokens['clock']}, but {tokens['merged']} tokens merged"
            )

        rounds = 0
        for row in self.query("SELECT seq FROM rounds"):
            try:
                self._round(row["seq"])
                rounds += 1
            except StateError as error:
                problems.append(str(error))

        replayed = 0
        for fragment in self.table:
            try:
                replayed += self._steadily(fragment, self._replayed)
            except StateError as error:
                problems.append(str(error))
        # A damaged row is met twice: by itself, and in the replay of its fragment.
        return Audit(rounds, replayed, tuple(dict.fromkeys(problems)))

    def _replayed(self, fragment: Fragment) -> int:
        """The number of versions that a replay makes from the oldest snapshot on, once every
        snapshot was read."""
        for row in reversed(self.snapshots(fragment.index)):
            state = self.whole(row)
        return sum(1 for _ in self.replay(fragment, state))

    def _steadily(self, fragment: Fragment, look: Callable[[Fragment], Seen]) -> Seen:
        """Looks at a fragment, and looks again if a broker that runs has meanwhile removed old
        snapshots and the payloads before them."""
        while True:
            before = self.query(SNAPSHOTS, index=fragment.index)
            try:
                return look(fragment)
            except StateError:
                if before == self.query(SNAPSHOTS, index=fragment.index):
                    raise

    def rollback(self, until: int, target: Path) -> None:
        """Makes a new state directory as of round `until` (its seq): a broker goes on from there.

        The rows up to there go with it, the payloads do not. The directory of this history stays
        as it is. Raises ConfigError if `target` exists or the states of that round cannot be made
        any more, OSError if the disk is full.
        """
        if target.exists():
            raise ConfigError(f"{target} exists", expected="a new directory", got="an old one")
        (rounds,) = self.query("SELECT coalesce(max(seq), 0) AS newest FROM rounds")
        if not 0 < until <= rounds["newest"]:
            raise ConfigError(
                f"there is no round {until}",
                expected=f"1 to {rounds['newest']}",
                got=str(until),
                remedy="`narrows journal show` lists the rounds",
            )
        with TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
            folder = Path(scratch) / target.name
            file = folder / DATABASE
            for each in (folder, folder / "packs", folder / "fragments"):
                each.mkdir(mode=0o700)
            with database_errors(file), closing(sqlite3.connect(file, isolation_level=None)) as db:
                self._reader.backup(db)
                db.execute("PRAGMA foreign_keys = ON")
                db.execute("DELETE FROM rounds WHERE seq > :until", {"until": until})
                with closing(History(self.folder, file)) as cut:
                    heads = files.write_states(folder, cut._heads(until))
                db.execute("DELETE FROM snapshots")
                db.executemany(INSERT_SNAPSHOT, heads)
                db.execute("UPDATE contributions SET pack = NULL, offset = NULL, sizes = NULL")
                db.execute("UPDATE run SET phase = :phase", {"phase": Phase.RUNNING})
                # The clock and the merged push ids follow from the rounds that are left.
                db.execute(
                    "UPDATE run SET clock = (SELECT coalesce(sum(tokens), 0) FROM contributions)"
                )
                db.execute("DELETE FROM merged")
                db.execute(
                    "INSERT INTO merged (incarnation, fragment, push_id, seq, tokens)"
                    " SELECT incarnation, fragment, max(push_id), max(seq), sum(tokens)"
                    " FROM contributions GROUP BY incarnation, fragment"
                )
            files.sync_folder(folder)
            folder.rename(target)
        files.sync_folder(target.absolute().parent)

    def _heads(self, until: int) -> Iterator[FragmentState]:
        """Each fragment at its newest version, which round `until` left."""
        for fragment in self.table:
            if not self.query(SNAPSHOTS, index=fragment.index):
                raise ConfigError(
                    f"fragment {fragment.index} cannot go back to round {until}",
                    expected="a snapshot of that round or of one before",
                    got="no snapshot",
                    remedy="Choose a later round. With broker.keep_history all of them are kept",
                )
            yield self.state(fragment)


def row_digest(round_: Facts, contributions: Iterable[Facts]) -> str:
    """xxh3_64 over the facts of a round and its contributions, as they stand in the columns; not
    over the places of payloads, which change when packs are removed."""
    facts = [
        [round_[name] for name in ROUND_FACTS],
        [
            [
                *(each[name] for name in CONTRIBUTION_FACTS),
                *(loss for loss in [dict(each).get(LOSS)] if loss is not None),
            ]
            for each in contributions
        ],
    ]
    return xxhash.xxh3_64_hexdigest(msgspec.msgpack.encode(facts))


@contextmanager
def database_errors(file: Path) -> Iterator[None]:
    """Raises errors of SQLite as DiskFull, NotWritten or StateError."""
    try:
        yield
    except sqlite3.Error as error:
        code: int = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_OK)
        if code in REFUSED_WRITES:
            raise files.DiskFull(file, error) from error
        if code & PRIMARY_CODE == sqlite3.SQLITE_BUSY:
            raise files.NotWritten(
                file, error, "another process holds it: sqlite3, or a backup?"
            ) from error
        raise files.damaged(file, expected="a database that works", got=str(error)) from error
