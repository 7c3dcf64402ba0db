"""`narrows wire` on files: what it prints, and one clear line for what it cannot read."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from narrows.__main__ import main
from narrows.broker.cli.dissecting import KINDS
from narrows.broker.cli.wire import routes_of
from narrows.proto.dissector import capture
from narrows.proto.dissector.tables import CONTROL
from narrows.proto.errors import ConfigError

Run = Callable[..., tuple[int, str, str]]
GOLDEN = Path(__file__).parents[1] / "golden"
STORED: dict[str, str] = json.loads((GOLDEN / "messages.json").read_text(encoding="utf-8"))
PROBE = bytes.fromhex(STORED["Probe"])


@pytest.fixture
def narrows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `narrows wire`; gives its exit code, output and error output."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["narrows", "wire", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        output, errors = capsys.readouterr()
        assert isinstance(caught.value.code, int)
        return caught.value.code, output, errors

    return run


def written(path: Path, *frames: capture.Captured) -> Path:
    path.write_bytes(capture.HEAD + b"".join(map(capture.packed, frames)))
    return path


def part(frame: bytes, *, index: int = 0, has_more: bool = False) -> capture.Captured:
    return capture.Captured("part", "down", 7, 0.25, frame, index, has_more)


def test_stored_frames(narrows: Run) -> None:
    code, output, _ = narrows(GOLDEN / "messages.json")
    assert code == 0
    for name in STORED:
        assert f"messages.json {name}  {name.lower()}  " in output
    assert output.endswith(f"{len(STORED)} in all, 0 of them faulty\n")


def test_frames_of_another_version_are_faulty(narrows: Run) -> None:
    code, output, _ = narrows(GOLDEN / "messages-version-2.json", "--only", "faulty")
    assert code == 1
    assert "byte 3: protocol_version: expected 3, got 2" in output


def test_a_single_frame(narrows: Run, tmp_path: Path) -> None:
    path = tmp_path / "frame"
    path.write_bytes(PROBE)
    code, output, _ = narrows(path)
    assert code == 0 and "frame  probe  31 bytes" in output
    path.write_bytes(PROBE[:-1] + b"\xff")
    code, output, _ = narrows(path)
    assert code == 1 and "!! byte 4: bad_checksum" in output
    path.write_bytes(PROBE + bytes(1 << 23))
    assert "too_large: expected at most 4194304 bytes" in narrows(path)[1]


def test_a_capture(narrows: Run, tmp_path: Path) -> None:
    path = written(tmp_path / "cap", part(PROBE), part(b"u", has_more=True))
    code, output, _ = narrows(path)
    assert code == 1 and "#7 down  probe  31 bytes" in output
    code, output, _ = narrows(path, "--json", "--only", "probe")
    first, summary = map(json.loads, output.splitlines())
    assert (first["kind"], first["connection"], first["direction"]) == ("probe", 7, "down")
    assert first["fields"][-1] == {"field": "nonce", "at": 30, "end": 31, "value": 5}
    assert {row["kind"]: row["frames"] for row in summary["summary"]} == {"probe": 1, "topic": 1}


def test_a_capture_that_was_cut(narrows: Run, tmp_path: Path) -> None:
    path = written(tmp_path / "cap", part(PROBE), part(PROBE))
    path.write_bytes(path.read_bytes()[:-1])
    code, output, _ = narrows(path)
    assert code == 1
    size = len(path.read_bytes())
    assert f"!! byte {size}: bad_record: expected the rest of the record begun at byte" in output
    assert output.count("  probe  ") == 1


@pytest.mark.parametrize(
    ("place", "data", "told"),
    [
        (0, b"\3", "byte 12: bad_record: expected a sort from 0 to 2, got 3"),
        (1, b"\4", "byte 13: bad_record: expected flags from 0 to 3, got 4"),
        (16, b"\xff" * 4, "byte 28: bad_record: expected up to"),
    ],
)
def test_a_capture_that_is_damaged(
    narrows: Run, tmp_path: Path, place: int, data: bytes, told: str
) -> None:
    record = bytearray(capture.packed(part(PROBE)))
    record[place : place + len(data)] = data
    path = tmp_path / "cap"
    path.write_bytes(capture.HEAD + record)
    code, output, _ = narrows(path)
    assert code == 1 and told in output


def test_a_capture_with_a_time_that_is_none(narrows: Run, tmp_path: Path) -> None:
    record = bytearray(capture.packed(part(PROBE)))
    record[8:16] = b"\xff" * 8
    path = tmp_path / "cap"
    path.write_bytes(capture.HEAD + record)
    assert "at no time  #7 down  probe" in narrows(path)[1]
    assert '"time": "nan"' in narrows(path, "--json")[1]


def test_a_journal_and_one_segment(narrows: Run) -> None:
    code, output, _ = narrows(GOLDEN / "state-format-1")
    assert code == 0 and "journal-00000001.log  committed  " in output
    code, alone, _ = narrows(GOLDEN / "state-format-1/journal/journal-00000001.log")
    assert code == 0 and alone.splitlines()[0] in output.splitlines()


def test_nothing_is_written_to_a_journal(narrows: Run, tmp_path: Path) -> None:
    state = tmp_path / "state"
    shutil.copytree(GOLDEN / "state-format-1", state)
    before = {path: (path.read_bytes() if path.is_file() else b"") for path in state.rglob("*")}
    times = {path: path.stat().st_mtime_ns for path in before}
    for path in [state, *before]:
        path.chmod(0o500 if path.is_dir() else 0o400)
    assert narrows(state)[0] == 0
    assert {path: (path.read_bytes() if path.is_file() else b"") for path in state.rglob("*")} == (
        before
    )
    assert {path: path.stat().st_mtime_ns for path in before} == times


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "begins with nothing"),
        (b"hello, world", "begins with 68 65 6c 6c"),
        (b"{not json", "Expecting property name"),
        (b'{"Probe": "xyz"}', "non-hexadecimal"),
        (b"[" * 9, "begins with 5b"),
        (b'{"a":' * 100000, "cannot be"),
        (capture.MAGIC + b"\2\0\0\0", "another format"),
    ],
)
def test_files_that_are_something_else(
    narrows: Run, tmp_path: Path, content: bytes, told: str
) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    code, output, errors = narrows(path)
    assert (code, output) == (2, "")
    assert errors.startswith("narrows: config: ") and errors.count("\n") == 1
    assert told in errors or told == "cannot be"


def test_paths_that_are_nothing(narrows: Run, tmp_path: Path) -> None:
    code, _, errors = narrows(tmp_path / "missing")
    assert code == 2 and "no such file or directory" in errors
    code, _, errors = narrows(tmp_path)
    assert code == 2 and "holds no journal" in errors
    os.mkfifo(tmp_path / "pipe")
    assert narrows(tmp_path / "pipe")[0] == 2


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "expected a FILE, or one --to for each --listen"),
        (("--listen", "127.0.0.2:1"), "got 1 --listen and 0 --to"),
        (("--listen", "nonsense", "--to", "127.0.0.1:1"), "--listen"),
        (("--listen", "127.0.0.1:1", "--to", "127.0.0.1:1"), "--listen and --to are both"),
        (("--listen", "127.0.0.2:1", "--to", "127.0.0.1:1", "--ports", "0"), "--ports"),
        (("--only", "hallo"), "expected one of hello, report"),
        (("file", "--listen", "127.0.0.2:1"), "a file and a relay at once"),
        (("--listen", "0.0.0.0:1", "--to", "127.0.0.1:1"), "--insecure"),
    ],
)
def test_wrong_usage(narrows: Run, arguments: tuple[str, ...], told: str) -> None:
    code, output, errors = narrows(*arguments)
    assert (code, output) == (2, "")
    assert told in errors and errors.count("\n") == 1


def test_the_data_ports_keep_the_brokers_numbers() -> None:
    routes = routes_of(["127.0.0.2:9000"], ["tcp://127.0.0.1:7070"], 3)
    assert [(str(route.listen), str(route.to)) for route in routes] == [
        ("tcp://127.0.0.2:9000", "tcp://127.0.0.1:7070"),
        ("tcp://127.0.0.2:7071", "tcp://127.0.0.1:7071"),
        ("tcp://127.0.0.2:7072", "tcp://127.0.0.1:7072"),
    ]
    pairs = routes_of(["h:1", "h:2"], ["g:3", "g:9"], 3)
    assert [(route.listen.port, route.to.port) for route in pairs] == [(1, 3), (2, 9)]
    with pytest.raises(ConfigError, match="1 to 2"):
        routes_of(["h:1"], ["g:65534"], 3)


def test_every_message_can_be_asked_for() -> None:
    assert {name.lower() for name in CONTROL} <= set(KINDS)
