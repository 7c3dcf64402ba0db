"""The broker as a process: what it writes for people, its workers, its place to crash at."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
from pathlib import Path

import pytest

from narrows.broker.process.service import REPEATS_MAX, LimitRepeats, crash_places
from narrows.proto.events import EventFile
from narrows.proto.workers import Workers


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


def test_a_wake_while_the_pool_closes_writes_to_no_closed_pipe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool, write, threads = Workers(1, "test"), os.write, list[threading.Thread]()

    def write_while_another_thread_closes(fd: int, data: bytes) -> int:
        threads.append(threading.Thread(target=pool.close))
        threads[0].start()
        threads[0].join(0.2)  # It would be over by now if nothing held it back.
        return write(fd, data)

    monkeypatch.setattr(os, "write", write_while_another_thread_closes)
    pool.wake()
    threads[0].join()
    pool.wake()
    assert len(threads) == 1, "a closed pool writes nothing"
