"""The mirror: a copy is whole or is not there, whatever the broker does meanwhile; what makes a
mirror give up; pieces stay few; and no metadata service is asked who this machine is."""

import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from shutil import copytree
from typing import Any

import msgspec
import obstore
import pytest
from cli_cases import Narrows
from obstore.exceptions import BaseError
from obstore.store import MemoryStore, S3Store, from_url
from test_store import Run, heads, next_version

from narrows.broker import mirror as copies
from narrows.broker.mirror import Manifest, Mirror, opened, pull
from narrows.broker.store import History, Store
from narrows.proto.errors import ConfigError, ErrorCode, StateError


def latest(store: Any) -> Manifest:
    return msgspec.json.decode(bytes(obstore.get(store, "latest.json").bytes()), type=Manifest)


def objects(store: Any) -> set[str]:
    paths = {each["path"] for batch in obstore.list(store) for each in batch}
    return paths - {"latest.json"}


def rows(folder: Path) -> dict[str, list[Any]]:
    """All tables of a state directory but `lives`."""
    tables = ("run", "rounds", "contributions", "merged", "snapshots")
    with closing(sqlite3.connect(folder / "run.db")) as db:
        return {name: db.execute(f"SELECT * FROM {name}").fetchall() for name in tables}


def check_whole(folder: Path) -> int:
    """An audit finds nothing; returns the newest round."""
    with closing(History(folder)) as history:
        assert history.audit().problems == ()
        (row,) = history.query("SELECT coalesce(max(seq), 0) AS seq FROM rounds")
        return int(row["seq"])


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path / "state")
    yield made
    made.store.close()


@pytest.fixture(params=["memory", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return MemoryStore() if request.param == "memory" else opened(f"file://{tmp_path}/bucket/run")


class Puts:
    """Calls `before` ahead of each object that a mirror puts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.before: Callable[[str], object] = lambda key: None
        self.put = obstore.put

        def watched(store: Any, key: str, data: bytes, **options: Any) -> Any:
            self.before(key)
            return self.put(store, key, data, **options)

        monkeypatch.setattr(obstore, "put", watched)
        monkeypatch.setattr(copies, "PARTS_AT_ONCE", 1)


@pytest.fixture
def puts(monkeypatch: pytest.MonkeyPatch) -> Puts:
    return Puts(monkeypatch)


def test_a_copy_is_the_run_and_a_broker_goes_on_from_it(
    run: Run, store: Any, tmp_path: Path
) -> None:
    mirror = Mirror(run.folder, store)
    run.rounds(2)
    for turn in range(4):  # A snapshot drops older ones, and in time the packs before them.
        assert mirror.push() is not None
        assert mirror.push() is None
        run.rounds(2)
        run.store.snapshot(run.head(turn % 2))
        run.store._packs.close()
    pushed = mirror.push()
    assert pushed is not None and objects(store) >= pushed[0].keys()
    target = tmp_path / "restored"
    assert pull(store, target) == pushed[0]
    assert rows(target) == rows(run.folder)
    assert check_whole(target) == pushed[0].seq == 2 + 4 + 16
    assert heads(target) == heads_of(run)
    # What the broker has dropped is not there any more, but for the copy before.
    mirror.push()
    files = {path.name for path in run.folder.glob("packs/*")}
    assert {Path(name).name for name in latest(store).files if "pack" in name} <= files


@pytest.mark.parametrize("starts_first", [True, False])
def test_a_directory_of_an_older_schema_is_restored(
    run: Run, starts_first: bool, tmp_path: Path
) -> None:
    run.rounds(3)
    run.store.close()
    with closing(sqlite3.connect(run.folder / "run.db")) as db:
        db.executescript("ALTER TABLE contributions DROP COLUMN loss; PRAGMA user_version = 1")
    if starts_first:  # It adds the column as the last one.
        Store(run.folder, durable=False).close()
    store = MemoryStore()
    assert Mirror(run.folder, store).push() is not None
    pull(store, tmp_path / "restored")
    assert check_whole(tmp_path / "restored") == latest(store).seq
    assert heads(tmp_path / "restored") == heads(run.folder)


def test_a_copy_of_a_release_before_is_restored_and_goes_on(run: Run, tmp_path: Path) -> None:
    """Pieces did not say their rows, and the manifest before was kept."""
    store = MemoryStore()
    Mirror(run.folder, store).push()
    said = msgspec.json.encode(latest(store)).replace(b'"rows"', b'"unknown"')
    for name in ("latest.json", "previous.json"):
        obstore.put(store, name, said)
    pull(store, tmp_path / "before")
    run.rounds(1)
    Mirror(run.folder, store).push()
    pull(store, tmp_path / "after")
    assert [check_whole(tmp_path / name) for name in ("before", "after")] == [2, 4]
    assert len(latest(store).pieces) == 1 and "previous.json" not in objects(store)


def heads_of(run: Run) -> list[tuple[int, str]]:
    run.store.close()
    return heads(run.folder)


def test_no_look_holds_up_a_commit_and_each_copy_is_of_one_moment(
    run: Run, puts: Puts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore()
    mirror = Mirror(run.folder, store)
    run.store._db.execute("PRAGMA busy_timeout = 0")
    query = History.query

    def meanwhile(_: str) -> None:
        run.rounds(1)
        for fragment in range(2):
            run.store.snapshot(run.head(fragment))
        run.store._packs.close()

    def slow(history: History, sql: str, **named: object) -> list[sqlite3.Row]:
        found = query(history, sql, **named)
        if history is not run.store:
            monkeypatch.setattr(History, "query", query)
            run.rounds(2)  # Durable, while the transaction of the look is open.
            if "FROM snapshots" in sql and next(removes, None) is not None:
                meanwhile("")  # Files that these rows name are gone: it has to look again.
                meanwhile("")
            monkeypatch.setattr(History, "query", slow)
        return found

    for turn in range(3):
        removes = iter(range(3))
        monkeypatch.setattr(History, "query", slow)
        puts.before = meanwhile
        pushed = mirror.push()
        monkeypatch.setattr(History, "query", query)
        puts.before = lambda key: None
        assert pushed is not None
        target = tmp_path / str(turn)
        pull(store, target)
        assert check_whole(target) == pushed[0].seq < 2 * len(run.states[0])


def test_a_push_that_breaks_off_anywhere_leaves_the_copy_before_whole(
    run: Run, puts: Puts, tmp_path: Path
) -> None:
    store = MemoryStore()
    run.rounds(1)
    pushed = Mirror(run.folder, store).push()
    assert pushed is not None
    seq = pushed[0].seq
    broken = 0
    for at in range(20):
        run.rounds(1)
        run.store.snapshot(run.head(0))
        left = iter(range(at))

        def breaks(key: str, left: Iterator[int] = left) -> None:
            if next(left, None) is None:
                raise BaseError("the line is cut")

        puts.before = breaks
        before = latest(store)
        mirror = Mirror(run.folder, store)
        try:
            mirror.push()
        except BaseError:
            broken += 1
            target = tmp_path / str(at)
            pull(store, target)
            assert check_whole(target) == seq
        puts.before = lambda key: None
        mirror.push()
        seq = latest(store).seq
        assert seq == 2 * len(run.states[0])
        # Nothing stays of what broke off.
        assert objects(store) - latest(store).keys() <= before.keys()
    assert 4 <= broken < 20


def test_an_answer_that_was_lost_is_no_other_mirror(run: Run, puts: Puts, store: Any) -> None:
    mirror = Mirror(run.folder, store)
    mirror.push()
    run.rounds(1)

    def lost(key: str) -> None:
        if key == "latest.json":
            puts.put(store, key, mirror._tried)
            raise BaseError("no answer")

    puts.before = lost
    with pytest.raises(BaseError):
        mirror.push()
    puts.before = lambda key: None
    run.rounds(1)
    assert mirror.push() is not None


def test_a_second_mirror_is_refused(run: Run, store: Any, puts: Puts, tmp_path: Path) -> None:
    first = Mirror(run.folder, store)
    second = Mirror(run.folder, store)
    first.push()
    with pytest.raises(StateError, match="another mirror writes") as refused:
        second.push()
    assert refused.value.code is ErrorCode.STATE_LOCKED
    third = Mirror(run.folder, store)
    run.rounds(1)
    third.push()
    with pytest.raises(StateError, match="another mirror writes"):
        first.push()
    pull(store, tmp_path / "restored")
    check_whole(tmp_path / "restored")


def test_a_store_that_compares_refuses_a_second_mirror_at_the_last_moment(
    run: Run, puts: Puts, tmp_path: Path
) -> None:
    store = MemoryStore()
    Mirror(run.folder, store).push()
    run.rounds(1)
    first = Mirror(run.folder, store)
    second = Mirror(run.folder, store)

    def overtakes(key: str) -> None:
        if key == "latest.json":
            puts.before = lambda key: None
            second.push()

    puts.before = overtakes
    with pytest.raises(BaseError):
        first.push()
    assert latest(store).keys() <= objects(store)
    with pytest.raises(StateError, match="another mirror writes"):
        first.push()


def test_a_directory_that_does_not_go_on_from_the_copy_is_refused(
    run: Run, store: Any, tmp_path: Path
) -> None:
    run.rounds(1)
    old = tmp_path / "old"
    copytree(run.folder, old)
    run.rounds(1)
    Mirror(run.folder, store).push()
    before = latest(store)
    with closing(History(run.folder)) as history:
        history.rollback(3, tmp_path / "back")
    other = Run(tmp_path / "other")
    other.rounds(4)
    other.store.close()
    for folder in (old, tmp_path / "back", other.folder):
        with pytest.raises(ConfigError, match="does not go on from the copy"):
            Mirror(folder, store).push()
    assert latest(store) == before
    # The run that was restored from the copy does go on from it.
    restored = tmp_path / "restored"
    pull(store, restored)
    assert Mirror(restored, store).push() is None


def test_pieces_of_the_rows_stay_few_and_fit_into_the_memory(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """However many learners a round has; and each row is sent a few times."""
    most = 32
    monkeypatch.setattr(copies, "ROWS_MAX", most)
    store = MemoryStore()
    mirror = Mirror(run.folder, store)
    sent: list[int] = []
    read = copies._rows

    def count(history: History, since: int, until: int) -> Any:
        tables = read(history, since, until)
        sent.append(len(tables["contributions"]))
        return tables

    monkeypatch.setattr(copies, "_rows", count)
    for index in range(100):
        names = [f"site-{number}" for number in range(2 if index % 10 else 30)]
        run.commit(next_version(run.head(0), names))
        mirror.push()
    pieces = latest(store).pieces
    assert [piece.since for piece in pieces] == [0, *(piece.until for piece in pieces[:-1])]
    assert pieces[-1].until == 102 and len(pieces) <= 480 / most + 5
    assert max(sent) <= most + 30 and sum(sent) <= 6 * 480
    # A copy of a run with a history needs no piece of all of it.
    sent.clear()
    Mirror(run.folder, MemoryStore()).push()
    assert sum(sent) == 480 and max(sent) <= most + 30
    pull(store, tmp_path / "restored")
    assert rows(tmp_path / "restored") == rows(run.folder)


def test_files_travel_in_parts(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(copies, "PART_BYTES", 1000)
    store = MemoryStore()
    run.rounds(2)
    Mirror(run.folder, store).push()
    assert max(len(parts) for parts in latest(store).files.values()) > 2
    pull(store, tmp_path / "restored")
    check_whole(tmp_path / "restored")


def test_a_pull_beside_a_mirror_that_goes_on_takes_the_newer_copy(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store = MemoryStore()
    mirror = Mirror(run.folder, store)
    mirror.push()
    get = obstore.get
    late = ["rows", "packs", "fragments"]

    def slow(store: Any, key: str) -> Any:
        if late and key.startswith(late[-1]):
            late.pop()
            for _ in range(3):  # One fragment's files stay.
                run.rounds(1)
                run.store.snapshot(run.head(0))
                mirror.push()
        return get(store, key)

    monkeypatch.setattr(obstore, "get", slow)
    manifest = pull(store, tmp_path / "restored")
    assert not late and check_whole(tmp_path / "restored") == manifest.seq > 2


def test_a_copy_without_one_of_its_objects_is_named(run: Run, tmp_path: Path) -> None:
    store = MemoryStore()
    run.rounds(1)
    Mirror(run.folder, store).push()
    obstore.delete(store, next(key for key in objects(store) if key.startswith("packs")))
    with pytest.raises(StateError, match="objects that are named"):
        pull(store, tmp_path / "restored")
    with pytest.raises(ConfigError, match="one with content"):
        pull(store, tmp_path / "restored")


@pytest.mark.parametrize(
    "said",
    [b"{}", b"no json", b'{"run_id": "a", "schema": 99}',
     b'{"run_id": "a", "files": {"../../etc/passwd": []}}'],
)  # fmt: skip
def test_a_manifest_that_no_mirror_wrote_is_refused(said: bytes, tmp_path: Path) -> None:
    store = MemoryStore()
    obstore.put(store, "latest.json", said)
    for act in (lambda: pull(store, tmp_path / "new"), lambda: Mirror(tmp_path, store)):
        with pytest.raises(ConfigError, match=r"a manifest of `narrows mirror`"):
            act()


def test_the_command_line_restores_and_audits(
    run: Run, narrows: Narrows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.rounds(2)
    run.store.end()
    url = f"file://{tmp_path}/bucket"
    assert narrows.run("mirror", "push", str(run.folder), url, "--every", "1h") == 0
    assert narrows.run("mirror", "pull", url, "restored") == 0
    assert "as of round 6" in narrows.out and "6 rounds are in order" in narrows.out
    assert narrows.run("mirror", "pull", url, "restored") == 2
    assert "expected a new directory, or one that is empty" in narrows.err
    assert narrows.run("mirror", "pull", f"file://{tmp_path}/nothing", "new") == 2
    assert "there is no copy" in narrows.err and not Path("new").exists()
    assert narrows.run("mirror", "push", "nowhere", url) == 2
    assert narrows.run("mirror", "push", str(run.folder), "https://host/a") == 2
    assert "expected s3://..., gs://..., az://..., file://..." in narrows.err


def test_no_metadata_service_is_asked_for_credentials(
    run: Run, narrows: Narrows, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    class Metadata(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        do_GET = do_PUT

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Metadata) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
        for name in names:
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("AWS_METADATA_ENDPOINT", address)
        monkeypatch.setenv("AWS_ENDPOINT", address)
        monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
        once: Any = {"max_retries": 0}
        try:
            # The library would ask.
            library = from_url("s3://bucket/run", retry_config=once)
            assert isinstance(library, S3Store)
            with pytest.raises(BaseError):
                obstore.head(library, "latest.json")
            assert any("latest/" in path for path in asked)
            asked.clear()
            for url in ("s3://bucket/run", "gs://bucket/run", "az://account/container/run"):
                assert narrows.run("mirror", "push", str(run.folder), url) == 2
                assert "No metadata service is asked" in narrows.err
                assert asked == []
            for name in names:
                monkeypatch.setenv(name, "secret")
            assert narrows.run("mirror", "push", str(run.folder), "s3://bucket/run") == 2
            assert asked  # The place of the store: this server plays both.
        finally:
            server.shutdown()
            thread.join()
    assert not any("/latest/" in path for path in asked), asked
