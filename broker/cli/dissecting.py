"""Prints dissected frames, and reads them from files: captures, single frames and journals.

Files are opened read-only. Nothing is locked, so a broker may be using the journal.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import BinaryIO, Final, cast

from narrows.proto.dissector import capture, envelope, journal, text
from narrows.proto.dissector.findings import Dissected, FrameFault, Plain, Wrong
from narrows.proto.dissector.parts import Direction
from narrows.proto.dissector.tables import CONTROL_BYTES_MAX, CONTROL_TAGS, RECORD_TAGS
from narrows.proto.errors import ConfigError

FAULTY: Final = "faulty"
KINDS: Final = (
    *CONTROL_TAGS, "control", "topic", "header", "payload", "part", "subscribe", "cancel",
    "greeting", "ready", "error", "ping", "pong", "command", "segment", "record", *RECORD_TAGS,
    "publication", "contribution", "merged", "blob", "unused", FAULTY,
)  # fmt: skip
"""Values that `--only` accepts."""

ACCEPTED: Final = (
    "a capture (--out), a frame (NRW...), frames in hex as JSON, a segment of a journal, or a "
    "broker's directory"
)


@dataclass(frozen=True)
class Origin:
    """The file or connection that a frame came from."""

    file: str = ""
    connection: int = 0
    """0: from no connection."""
    direction: Direction | None = None
    part: int = 0
    at_s: float = 0.0
    """Seconds since 1970."""

    def text(self) -> str:
        """For the first line of a block."""
        if not self.connection:
            return self.file
        way = f"#{self.connection} {self.direction or 'all':<4}"
        return f"{_clock(self.at_s)}  {way}" + (f"  part {self.part}" if self.part else "")

    def as_json(self) -> dict[str, Plain]:
        """For a line of JSON."""
        if not self.connection:
            return {"file": self.file}
        return {
            "time": self.at_s, "connection": self.connection, "direction": self.direction,
            "part": self.part,
        }  # fmt: skip


def _clock(at_s: float) -> str:
    # What stands in a damaged capture need not be a time.
    with suppress(ValueError, OverflowError, OSError):
        return datetime.fromtimestamp(at_s).strftime("%H:%M:%S.%f")
    return "at no time"


class Printer:
    """Prints frames of the wanted kinds, and counts all frames."""

    def __init__(self, *, as_json: bool, only: list[str]) -> None:
        unknown = [kind for kind in only if kind not in KINDS]
        if unknown:
            raise ConfigError("--only", expected=f"one of {', '.join(KINDS)}", got=unknown[0])
        self._as_json, self._only = as_json, frozenset(only)
        self.tally = text.FrameCounts()

    def show(self, found: Dissected, origin: Origin) -> None:
        """Counts a frame, and prints it if its kind is wanted. Raises BrokenPipeError."""
        self.tally.add(found, origin.direction)
        wanted = found.kind in self._only or (FAULTY in self._only and found.faults)
        if self._only and not wanted:
            return
        if self._as_json:
            print(text.as_json(found, origin.as_json()))
        else:
            print("\n".join(text.block(found, origin.text())))

    def note(self, words: str, origin: Origin) -> None:
        """Prints a line that belongs to no frame; filters do not apply to it."""
        if self._as_json:
            print(text.json_line({**origin.as_json(), "note": words}))
        else:
            print("\n".join(text.wrapped(f"{origin.text()}  {text.escaped(words)}", "")))

    def summary(self) -> None:
        """Prints the counts."""
        print(self.tally.as_json() if self._as_json else "\n" + "\n".join(self.tally.lines()))
        sys.stdout.flush()


def read_path(path: Path, printer: Printer) -> None:
    """Dissects a file or directory and prints it. Raises ConfigError, OSError."""
    if path.is_dir():
        for segment in _segments(path):
            _print_segment(segment, printer)
    elif path.is_file():
        _print_file(path, printer)
    else:
        raise ConfigError(f"{path}: no such file or directory", expected=ACCEPTED)
    printer.summary()


def _segments(path: Path) -> list[Path]:
    found = [*path.glob("journal/journal-*.log"), *path.glob("journal-*.log")]
    if not found:
        raise ConfigError(
            f"{path} holds no journal", expected="journal-*.log there, or in `journal` below it",
            remedy='name the broker\'s state_dir; was the run\'s broker.journal "off"?',
        )  # fmt: skip
    return sorted(found)


def _print_segment(path: Path, printer: Printer) -> None:
    origin = Origin(path.name)
    try:
        file = path.open("rb", buffering=0)
    except FileNotFoundError:
        printer.note("the broker has removed this segment meanwhile", origin)
        return
    with file:
        size_bytes = file.seek(0, 2)

        def read(offset: int, count: int) -> bytes:
            file.seek(offset)
            return _read_all(file, count)

        for found in journal.segment(read, size_bytes):
            printer.show(found, origin)


def _read_all(file: BinaryIO, count: int) -> bytes:
    """Up to `count` bytes; fewer at the end of the file."""
    content = bytearray()
    while len(content) < count and (piece := file.read(count - len(content))):
        content += piece
    return bytes(content)


def _print_file(path: Path, printer: Printer) -> None:
    with path.open("rb") as file:
        start = file.read(len(capture.HEAD))
        if start.startswith(journal.MAGIC):
            _print_segment(path, printer)
        elif start.startswith(capture.MAGIC):
            _print_capture(path, start, file, printer)
        elif start.startswith(envelope.MAGIC):
            # One byte more than may be shows that it is too many.
            frame = start + file.read(CONTROL_BYTES_MAX + 1 - len(start))
            printer.show(envelope.bare(frame), Origin(path.name))
        elif start.lstrip().startswith(b"{"):
            for name, frame in _frames_in_hex(path, start + file.read()):
                printer.show(envelope.bare(frame), Origin(f"{path.name} {name}"))
        else:
            got = f"a file that begins with {start[:8].hex(' ') or 'nothing'}"
            raise ConfigError(f"{path} cannot be dissected", expected=ACCEPTED, got=got)


def _print_capture(path: Path, start: bytes, file: BinaryIO, printer: Printer) -> None:
    if start != capture.HEAD:
        got = start[len(capture.MAGIC) :].hex(" ") or "nothing"
        expected = f"{capture.HEAD[len(capture.MAGIC) :].hex(' ')} behind the magic"
        raise ConfigError(f"{path}: a capture of another format", expected=expected, got=got)
    reader = capture.CaptureReader()
    try:
        for each in capture.records(lambda count: _read_all(file, count)):
            origin = Origin(path.name, each.connection, each.direction, each.part, each.at_s)
            printer.show(reader.take(each), origin)
    except Wrong as wrong:
        fault = FrameFault(wrong.at, "bad_record", wrong.expected, wrong.got)
        printer.show(Dissected("record", 0, faults=[fault]), Origin(path.name))


def _frames_in_hex(path: Path, content: bytes) -> Iterator[tuple[str, bytes]]:
    try:
        found = cast(object, json.loads(content))
        assert isinstance(found, dict)
        frames = cast("dict[str, object]", found)
        yield from [(name, bytes.fromhex(str(value))) for name, value in frames.items()]
    except (ValueError, RecursionError) as error:
        expected = 'JSON such as {"Probe": "4e5257..."}'
        raise ConfigError(f"{path}", expected=expected, got=str(error)) from error
