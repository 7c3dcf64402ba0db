"""Event files: bounded, whole lines, and no error that ends their writer."""

from __future__ import annotations

import errno
import json
import logging
import os
import resource
from pathlib import Path
from typing import Any, cast

import pytest

from narrows.proto.shell.event_file import EventFile

LOG = logging.getLogger("narrows.test")


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_bytes().splitlines() if line]


def numbers(path: Path) -> list[int]:
    return [line["number"] for line in lines(path)]


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == LOG.name]


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A switch: while it holds True the disk has no room for another file."""
    switch = [True]
    real = Path.open

    def opened(path: Path, *args: Any, **kwargs: Any) -> Any:
        if switch[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return cast(Any, real)(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", opened)
    return switch


def test_lines_are_appended_with_the_time(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for number in range(2):
        events = EventFile(path, LOG)
        events.write({"event": "note", "number": number})
        events.close()
    assert numbers(path) == [0, 1]
    assert all(line["time_s"] > 0 and line["event"] == "note" for line in lines(path))


def test_the_file_and_its_predecessor_are_bounded(tmp_path: Path) -> None:
    path, before = tmp_path / "events.jsonl", tmp_path / "events.jsonl.1"
    for start in (0, 100):  # The second process counts what the first one has left.
        events = EventFile(path, LOG, bytes_max=1000)
        for number in range(start, start + 100):
            events.write({"number": number})
            assert path.stat().st_size <= 1000
        events.close()
    kept = numbers(before) + numbers(path)
    assert kept == list(range(200 - len(kept), 200)) and before.stat().st_size > 900
    assert sorted(os.listdir(tmp_path)) == [path.name, before.name]


def test_a_line_beyond_the_bound_gets_a_file_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    events = EventFile(path, LOG, bytes_max=100)
    for number in range(2):
        events.write({"number": number, "text": "x" * 200})
    events.close()
    assert numbers(path) == [1] and numbers(tmp_path / "events.jsonl.1") == [0]


def test_what_is_no_regular_file_is_not_replaced(tmp_path: Path) -> None:
    events = EventFile(Path(os.devnull), LOG, bytes_max=10)
    for number in range(10):
        events.write({"number": number})
    events.close()
    assert Path(os.devnull).is_char_device()


def test_a_file_that_cannot_be_opened_anew_is_opened_later(
    tmp_path: Path, full: list[bool], caplog: pytest.LogCaptureFixture
) -> None:
    """The one before has been moved away already: there is none to move again."""
    path = tmp_path / "events.jsonl"
    full[0] = False
    events = EventFile(path, LOG, bytes_max=100)
    for number in range(2):
        events.write({"number": number})
    full[0] = True
    for number in range(2, 6):
        events.write({"number": number})
    full[0] = False
    for number in range(6, 8):
        events.write({"number": number})
    events.close()
    assert numbers(path)[-1] == 7 and len(said(caplog)) == 1


def test_a_full_disk_is_told_once_and_left_again(
    tmp_path: Path, full: list[bool], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path = tmp_path / "events.jsonl"
    events = EventFile(path, LOG)
    for number in range(3):
        events.write({"number": number})
    assert len(said(caplog)) == 1 and "No space left on device" in said(caplog)[0]
    full[0] = False
    for number in range(3, 5):
        events.write({"number": number})
    events.close()
    assert numbers(path) == [3, 4] and len(said(caplog)) == 2
    assert "again; 3 are missing" in said(caplog)[1]


def test_a_line_that_was_cut_off_spoils_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The kernel takes a part of the line that passes the limit, then none: as a full disk does."""
    caplog.set_level(logging.INFO)
    path = tmp_path / "events.jsonl"
    events = EventFile(path, LOG)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (120, before[1]))
    try:
        for number in range(6):
            events.write({"number": number})
        assert path.stat().st_size == 120
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    for number in range(6, 8):
        events.write({"number": number})
    events.close()
    whole: list[int] = []
    for line in path.read_bytes().splitlines():
        try:
            whole.append(json.loads(line)["number"])
        except ValueError:
            assert line.startswith(b'{"time_s"')
    assert whole[-2:] == [6, 7] and whole[:-2] == list(range(len(whole) - 2)) and len(whole) < 8
    assert "File too large" in said(caplog)[0] or "No space left" in said(caplog)[0]
    assert f"{8 - len(whole)} are missing" in said(caplog)[1] and len(said(caplog)) == 2


def test_a_path_that_cannot_be_opened_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        EventFile(tmp_path / "missing" / "events.jsonl", LOG)


def test_a_file_that_cannot_be_moved_away_stops_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "events.jsonl"
    (tmp_path / "events.jsonl.1").mkdir()
    (tmp_path / "events.jsonl.1" / "in the way").touch()
    events = EventFile(path, LOG, bytes_max=100)
    for number in range(10):
        events.write({"number": number})
    events.close()
    assert path.stat().st_size <= 100 and len(said(caplog)) == 1
