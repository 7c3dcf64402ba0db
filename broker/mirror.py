"""Copies a state directory to an object store while its broker runs, and makes one of the copy.

    latest.json                     the manifest: the parts of each file, the pieces of the rows
    packs/00000012.pack/0-4096-...  one part of a file of the state directory
    rows/812-...                    rows of the database, up to round 812

Objects never change, and no name is used twice; a manifest goes up after all that it names. So a
copy is whole or is not there. What neither it nor the one before names any more is deleted.

The database grows for months, and almost all of its rows are final. So each push sends the rows
since the one before. It joins them with the last pieces while these have no more rows: pieces stay
few, and a row is sent at most a dozen times, whatever the run's age.

The mirror reads. It writes nothing into the state directory, and its reading transactions hold up
no commit, because the database has a write-ahead log.
"""

from __future__ import annotations

import os
import re
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Final, Literal, TypeAlias

import msgspec
import obstore
import zstandard
from msgspec.structs import replace
from obstore.exceptions import BaseError
from obstore.store import ObjectStore, from_url

from narrows.broker.store import History, files
from narrows.broker.store.history import DATABASE, database_errors
from narrows.broker.store.store import SCHEMA, SCHEMA_VERSION
from narrows.proto.errors import ConfigError, ErrorCode, StateError
from narrows.proto.messages import Phase

if TYPE_CHECKING:  # They are types alone.
    from obstore import PutMode, UpdateVersion

LATEST: Final = "latest.json"

ROWS_MAX: Final = 1 << 16
"""Rows of a piece that is not joined with another one any more. In the memory they take 100 MB."""
PART_BYTES: Final = 16 << 20
"""Most bytes of a part. The memory holds PARTS_AT_ONCE of them."""
PART_TIMEOUT: Final = timedelta(minutes=5)
"""Longest time for one part: PARTS_AT_ONCE of them need a line of 2 Mbit/s."""
PARTS_AT_ONCE: Final = 4
"""Parts that are on their way together: one connection rarely fills a line to a store."""
LOOKS_MAX: Final = 10
"""Looks in which a file is gone that the rows name. The broker may remove one between two steps of
a look, but not in each of them."""

Table: TypeAlias = Literal["run", "lives", "snapshots", "rounds", "contributions", "merged"]
Tables: TypeAlias = dict[Table, list[list[Any]]]
"""Rows by the name of their table, in the order of its columns in SCHEMA."""

Unsent: TypeAlias = dict[str, Callable[[], bytes]]
"""Objects that the store has not, by their key, and what reads each."""


WHOLE: Final[tuple[Table, ...]] = ("run", "lives", "snapshots")
"""Small tables: each piece has all of their rows."""
BY_ROUND: Final[tuple[Table, ...]] = ("rounds", "contributions", "merged")
"""Tables that grow, or change, by round: a piece has the rows of its rounds."""

CREDENTIALS: Final = {
    "s3": (("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),),
    "gs": (("GOOGLE_SERVICE_ACCOUNT",), ("GOOGLE_SERVICE_ACCOUNT_KEY",)),
    "az": (("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY"),),
    "file": ((),),
}
"""By scheme of a URL: the sets of variables of the environment of which one must be there."""

_OURS: Final = re.compile(r"(packs|fragments|rows)/.*-[0-9a-f]{8}-[0-9]+")
"""Names that a mirror gives. An object of another name belongs to somebody else."""

FileName: TypeAlias = Annotated[
    str,
    msgspec.Meta(pattern=r"^(packs/[0-9]{8,}\.pack|fragments/[0-9]+-[0-9]+\.safetensors)$"),
]
"""A file of a state directory. The store may be another's, who shall write no other file."""


class Part(msgspec.Struct, frozen=True):
    """A range of a file of the state directory; it begins where the part before it ends."""

    end: int
    key: str


class Piece(msgspec.Struct, frozen=True):
    """The rows of the rounds after `since`, up to `until`."""

    since: int
    until: int
    key: str
    rows: int = 0
    """0: a release that did not say it wrote the piece, which is joined at the next push."""


class Manifest(msgspec.Struct, frozen=True):
    """One whole copy."""

    run_id: str
    at_unix: float = 0.0
    seq: int = 0
    """Newest round; 0: there is none yet."""
    digest: str = ""
    """Digest of that round's row."""
    is_ended: bool = False
    """Nothing comes after it."""
    schema: int = SCHEMA_VERSION
    pieces: tuple[Piece, ...] = ()
    files: dict[FileName, tuple[Part, ...]] = {}

    def keys(self) -> set[str]:
        """The objects that this copy is made of."""
        parts = {part.key for parts in self.files.values() for part in parts}
        return parts | {piece.key for piece in self.pieces}


def opened(url: str) -> ObjectStore:
    """The store of a URL. Raises ConfigError.

    Credentials come from variables that are named here. Without them the library would ask a
    metadata service (169.254.169.254) who this machine is: never.
    """
    scheme = url.partition("://")[0]
    if scheme not in CREDENTIALS:
        expected = ", ".join(f"{each}://..." for each in CREDENTIALS)
        raise ConfigError("the URL of the store", expected=expected, got=repr(url[:300]))
    sets = CREDENTIALS[scheme]
    if not any(all(os.environ.get(name) for name in names) for names in sets):
        raise ConfigError(
            f"{url}: no credentials",
            expected=" or ".join(" and ".join(names) for names in sets) + " in the environment",
            got="none",
            remedy="Set them. No metadata service is asked",
        )
    allow_http = os.environ.get("AWS_ALLOW_HTTP") == "true"  # Options that are given hide it.
    options: dict[str, Any] = {
        "client_options": {"timeout": PART_TIMEOUT, "allow_http": allow_http}
    }
    if scheme == "file":
        options = {"mkdir": True, "automatic_cleanup": True}
    with store_errors(url):
        store: ObjectStore = from_url(url, **options)
        return store


@contextmanager
def store_errors(url: str) -> Iterator[None]:
    """Raises errors of the library as ConfigError."""
    try:
        yield
    except (BaseError, ValueError, PermissionError) as error:
        raise ConfigError(
            f"{url} cannot be used",
            expected="a store that these credentials may read and write",
            got=first_line(error),
        ) from error


def first_line(error: Exception) -> str:
    """An error of the library without the dump that follows its first line."""
    return str(error).partition("\n")[0]


class Mirror:
    """The copy of one state directory in one store, which each push brings up to date."""

    def __init__(self, folder: Path, store: ObjectStore) -> None:
        """Reads what is there. Raises ConfigError if it is no copy that this release can read."""
        self._folder = folder
        self._store = store
        # Two mirrors, or two lives of one, never write the same name.
        self._life = secrets.token_hex(4)
        self._numbers = count()
        self._written, _ = _read_latest(store)
        """The manifest that this mirror found, or wrote last."""
        self._tried = self._written
        """The one that it tried to write last: whoever hears no answer does not know."""
        self._manifest = _decoded(self._written) if self._written else None
        batches = obstore.list(store)
        paths = {each["path"] for batch in batches for each in batch}
        # Earlier releases wrote the manifest before beside LATEST, and nobody reads it.
        self._present = {
            path
            for path in paths
            if _OURS.fullmatch(path) or (self._written and path == "previous.json")
        }
        """The objects that are there, as far as this life knows: it may delete them."""

    def push(self) -> tuple[Manifest, int] | None:
        """Brings the copy up to the newest round; returns its manifest and the bytes that were
        sent. None: there was nothing new.

        Raises StateError if the directory is damaged or another mirror writes here, ConfigError if
        the copy is that of another history, and the library's errors: then the copy before is
        whole, and the same call may be made again.
        """
        before = self._manifest
        with ExitStack() as open_files:
            manifest, unsent = self._look(open_files)
            if not unsent:
                return None
            with ThreadPoolExecutor(PARTS_AT_ONCE) as pool:
                sent_bytes = sum(pool.map(self._put, unsent, unsent.values()))
        self._write(manifest)
        unnamed = self._present - manifest.keys()
        if before is not None:
            unnamed -= before.keys()
        with suppress(FileNotFoundError):  # Somebody else has removed it.
            obstore.delete(self._store, sorted(unnamed))
        self._present -= unnamed
        return manifest, sent_bytes

    def _look(self, open_files: ExitStack) -> tuple[Manifest, Unsent]:
        """Reads the rows, and opens the files that they name: what the broker removes from now on
        can still be sent."""
        for _ in range(LOOKS_MAX):
            try:
                with closing(History(self._folder)) as history:
                    history.query("BEGIN")  # All answers are of one moment.
                    return self._seen(history, open_files)
            except FileNotFoundError as error:
                gone = Path(error.filename)
        raise files.damaged(gone, expected="a file that run.db names", got="none")

    def _seen(self, history: History, open_files: ExitStack) -> tuple[Manifest, Unsent]:
        """The manifest of this moment, and the objects that it names and the store lacks."""
        (run,) = history.query(
            "SELECT run_id, phase, coalesce(seq, 0) AS seq, coalesce(digest, '') AS digest"
            " FROM run LEFT JOIN rounds ON seq = (SELECT max(seq) FROM rounds)"
        )
        before = self._manifest or Manifest(run["run_id"])
        self._check_goes_on(history, run["run_id"], before)
        unsent: Unsent = {}
        found: dict[str, tuple[Part, ...]] = {}
        for name, end in _ends(history).items():
            parts = before.files.get(name, ())
            start = parts[-1].end if parts else 0
            if start < end:
                file = open_files.enter_context((self._folder / name).open("rb"))
            for first in range(start, end, PART_BYTES):
                part = Part(min(first + PART_BYTES, end), self._key(f"{name}/{first}"))
                unsent[part.key] = partial(_read, file, first, part.end)
                parts += (part,)
            found[name] = parts
        manifest = Manifest(
            run_id=run["run_id"],
            at_unix=time.time(),
            seq=run["seq"],
            digest=run["digest"],
            is_ended=run["phase"] == Phase.ENDED,
            pieces=before.pieces,
            files=found,
        )
        if replace(manifest, at_unix=before.at_unix) == before and before.pieces:
            return manifest, {}
        pieces = list(before.pieces)
        since = before.seq
        new_rows = sum(rows for _, rows in _cuts(history, since))
        while pieces and pieces[-1].rows <= min(new_rows, ROWS_MAX - 1):
            last = pieces.pop()
            since = last.since
            new_rows += last.rows
        # Compressed, the rows of a long run with many learners would still fill the memory.
        spool = open_files.enter_context(TemporaryFile())
        for until, rows in _cuts(history, since) or [(manifest.seq, 0)]:
            piece = Piece(since, until, self._key(f"rows/{until}"), rows)
            pieces.append(piece)
            start = spool.tell()
            spool.write(zstandard.compress(msgspec.msgpack.encode(_rows(history, since, until))))
            unsent[piece.key] = partial(_read, spool, start, spool.tell())
            since = until
        spool.flush()
        return replace(manifest, pieces=tuple(pieces)), unsent

    def _check_goes_on(self, history: History, run_id: str, before: Manifest) -> None:
        """Raises ConfigError unless the directory goes on from the copy that the store has. A
        machine that comes back after its run was restored elsewhere must not overwrite that."""
        rows = history.query("SELECT digest FROM rounds WHERE seq = :seq", seq=before.seq)
        digest = rows[0]["digest"] if rows else ""
        if (run_id, digest) != (before.run_id, before.digest):
            raise ConfigError(
                f"{self._folder} does not go on from the copy in the store",
                expected=f"run {before.run_id}, and round {before.seq} with digest {before.digest}",
                got=f"run {run_id}, {digest or 'no such round'}",
                remedy="If it is the directory to keep, give it another place in the store: what is"
                " there is another history, or a newer one",
            )

    def _key(self, name: str) -> str:
        return f"{name}-{self._life}-{next(self._numbers)}"

    def _put(self, key: str, read: Callable[[], bytes]) -> int:
        """Puts an object, and returns its size; for any thread."""
        data = read()
        self._present.add(key)  # Before it is there: a push that fails leaves it to the next one.
        obstore.put(self._store, key, data)
        return len(data)

    def _write(self, manifest: Manifest) -> None:
        """Puts a manifest in the place of the one that this mirror found or wrote last. Raises
        StateError if another one is there."""
        there, condition = _read_latest(self._store)
        if there not in (self._written, self._tried):
            raise StateError(
                ErrorCode.STATE_LOCKED,
                "another mirror writes to this place in the store",
                expected="the manifest that this one left",
                got=f"one as of round {_decoded(there).seq}" if there else "none",
                remedy="Stop one of the two. The copy there is whole",
            )
        self._tried = msgspec.json.encode(manifest)
        try:
            # A manifest that came in between makes this fail, and the next push finds it.
            obstore.put(self._store, LATEST, self._tried, mode=condition)
        except NotImplementedError:  # Folders cannot compare. What came in between is lost.
            obstore.put(self._store, LATEST, self._tried)
        self._written = self._tried
        self._manifest = manifest


def _ends(history: History) -> dict[str, int]:
    """The files that the rows name, and the bytes of each that are needed."""
    ends: dict[str, int] = {}
    for row in history.query("SELECT fragment, version FROM snapshots"):
        path = files.state_path(history.folder, row["fragment"], row["version"])
        ends[f"fragments/{path.name}"] = path.stat().st_size
    # Beside max(), SQLite gives the other columns of the row that has it.
    for row in history.query(
        "SELECT pack, max(offset) AS offset, sizes FROM contributions"
        " WHERE pack IS NOT NULL GROUP BY pack"
    ):
        sizes = msgspec.json.decode(row["sizes"], type=list[int])
        ends[f"packs/{row['pack']:08d}.pack"] = row["offset"] + sum(sizes)
    return ends


def _read(file: BinaryIO, start: int, end: int) -> bytes:
    data = os.pread(file.fileno(), end - start, start)
    if len(data) < end - start:
        raise files.damaged(Path(file.name), expected=f"{end} bytes", got="a shorter file")
    return data


def _cuts(history: History, since: int) -> list[tuple[int, int]]:
    """The last round and the number of rows of each piece of what comes after a round. A piece has
    at most ROWS_MAX rows and those of one round more."""
    rows = history.query(
        "SELECT max(seq), sum(count) FROM (SELECT seq, count(*) AS count,"
        " sum(count(*)) OVER (ORDER BY seq) / :most AS piece FROM rounds LEFT JOIN contributions"
        " USING (seq) WHERE seq > :since GROUP BY seq) GROUP BY piece ORDER BY piece",
        since=since,
        most=ROWS_MAX,
    )
    return [(until, count) for until, count in rows]


def _rows(history: History, since: int, until: int) -> Tables:
    """The rows of some rounds, and the small tables."""
    some = "WHERE seq > :since AND seq <= :until"
    columns = _columns()
    tables: Tables = {}
    for table in (*WHOLE, *BY_ROUND):
        condition = some if table in BY_ROUND else ""
        rows = history.query(f"SELECT * FROM {table} {condition}", since=since, until=until)
        # A directory of an older schema lacks a column, or has it as the last one.
        tables[table] = [list(map(dict(row).get, columns[table])) for row in rows]
    return tables


def _columns() -> dict[Table, list[str]]:
    """The columns of each table in SCHEMA, which are those of a database that is restored."""
    with closing(sqlite3.connect(":memory:")) as db:
        db.executescript(SCHEMA)
        tables = (*WHOLE, *BY_ROUND)
        return {
            each: [str(row[1]) for row in db.execute(f"PRAGMA table_info({each})")]
            for each in tables
        }


def _read_latest(store: ObjectStore) -> tuple[bytes, PutMode]:
    """The newest manifest as it stands there, b"" if there is none, and the condition under which
    another one may take its place."""
    try:
        found = obstore.get(store, LATEST)
    except FileNotFoundError:
        return b"", "create"
    version: UpdateVersion = {"e_tag": found.meta["e_tag"]}
    if found.meta["version"] is not None:
        version["version"] = found.meta["version"]
    return bytes(found.bytes()), version


def _decoded(data: bytes) -> Manifest:
    """Raises ConfigError for a manifest that this release cannot read."""
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
        if manifest.schema == SCHEMA_VERSION:
            return manifest
        got = f"version {manifest.schema}"
    except ValueError as error:
        got = str(error)[:200]
    raise ConfigError(
        f"{LATEST} in the store",
        expected=f"a manifest of `narrows mirror`, version {SCHEMA_VERSION}",
        got=got,
        remedy="Take the release that wrote it, or another place in the store",
    )


def pull(store: ObjectStore, folder: Path) -> Manifest:
    """Makes a state directory of the newest copy. The database comes last: no broker starts on half
    of one. Raises ConfigError if the folder has content or the store no copy, StateError if an
    object is missing."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            f"{folder} exists",
            expected="a new directory, or one that is empty",
            got="one with content" if folder.is_dir() else "a file",
            remedy="Choose another one. If a pull was cut off there, remove it first",
        )
    latest, _ = _read_latest(store)
    if not latest:
        raise ConfigError(
            "there is no copy", expected=f"{LATEST} at the URL that was given to a push"
        )
    for each in (folder, folder / "packs", folder / "fragments"):
        each.mkdir(mode=0o700, parents=True, exist_ok=True)
    unfinished = folder / f"{DATABASE}.new"
    while True:
        manifest = _decoded(latest)
        try:
            _fetch_files(store, folder, manifest)
            _fetch_rows(store, unfinished, manifest)
            break
        except FileNotFoundError as error:
            # A mirror that runs deletes what two manifests do not name. What is here already stays.
            before = latest
            latest, _ = _read_latest(store)
            if latest == before:
                raise files.damaged(
                    folder, expected="the objects that are named", got=first_line(error)
                ) from error
    for each in (folder / "packs", folder / "fragments"):
        files.sync_folder(each)
    unfinished.rename(folder / DATABASE)
    files.sync_folder(folder)
    files.sync_folder(folder.absolute().parent)
    return manifest


def _fetch_files(store: ObjectStore, folder: Path, manifest: Manifest) -> None:
    """Appends to each file the parts that it lacks."""
    for name, parts in manifest.files.items():
        with (folder / name).open("ab") as file:
            for part in parts:
                if file.tell() < part.end:
                    file.write(obstore.get(store, part.key).bytes())
            file.flush()
            os.fsync(file.fileno())


def _fetch_rows(store: ObjectStore, file: Path, manifest: Manifest) -> None:
    """Makes the database of a copy, durable. Raises StateError if its rows do not fit."""
    file.unlink(missing_ok=True)
    file.touch(mode=0o600)
    with database_errors(file), closing(sqlite3.connect(file)) as db:
        db.executescript(SCHEMA)
        for piece in manifest.pieces:
            data = zstandard.decompress(bytes(obstore.get(store, piece.key).bytes()))
            for table, rows in msgspec.msgpack.decode(data, type=Tables).items():
                if table in WHOLE:
                    db.execute(f"DELETE FROM {table}")
                if rows:
                    marks = ", ".join("?" for _ in rows[0])
                    db.executemany(f"INSERT OR REPLACE INTO {table} VALUES ({marks})", rows)
        # Pieces keep the places of payloads that the broker has dropped since.
        packs = [int(Path(name).stem) for name in manifest.files if name.startswith("packs/")]
        db.execute(
            "UPDATE contributions SET pack = NULL, offset = NULL, sizes = NULL WHERE pack NOT IN"
            " (SELECT value FROM json_each(:packs))",
            {"packs": msgspec.json.encode(packs).decode()},
        )
        db.commit()
