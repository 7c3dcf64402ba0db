"""Files for `narrows wire`: captures, single frames, frames in hex, segments; read and printed."""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from pathlib import Path

from any_messages import mutated
from fuzz.target import Target
from hypothesis import strategies as st

from narrows.broker.cli.dissecting import Printer, read_path
from narrows.proto.dissector import capture
from narrows.proto.dissector.findings import Wrong
from narrows.proto.errors import ConfigError

GOLDEN = Path(__file__).parents[2] / "golden"
_folder = tempfile.TemporaryDirectory(prefix="narrows-fuzz-")
FILE = Path(_folder.name) / "input"


def run(data: bytes) -> None:
    FILE.write_bytes(data)
    for as_json in (False, True):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            try:
                read_path(FILE, Printer(as_json=as_json, only=[]))
            except ConfigError:
                continue
        assert all(line.isprintable() for line in out.getvalue().split("\n"))
    if data.startswith(capture.HEAD):
        written_again(data)


def written_again(data: bytes) -> None:
    """A capture is written again as it was read, up to the first fault."""
    source = io.BytesIO(data[len(capture.HEAD) :])
    again = b""
    try:
        for each in capture.records(source.read):
            again += capture.packed(each)
    except Wrong as wrong:
        assert wrong.at <= len(data)
    assert data[len(capture.HEAD) :].startswith(again)


def seeds() -> list[bytes]:
    stored: dict[str, str] = json.loads((GOLDEN / "messages.json").read_text(encoding="utf-8"))
    frames = [bytes.fromhex(text) for text in stored.values()]
    found = [capture.HEAD + b"".join(packed(frame) for frame in frames)]
    found += [capture.HEAD + packed(frame) for frame in frames]
    found += [frames[0], frames[-1], json.dumps({"Probe": stored["Probe"]}).encode()]
    segment = GOLDEN / "state-format-1/journal/journal-00000001.log"
    data = [packed(b"u", 0, more=True), packed(frames[-1], 1, more=True), packed(b"Narrows", 2)]
    return [*found, segment.read_bytes().rstrip(b"\0"), capture.HEAD + b"".join(data)]


def packed(frame: bytes, part: int = 0, *, more: bool = False) -> bytes:
    return capture.packed(capture.Captured("part", "up", 1, 1.5e9, frame, part, more))


EXAMPLES = mutated(st.sampled_from(seeds()))

TARGET = Target("captures", run, seeds, EXAMPLES)
