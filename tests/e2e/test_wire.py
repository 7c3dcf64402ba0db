"""`narrows wire` between a real broker and a real learner, on its journal, and in bad company."""

from __future__ import annotations

import asyncio
import io
import json
import signal
import socket
import sys
import threading
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from running import (
    HANG_S,
    LAYOUT,
    ToyHost,
    broker_config,
    live_broker,
    vector,
    wait_until,
)

from narrows.bench.kit.processes import Processes, free_ports
from narrows.broker.cli.dissecting import Printer
from narrows.broker.cli.relay import Relay, Route, Watcher
from narrows.broker.process.service import Service
from narrows.learner.transport.client import Client
from narrows.learner.transport.options import ClientOptions
from narrows.proto.address import Address
from narrows.proto.dissector import capture

RELAY = "127.0.0.2"
"""The data ports have the broker's numbers, so the relay needs an address of its own."""


@pytest.fixture
def processes(tmp_path: Path) -> Generator[Processes]:
    with Processes(tmp_path) as processes:
        yield processes


def learn(address: str, service: Service, versions: int) -> None:
    """One learner trains until so many versions are made, then leaves."""
    host = ToyHost(vector(1))
    learner = Client(
        ClientOptions(
            broker=address, name="a", layout=LAYOUT, frozen_digest=0, host=host,
            join_timeout_s=HANG_S,
        )
    )  # fmt: skip
    learner.start()
    pace = threading.Event()

    def trained() -> bool:
        host.step(0.1)
        pace.wait(0.002)
        learner.boundary(1, float(np.abs(host.x - host.target).mean()))
        return sum(service.syncer.state.versions) >= versions

    wait_until(trained, f"{versions} versions")
    learner.finish(HANG_S)


def test_a_whole_exchange_is_watched(tmp_path: Path, processes: Processes) -> None:
    port = free_ports()
    config = broker_config(
        tmp_path, broker__listen=f"tcp://127.0.0.1:{port}", wan__streams=2,
        codec__push="int4-zstd", codec__publish="int8-zstd",
    )  # fmt: skip
    with live_broker(config) as service:
        processes.start(
            "wire", "wire", "--listen", f"{RELAY}:{port}", "--to", f"127.0.0.1:{port}",
            "--out", str(tmp_path / "capture"),
        )  # fmt: skip
        wait_until(lambda: processes.log("wire").count("relaying") == 3, "three ports")
        learn(f"tcp://{RELAY}:{port}", service, 6)
        wait_until(lambda: "  bye  " in processes.log("wire"), "the learner's Bye")
        processes.kill("wire", signal.SIGINT)
        assert processes.wait("wire", HANG_S) == 0
        log = processes.log("wire")
        check_watched(log)
        processes.start("again", "wire", str(tmp_path / "capture"), "--json")
        assert processes.wait("again", HANG_S) == 0, processes.tail("again")
        check_captured(processes.log("again"), log)
        # The broker has its journal open, and holds the lock of the directory.
        processes.start("journal", "wire", str(tmp_path / "state"), "--json")
        assert processes.wait("journal", HANG_S) == 0, processes.tail("journal")
        check_journal(processes.log("journal"), versions=6)


def check_watched(log: str) -> None:
    assert "Traceback" not in log and "!!" not in log
    assert log.rstrip().endswith("in all, 0 of them faulty")
    for way, kinds in (
        ("up", "greeting ready hello report push adopted header payload topic subscribe bye"),
        ("down", "greeting ready welcome beat header payload topic subscribe"),
    ):
        seen = {line.split()[0] for line in log.splitlines() if f" {way} " in line[10:40]}
        assert set(kinds.split()) <= {line.split()[0] for line in summary_of(log, way)}, seen


def summary_of(log: str, way: str) -> list[str]:
    """The rows of the last table."""
    table = log[log.rindex("\nkind ") :]
    return [line for line in table.splitlines() if line.split()[1:2] == [way]]


def check_captured(output: str, log: str) -> None:
    *frames, summary = map(json.loads, output.splitlines())
    assert {frame["connection"] for frame in frames} == set(range(1, 6))
    assert not any(frame["faults"] for frame in frames)
    told = {
        (row["kind"], row["direction"]): (row["frames"], row["bytes"]) for row in summary["summary"]
    }
    rows = [line.split() for way in ("up", "down") for line in summary_of(log, way)]
    assert told == {(kind, way): (int(n), int(size)) for kind, way, n, size in rows}


def check_journal(output: str, *, versions: int) -> None:
    *records, _ = map(json.loads, output.splitlines())
    assert not any(record["faults"] for record in records)
    committed = [record for record in records if record["kind"] == "committed"]
    assert len(committed) >= versions
    for kind in ("publication", "contribution"):
        chunks = [record for record in records if record["kind"] == kind]
        assert len(chunks) >= versions
        assert all("codes" in {field["field"] for field in chunk["fields"]} for chunk in chunks)


# The relay in bad company. Whatever passes is passed on.


@contextmanager
def echo() -> Generator[int]:
    """A port where everything is sent back, until the peer has said all that it has to say."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                peer, _ = listener.accept()
            except OSError:
                return
            with peer:
                while data := peer.recv(1 << 16):
                    peer.sendall(data)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(HANG_S)


Talk = Callable[[int], Coroutine[Any, Any, None]]


def relayed(watcher: Watcher, target: int, talk: Talk) -> None:
    """Talks to a port that is relayed to `target`."""

    async def run() -> None:
        stop, route = asyncio.Event(), Route(Address(RELAY, 0), Address("127.0.0.1", target))
        relay = Relay([route], watcher)
        serving = asyncio.ensure_future(relay.serve(stop))
        try:
            await asyncio.wait_for(relay.listening.wait(), HANG_S)
            await asyncio.wait_for(talk(relay.ports[0]), HANG_S)
        finally:
            stop.set()
            await serving

    watcher.start()
    try:
        asyncio.run(run())
    finally:
        watcher.stop()


async def echoed(port: int, data: bytes) -> None:
    """Says something, then nothing more, and gets all of it back."""
    reader, writer = await asyncio.open_connection(RELAY, port)
    writer.write(data)
    writer.write_eof()
    assert await reader.read() == data
    writer.close()
    await writer.wait_closed()


def watching(*, out: io.BytesIO | None = None, behind_bytes_max: int = 1 << 30) -> Watcher:
    return Watcher(Printer(as_json=False, only=[]), out, behind_bytes_max)


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL".ljust(55, b"\0")
MESSAGES = GREETING + b"\4\6\5READY" + b"\0\3abc" * 1000


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"GET / HTTP/1.1\r\n\r\n" * 10_000, "cannot be looked into: byte 0: expected ff"),
        (GREETING.replace(b"NULL\0", b"CURVE") + bytes(100_000), "the mechanism is CURVE"),
        (MESSAGES, "bad_frame: expected 4e of the magic NRW, got 61"),
        (GREETING + b"\x02" + b"\xff" * 8 + bytes(100_000), "nothing above"),
    ],
)
def test_what_is_not_ours_passes_untouched(
    data: bytes, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with echo() as target:
        relayed(watching(), target, lambda port: echoed(port, data))
    output, errors = capsys.readouterr()
    assert told in " ".join(output.split())
    assert "cannot be dissected" not in errors


def test_an_error_of_the_dissector_is_told_and_breaks_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: object, __: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(capture.CaptureReader, "take", fail)
    with echo() as target:
        relayed(watching(), target, lambda port: echoed(port, MESSAGES))
    output, errors = capsys.readouterr()
    assert errors.count("cannot be dissected: RuntimeError('a bug')") == 2  # Up and down.
    assert "#1 all   is over: " in output


def test_who_falls_behind_stops_looking(capsys: pytest.CaptureFixture[str]) -> None:
    with echo() as target:
        relayed(watching(behind_bytes_max=0), target, lambda port: echoed(port, MESSAGES))
    assert "printing has fallen behind" in capsys.readouterr().out


def has_dissected(watcher: Watcher, number: int) -> bool:
    """True if a watcher has dissected so many frames."""
    return sum(frames for frames, _ in list(watcher.printer.tally.counts.values())) == number


def test_who_keeps_up_goes_on_looking(capsys: pytest.CaptureFixture[str]) -> None:
    watcher = watching(behind_bytes_max=len(GREETING))
    watcher.start()
    for number, data in enumerate((GREETING, *[b"\0\3abc"] * 100), start=1):
        watcher.passed(1, "up", data)
        wait_until(partial(has_dissected, watcher, number), "the watcher to keep up")
    watcher.stop()
    assert "101 in all" in capsys.readouterr().out


def test_nobody_reads_what_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Closed(io.StringIO):
        def write(self, _: str) -> int:
            raise BrokenPipeError

    async def talk(port: int) -> None:
        reader, writer = await asyncio.open_connection(RELAY, port)
        for data in (MESSAGES, *[b"\0\3abc"] * 10):
            writer.write(data)
            assert await reader.readexactly(len(data)) == data
        writer.close()
        await writer.wait_closed()

    monkeypatch.setattr(sys, "stdout", Closed())
    out = io.BytesIO()
    with echo() as target:
        relayed(watching(out=out), target, talk)
    assert out.getvalue().count(b"abc") == 2020
    assert capsys.readouterr().err.count("\n") == 1  # Where it listens.


def test_a_capture_that_cannot_be_written_ends_alone(capsys: pytest.CaptureFixture[str]) -> None:
    class Full(io.BytesIO):
        def write(self, _: object) -> int:
            raise OSError("the disk is full")

    with echo() as target:
        relayed(watching(out=Full()), target, lambda port: echoed(port, MESSAGES))
    output, errors = capsys.readouterr()
    assert errors.count("narrows: the capture ends here: the disk is full\n") == 1
    assert output.count("  ready  ") == 2


def test_a_broker_that_is_gone_closes_the_connection(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:  # Bound, and nobody listens.
        taken.bind(("127.0.0.1", 0))

        async def dial(port: int) -> None:
            reader, writer = await asyncio.open_connection(RELAY, port)
            try:
                assert await reader.read() == b""
            except ConnectionResetError:
                pass  # The same, said less politely.
            writer.close()

        relayed(watching(), taken.getsockname()[1], dial)
    assert "cannot be reached" in " ".join(capsys.readouterr().out.split())


def test_nobody_at_the_start_is_code_4(tmp_path: Path, processes: Processes) -> None:
    port = free_ports()
    processes.start("wire", "wire", "--listen", f"{RELAY}:{port}", "--to", f"127.0.0.1:{port}")
    assert processes.wait("wire", HANG_S) == 4
    (line,) = processes.log("wire").splitlines()
    assert line.startswith(f"narrows: broker_unreachable: tcp://127.0.0.1:{port}: ")


def test_a_port_that_is_taken_is_code_1(tmp_path: Path, processes: Processes) -> None:
    with echo() as target, socket.create_server((RELAY, 0)) as taken:
        port = taken.getsockname()[1]
        processes.start(
            "wire", "wire", "--listen", f"{RELAY}:{port}", "--to", f"127.0.0.1:{target}"
        )
        assert processes.wait("wire", HANG_S) == 1
    assert f"port_in_use: cannot listen at tcp://{RELAY}:{port}" in processes.log("wire")


def test_a_capture_is_not_written_over(tmp_path: Path, processes: Processes) -> None:
    (tmp_path / "capture").write_text("precious")
    processes.start(
        "wire", "wire", "--listen", f"{RELAY}:1", "--to", "127.0.0.1:2",
        "--out", str(tmp_path / "capture"),
    )  # fmt: skip
    assert processes.wait("wire", HANG_S) == 2
    assert (tmp_path / "capture").read_text() == "precious"
