"""A start on a state directory: the same bits again, or an error that names the file; and the
safetensors files of users."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from store_cases import (
    LAYOUT,
    TABLE,
    Run,
    facts,
    heads,
    next_version,
    recovered_states,
)

from narrows.broker.merging import merge
from narrows.broker.records import FragmentState, Round, Version
from narrows.broker.store import History, Store, export_model, files, read_initial
from narrows.broker.store import history as history_module
from narrows.proto.errors import ConfigError, ErrorCode, StateError
from narrows.proto.layout import Fragment


def flip(path: Path, offset: int) -> None:
    """Turns one bit of a file."""
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def change(folder: Path, sql: str) -> None:
    with closing(sqlite3.connect(folder / "run.db")) as db, db:
        db.execute(sql)


@pytest.fixture
def stopped(tmp_path: Path) -> Run:
    """Four rounds of each fragment, snapshots of fragment 0 at versions 0 and 2."""
    run = Run(tmp_path / "run")
    run.rounds(2)
    run.store.snapshot(run.head(0))
    run.rounds(2)
    run.store.close()
    return run


def refusal(folder: Path) -> StateError:
    """The error of a start, which must change nothing that is left."""
    before = set(folder.rglob("*"))
    with pytest.raises(StateError) as caught, closing(Store(folder)) as store:
        list(recovered_states(store))
    assert caught.value.code is ErrorCode.STATE_DAMAGED and caught.value.remedy
    assert caught.value.expected and caught.value.got
    assert {each.name for each in before ^ set(folder.rglob("*"))} <= {"run.db-wal", "run.db-shm"}
    return caught.value


def test_a_damaged_snapshot_gives_way_to_the_older_one(stopped: Run) -> None:
    newest = stopped.folder / "fragments" / "0-2.safetensors"
    flip(newest, newest.stat().st_size - 5)
    with closing(Store(stopped.folder)) as store:
        found = store.recover(2.0)
        assert [state.version for state in found.states] == [0, 0]
        (note,) = found.notes
        assert str(newest) in note and "older snapshot" in note
        (*_, last) = store.replay(TABLE[0], found.states[0])
        assert last.state.digests == stopped.head(0).digests
        assert not newest.exists(), "it must not count as one of the two that are kept"


def test_damage_that_cannot_be_got_over_names_the_file(stopped: Run) -> None:
    pack = stopped.folder / "packs" / "00000001.pack"
    content = pack.read_bytes()
    flip(pack, len(content) - 3)
    error = refusal(stopped.folder)
    assert "packs/00000001.pack" in str(error) and "site-b in round 10" in error.expected
    pack.write_bytes(content[:-1])
    assert "packs/00000001.pack" in str(refusal(stopped.folder))
    pack.unlink()
    assert "No such file" in refusal(stopped.folder).got
    for name in ("0-2", "0-0"):
        (stopped.folder / "fragments" / f"{name}.safetensors").write_bytes(b"no tensors")
    assert "fragments/0-2.safetensors" in str(refusal(stopped.folder))


@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE rounds SET period_s = 2.25 WHERE seq = 7",
        "UPDATE rounds SET published = global WHERE seq = 7",
        "UPDATE rounds SET policy = '{}' WHERE seq = 7",
        "UPDATE rounds SET policy = 'x' WHERE seq = 7",
        "UPDATE contributions SET tokens = 101 WHERE seq = 7",
        "DELETE FROM contributions WHERE seq = 7 AND learner = 'site-a'",
        "UPDATE contributions SET digest = 'zz' WHERE seq = 7",
        "UPDATE contributions SET sizes = '[1' WHERE seq = 7",
        "DELETE FROM rounds WHERE seq = 7",
        "UPDATE run SET layout = replace(layout, 'rda', 'mean')",
        "UPDATE run SET layout = 'x'",
        "UPDATE run SET phase = 'x'",
        "DELETE FROM run",
        "DELETE FROM snapshots",
    ],
)
def test_changed_facts_are_noticed(stopped: Run, sql: str) -> None:
    change(stopped.folder, sql)
    assert re.search(r"run\.db|in round 7", str(refusal(stopped.folder)))


def test_a_merge_with_other_bits_is_noticed(stopped: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(fragment: Fragment, before: FragmentState, round_: Round) -> Version:
        """The arithmetic of another release."""
        policy = replace(round_.policy, outer_lr=round_.policy.outer_lr * (1 + 2**-20))
        return merge(fragment, before, replace(round_, policy=policy))

    monkeypatch.setattr(history_module, "merge", other)
    assert "version 3 of fragment 0 with digests" in refusal(stopped.folder).expected


def test_a_database_that_is_none_or_another_ones(stopped: Run, tmp_path: Path) -> None:
    folder = stopped.folder
    change(folder, "PRAGMA user_version = 2")
    error = refusal(folder)
    assert (error.expected, error.got) == ("user_version 1", "2")
    (folder / "run.db").write_bytes(b"x" * 5000)
    assert "run.db" in str(refusal(folder)) and "not a database" in refusal(folder).got
    (folder / "run.db").unlink()
    assert "no file" in str(refusal(folder)), "a new database would forget the run"
    with closing(sqlite3.connect(folder / "run.db")) as db:
        db.execute("CREATE TABLE theirs (x)")
    assert refusal(folder).got == "0"


def test_an_audit_finds_what_is_damaged_and_nothing_else(stopped: Run) -> None:
    folder = stopped.folder
    with closing(History(folder)) as history:
        assert history.audit() == (10, 8, ())
        sums = "SELECT sum(weight), min(norm) > 0 FROM contributions WHERE seq = 6"
        assert history.query(sums) == [(pytest.approx(1.0), 1)]
    flip(folder / "packs" / "00000001.pack", 20)
    change(folder, "UPDATE run SET clock = 5")
    change(folder, "UPDATE rounds SET reason = 'nobody' WHERE seq = 10")
    snapshot = folder / "fragments" / "1-0.safetensors"
    flip(snapshot, snapshot.stat().st_size - 1)
    with closing(History(folder)) as history:
        problems = "\n".join(history.audit().problems)
    for each in ("clock 5", "00000001.pack", "round 10", "1-0.safetensors"):
        assert each in problems


def test_history_can_be_read_while_the_broker_runs(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.rounds(1)
    with closing(History(tmp_path)) as history:
        run.round(0)
        merged = run.round(1)
        newest = list(history.rounds())[-1]
        assert (newest.seq, newest.round_.version, history.run.clock) == (6, 2, 800)
        assert [each.learner for each in newest.round_.contributions] == ["site-a", "site-b"]
        facts_of_trust = "SELECT weight, norm FROM contributions WHERE seq = 6 ORDER BY learner"
        assert history.query(facts_of_trust) == [*zip(merged.weights, merged.norms, strict=True)]
        assert facts(list(history.states())) == facts([run.head(0), run.head(1)])
    run.store.close()


@pytest.mark.parametrize("what", ["audit", "states"])
def test_what_a_running_broker_removes_meanwhile_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(files, "PACK_BYTES", 1)
    run, read_state = Run(tmp_path), files.read_state

    def read_late(*arguments: Any) -> FragmentState:
        """Reads the first snapshot when two newer ones have taken its place."""
        while run.head(0).version < 3:
            run.rounds(1)
            for fragment in (0, 1):
                run.store.snapshot(run.head(fragment))
        return read_state(*arguments)

    run.rounds(1)
    monkeypatch.setattr(files, "read_state", read_late)
    with closing(History(tmp_path)) as history:
        if what == "audit":
            assert history.audit() == (4, 2, ())
        else:
            assert facts(list(history.states())) == facts([run.head(0), run.head(1)])
    run.store.close()


def test_a_rollback_makes_a_new_directory_and_leaves_the_old_one(
    stopped: Run, tmp_path: Path
) -> None:
    folder, target = stopped.folder, tmp_path / "back"
    # What comes after the round that is gone back to may be damaged.
    pack = folder / "packs" / "00000001.pack"
    flip(pack, pack.stat().st_size - 1)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with closing(History(folder)) as history:
        history.rollback(7, target)
        with pytest.raises(ConfigError, match="exists"):
            history.rollback(7, target)
    assert {path: path.read_bytes() for path in before} == before
    assert heads(target) == facts([stopped.states[0][3], stopped.states[1][2]])
    with closing(Store(target)) as store:
        found = store.recover(3.0)
        assert (found.clock, found.life, found.merged["site-a.00000001", 1]) == (1000, 3, 2)
        for state in found.states:
            version = next_version(state)
            store.commit(version)
            # The same pushes on the same state: the same version as in the old directory.
            old = stopped.states[state.fragment][version.state.version]
            assert version.state.digests == old.digests
    with closing(History(target)) as history:
        assert history.audit().problems == ()


def test_a_rollback_beyond_the_snapshots_says_what_is_missing(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    for _ in range(3):
        run.rounds(1)
        run.store.snapshot(run.head(0))
    run.store.close()
    with closing(History(run.folder)) as history:
        for until in (1, 4):
            with pytest.raises(ConfigError, match=r"got no snapshot.*keep_history"):
                history.rollback(until, tmp_path / "back")


def test_a_directory_without_a_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StateError, match=r"file.*--state-dir"):
        Store(tmp_path / "file" / "run")
    Store(tmp_path).close()
    with closing(History(tmp_path)) as history:
        assert (history.run.layout, list(history.states())) == (None, [])


# Safetensors files of users: version 0 to begin with, and the export of the model.


def tensors() -> dict[str, torch.Tensor]:
    """The layout's tensors in three dtypes, and one that no layout names."""
    torch.manual_seed(1)
    return {
        "embedding": torch.randn(20, 16),
        "layer/weight": torch.randn(24, 16).to(torch.bfloat16),
        "scale": torch.randn(16).to(torch.float16),
        "cache": torch.arange(5),
    }


def test_a_file_becomes_version_0_and_version_0_the_same_file(tmp_path: Path) -> None:
    begin, end = tmp_path / "begin.safetensors", tmp_path / "end.safetensors"
    save_file(tensors(), begin)
    states = read_initial(begin, LAYOUT, TABLE)
    assert [state.version for state in states] == [0, 0]
    assert all(not state.momentum.any() for state in states)
    assert [state.digests.global_ for state in states] == [s.digests.published for s in states]
    del (expected := tensors())["cache"]
    # Values between those of a dtype are rounded as torch does.
    for factor in (1.0, 1.001):
        export_model(
            end, LAYOUT, TABLE, [state.global_ * np.float32(factor) for state in states], {}
        )
        found = load_file(end)
        assert list(found) == list(expected)
        for name, tensor in expected.items():
            wanted = (tensor.float() * factor).to(tensor.dtype)
            assert found[name].dtype == wanted.dtype and torch.equal(found[name], wanted), name


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("scale", None, "scale of shape.*no such tensor"),
        ("scale", torch.zeros(17), r"scale of shape \[16\].*got \[17\]"),
        ("scale", torch.zeros(16, dtype=torch.float64), "F32 or F16 or BF16.*F64"),
        ("scale", torch.full((16,), torch.nan), "scale.*finite"),
    ],
)
def test_a_file_that_does_not_fit(
    tmp_path: Path, name: str, tensor: torch.Tensor | None, message: str
) -> None:
    content = tensors()
    del content[name]
    if tensor is not None:
        content[name] = tensor
    save_file(content, tmp_path / "begin")
    with pytest.raises(ConfigError, match=message):
        read_initial(tmp_path / "begin", LAYOUT, TABLE)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_initial(tmp_path / "none", LAYOUT, TABLE)
    save_file(tensors(), tmp_path / "short")
    content = (tmp_path / "short").read_bytes()
    for cut in (b"", content[:5], content[:100], content[:-1]):
        (tmp_path / "short").write_bytes(cut)
        with pytest.raises(ConfigError, match="a safetensors file"):
            read_initial(tmp_path / "short", LAYOUT, TABLE)
