"""`narrows broker` as a process: it serves and ends in order; and what it writes for people."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import zmq

from narrows.broker.process.service import REPEATS_MAX, LimitRepeats, crash_places
from narrows.proto import messages as msg
from narrows.proto.events import EventFile
from narrows.proto.sockets import Kind, make_socket
from narrows.proto.wire import decode_control, encode_control

pytestmark = pytest.mark.real

SERVE = """
import sys
from pathlib import Path
from narrows.broker.cli.broker import run_broker
folder = Path(sys.argv[1])
flags = {"broker.listen": "tcp://127.0.0.1:0", "broker.state_dir": str(folder / "state")}
run_broker(None, flags, ["fragments.count=2"], events=folder / "events.jsonl",
    ready_file=Path(sys.argv[2]))
"""


def test_a_broker_serves_and_ends_in_order(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    os.mkfifo(tmp_path / "ready.tmp")  # Its reader is told when the address is written.
    process = subprocess.Popen([sys.executable, "-c", SERVE, str(tmp_path), str(ready)])
    with zmq.Context() as context:
        try:
            address = (tmp_path / "ready.tmp").read_text().strip()
            with make_socket(context, Kind.LEARNER_CONTROL) as control:
                control.connect(address)
                control.poll(10_000, zmq.POLLOUT)
                control.send_multipart(encode_control(msg.AskStatus()))
                assert control.poll(10_000), "no answer"
                answer = decode_control(control.recv_multipart(), msg.CONTROL_BYTES_MAX)
            assert isinstance(answer, msg.Status) and answer.status["phase"] == "seeding"
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
        finally:
            process.kill()
            process.wait()
    assert ready.name in os.listdir(tmp_path), "renamed when it was whole"
    records = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert records[-1]["event"] == "final" and records[-1]["status"]["up_bytes"] > 0


def test_the_events_file_is_bounded_and_a_full_disk_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "events.jsonl"
    monkeypatch.setattr("narrows.proto.events.EVENTS_BYTES_MAX", 200)
    events = EventFile(path)
    for number in range(10):
        events.write({"event": "note", "number": number})
    kept = [json.loads(line)["number"] for line in path.read_text().splitlines()]
    assert kept[-1] == 9 and path.stat().st_size <= 200
    assert path.with_name("events.jsonl.1").stat().st_size <= 200
    full = EventFile(Path("/dev/full"))
    full.write({"event": "lost"})
    for each in (events, full):
        each.close()


def test_a_flood_of_one_kind_of_line_is_cut_and_told() -> None:
    limit, passed = LimitRepeats(), []
    for number in range(REPEATS_MAX + 5):
        line = logging.LogRecord("n", logging.WARNING, "", 0, "%s", (f"bad {number}",), None)
        line.kind, line.created = "refused site-a", 1000.0
        passed += [line] if limit.filter(line) else []
    other = logging.LogRecord("n", logging.WARNING, "", 0, "joined", (), None)
    other.created = 1000.0
    assert len(passed) == REPEATS_MAX and limit.filter(other)
    later = logging.LogRecord("n", logging.WARNING, "", 0, "later", (), None)
    later.created = 1061.0
    assert limit.filter(later) and later.getMessage() == "later (5 lines were hidden)"


def test_a_crash_place_ends_the_process_at_its_visit() -> None:
    child = os.fork()
    if child == 0:
        os.environ["NARROWS_CRASH_AT"] = "durable:2"
        reach = crash_places()
        for place in ("durable", "installed", "durable"):
            reach(place)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
