"""Any damage or failure at any moment: the old or the new state comes back, whole."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from checkpoint_cases import (
    CALLS,
    REAL,
    RUN,
    Killed,
    each_failure,
    generations,
    loaded,
    newest,
    prepared,
    same,
    snapshot,
)

from narrows.broker.storage.checkpoint import StateDir, StateError
from narrows.proto.errors import ErrorCode

# Damage.


def damaged_files() -> list[str]:
    return ["manifest.json", "fragment-00000.safetensors", "fragment-00001.safetensors"]


@pytest.mark.parametrize("name", damaged_files())
def test_any_flipped_bit_falls_back_loudly(name: str, tmp_path: Path) -> None:
    path = prepared(tmp_path, 1, 2)
    file = newest(path) / name
    data = file.read_bytes()
    for place in range(0, len(data), max(1, len(data) // 60)):
        flipped = bytearray(data)
        flipped[place] ^= 1 << (place % 8)
        file.write_bytes(flipped)
        found, warnings = loaded(path)
        assert same(found, snapshot(1)), place
        assert len(warnings) == 1 and "checkpoint-00000002" in warnings[0]
        assert name in warnings[0]
    file.write_bytes(data)
    assert same(loaded(path)[0], snapshot(2))


@pytest.mark.parametrize("name", damaged_files())
@pytest.mark.parametrize("change", ["cut", "empty", "longer", "missing", "link", "pipe"])
def test_a_file_that_is_not_what_was_written_falls_back(
    name: str, change: str, tmp_path: Path
) -> None:
    path = prepared(tmp_path / "state", 1, 2)
    file = newest(path) / name
    data = file.read_bytes()
    contents = {"cut": data[:-1], "empty": b"", "longer": data + b"\0"}
    file.unlink()
    if change in contents:
        file.write_bytes(contents[change])
    elif change == "link":
        (tmp_path / "elsewhere").write_bytes(data)
        file.symlink_to(tmp_path / "elsewhere")
    elif change == "pipe":
        os.mkfifo(file)
    found, warnings = loaded(path)
    assert same(found, snapshot(1))
    assert len(warnings) == 1 and name in warnings[0]


def test_a_linked_generation_is_not_followed(tmp_path: Path) -> None:
    path = prepared(tmp_path / "state", 1, 2)
    newest(path).rename(tmp_path / "elsewhere")
    (path / "checkpoint-00000002").symlink_to(tmp_path / "elsewhere")
    found, warnings = loaded(path)
    assert same(found, snapshot(1)) and "checkpoint-00000002" in warnings[0]


def test_a_generation_of_another_run_is_passed_over(tmp_path: Path) -> None:
    ours, theirs = prepared(tmp_path / "ours", 1), tmp_path / "theirs"
    with StateDir.open(theirs) as state:
        state.begin_epoch("another", "config")
    (ours / "checkpoint-00000001").rename(theirs / "checkpoint-00000001")
    with StateDir.open(theirs) as state, pytest.raises(StateError, match=f"of run {RUN}"):
        state.load()


def test_nothing_whole_is_said_with_a_remedy(tmp_path: Path) -> None:
    path = prepared(tmp_path, 1, 2)
    for each in path.glob("checkpoint-*/manifest.json"):
        each.unlink()
    with StateDir.open(path) as state, pytest.raises(StateError) as caught:
        state.load()
    assert caught.value.code == ErrorCode.STATE_DAMAGED
    assert "checkpoint-00000001" in caught.value.got and "checkpoint-00000002" in caught.value.got
    assert caught.value.remedy


def test_saving_never_removes_the_last_whole_generation(tmp_path: Path) -> None:
    path = prepared(tmp_path, 1, 2)
    (newest(path) / "manifest.json").write_bytes(b"{}")
    with StateDir.open(path) as state:
        assert same(state.load(), snapshot(1))
        assert state.save(snapshot(5)) == 3
    assert generations(path) == ["checkpoint-00000001", "checkpoint-00000003"]


def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    path = prepared(tmp_path, 1)
    foreign = ["notes.txt", "checkpoint-7", "checkpoint-00000009.bak", ".new-run.json.swp~"]
    for name in foreign:
        (path / name).write_text("mine")
    (path / "checkpoint-0000000x").mkdir()
    with StateDir.open(path) as state:
        assert same(state.load(), snapshot(1)) and state.warnings == []
        for version in (2, 3, 4):
            state.save(snapshot(version))
    assert [(path / name).read_text() for name in foreign] == ["mine"] * len(foreign)
    assert same(loaded(path)[0], snapshot(4))


def test_what_an_interrupted_save_left_is_no_harm(tmp_path: Path) -> None:
    path = prepared(tmp_path, 1)
    for name in (".new-checkpoint-00000002", ".old-checkpoint-00000005"):
        (path / name).mkdir()
        (path / name / "fragment-00000.safetensors").write_bytes(b"half")
        (path / name / "foreign").write_text("")
    (path / ".new-run.json").write_bytes(b"half")
    with StateDir.open(path) as state:
        assert state.begin_epoch(RUN, "config").epoch == (1, 2)
        state.save(snapshot(2))
        state.save(snapshot(3))
    assert same(loaded(path)[0], snapshot(3)) and len(generations(path)) == 2


def test_a_save_frees_the_space_of_an_interrupted_one_first(tmp_path: Path) -> None:
    path = prepared(tmp_path)
    (path / ".new-checkpoint-00000001").mkdir()
    (path / ".new-checkpoint-00000001" / "fragment-00000.safetensors").write_bytes(b"half")
    with StateDir.open(path) as state:
        state.save(snapshot(1))
    assert [each.name for each in path.glob(".*")] == []
    assert same(loaded(path)[0], snapshot(1))


# Failures of the system, at every single call.


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "disk full"), Killed()], ids=["io", "kill"]
)
@pytest.mark.parametrize("call", CALLS)
def test_a_save_that_fails_anywhere_leaves_the_old_or_the_new_state(
    call: str, error: BaseException, tmp_path: Path
) -> None:
    path = prepared(tmp_path, 1, 2)
    last = 2
    seen: set[str] = set()

    def attempt() -> None:
        with StateDir.open(path) as state:
            state.save(snapshot(last + 1))

    def attempt_and_check() -> None:
        nonlocal last
        try:
            attempt()
        finally:
            with pytest.MonkeyPatch.context() as unpatched:
                for name in CALLS:
                    unpatched.setattr(os, name, REAL[name])
                found, warnings = loaded(path)
            old, new = same(found, snapshot(last)), same(found, snapshot(last + 1))
            assert old != new and warnings == []
            seen.add("new" if new else "old")
            last += new

    assert each_failure(attempt_and_check, call, error) >= 1
    # The run without any failure is the last one.
    read_back_unheard = call == "readv" and isinstance(error, Killed)
    assert seen == ({"new"} if read_back_unheard else {"old", "new"})
    assert same(loaded(path)[0], snapshot(last))
    assert len(generations(path)) == 2


@pytest.mark.parametrize("error", [OSError(errno.EIO, "disk"), Killed()], ids=["io", "kill"])
@pytest.mark.parametrize("call", [name for name in CALLS if name != "mkdir"])
def test_no_epoch_is_given_out_twice_wherever_a_start_fails(
    call: str, error: BaseException, tmp_path: Path
) -> None:
    path = prepared(tmp_path, 1)
    served = [(1, 1)]

    def start() -> None:
        with StateDir.open(path) as state:
            served.append(state.begin_epoch(RUN, "config").epoch)

    assert each_failure(start, call, error) >= 1
    assert len(served) > 1 and served == sorted(set(served))
    assert same(loaded(path)[0], snapshot(1))


def test_a_disk_that_gives_back_other_bytes_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = prepared(tmp_path, 1)
    real = os.write

    def fake(fd: int, data: memoryview) -> int:
        return real(fd, bytes(len(data)) if len(data) > 60 and data[0] != ord("{") else data)

    with StateDir.open(path) as state:
        monkeypatch.setattr(os, "write", fake)
        with pytest.raises(StateError, match="reads back differently"):
            state.save(snapshot(2))
        monkeypatch.undo()
        assert same(state.load(), snapshot(1))
    assert generations(path) == ["checkpoint-00000001"]


def test_the_manifest_is_written_last_and_everything_before_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, trace = prepared(tmp_path), list[str]()
    real_open, real_fsync, real_rename = os.open, os.fsync, os.rename
    names: dict[int, str] = {}

    def fake_open(name: str, flags: int, *rest: int, **named: int) -> int:
        fd = real_open(name, flags, *rest, **named)
        names[fd] = str(name)
        return fd

    def fake_fsync(fd: int) -> None:
        trace.append(f"fsync {names[fd]}")
        real_fsync(fd)

    def fake_rename(source: str, target: str, **named: int) -> None:
        trace.append(f"rename {target}")
        real_rename(source, target, **named)

    monkeypatch.setattr(os, "open", fake_open)
    monkeypatch.setattr(os, "fsync", fake_fsync)
    monkeypatch.setattr(os, "rename", fake_rename)
    with StateDir.open(path) as state:
        state.save(snapshot(1))
    assert trace == [
        "fsync fragment-00000.safetensors",
        "fsync fragment-00001.safetensors",
        "fsync manifest.json",
        "fsync .new-checkpoint-00000001",
        "rename checkpoint-00000001",
        f"fsync {path}",
    ]
