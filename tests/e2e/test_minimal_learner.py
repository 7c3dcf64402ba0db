"""The learner that was written from PROTOCOL.md alone takes part in a run of ours, bit for bit."""

from __future__ import annotations

import ast
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from peer import Peer
from running import HANG_S, LAYOUT, ToyHost, broker_config, live_broker, train, vector, wait_until

from narrows.bench.kit.processes import free_ports
from narrows.broker.cli.journal_report import show_layout
from narrows.broker.cli.status import ask_status
from narrows.proto import messages as msg
from narrows.proto.codec.transfer import digest_of
from narrows.proto.fragments import build_table
from narrows.proto.layout import fingerprint

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "minimal_learner.py"
LINES_MAX = 400
UNSUPPORTED = 2
MODEL = json.dumps(
    {
        "fingerprint": fingerprint(LAYOUT, 0),
        "frozen_digest": 0,
        "layout": [[e.name, e.shape, e.dtype, e.rule] for e in LAYOUT],
    }
)
THIRD_PARTY = {"msgpack", "numpy", "xxhash", "zmq", "zstandard"}


@contextmanager
def minimal_learner(
    folder: Path, address: str, *options: str, model: str = MODEL
) -> Generator[subprocess.Popen[str]]:
    """The script as a process; isolated, so that it finds nothing of the repository."""
    layout = folder / "layout.json"
    layout.write_text(model)
    command = [sys.executable, "-I", str(SCRIPT), "--broker", address, "--name", "minimal"]
    command += ["--layout", str(layout), *options]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=folder, stdout=pipe, stderr=pipe, text=True)
    with process:
        try:
            yield process
        finally:
            process.kill()


def test_it_is_one_short_file_that_imports_nothing_of_narrows() -> None:
    source = SCRIPT.read_text()
    assert len(source.splitlines()) <= LINES_MAX
    imported = set[str]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imported |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None and node.level == 0
            imported.add(node.module)
    others = {name.split(".")[0] for name in imported} - sys.stdlib_module_names
    assert others == THIRD_PARTY


@pytest.mark.slow
def test_it_shares_every_version_with_our_learners_and_is_merged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events, hosts = tmp_path / "events.jsonl", {"a": ToyHost(vector(1)), "b": ToyHost(vector(2))}
    config = broker_config(
        tmp_path,
        run__goal_tokens=600,
        run__learners_at_start=3,
        merge__quorum=3,
        fragments__sync_period_steps=6,
    )
    with live_broker(config, events=events) as service, ThreadPoolExecutor(1) as pool:
        ours = pool.submit(train, service, hosts, rate=0.05, step_s=0.01)
        wait_until(lambda: "version 0 is durable" in events.read_text(), "version 0")
        show_layout(Path(config.broker.state_dir))
        told = capsys.readouterr().out
        with minimal_learner(tmp_path, service.wires.address, model=told) as process:
            output, log = process.communicate(timeout=HANG_S)
        assert process.returncode == 0, log
        ours.result(HANG_S)
    ends = [json.loads(line) for line in output.splitlines()]
    records = [json.loads(line) for line in events.read_text().splitlines()]
    merges = [record for record in records if record["event"] == "merged"]
    table = build_table(LAYOUT, len(ends))
    for fragment, end in zip(table, ends, strict=True):
        made = [record for record in merges if record["fragment"] == end["fragment"]]
        assert (end["version"], end["digest"]) == (made[-1]["version"], made[-1]["digest"])
        for host in hosts.values():
            theirs = np.empty(fragment.elements, np.float32)
            host.snapshot(fragment, theirs)
            assert f"{digest_of(theirs):016x}" == end["digest"]
        contributed = sum("minimal" in record["contributors"] for record in made)
        assert end["merged"] == contributed > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "value", "code"),
    [
        ("run__mode", "streaming", UNSUPPORTED),
        ("run__learners_at_start", "found", UNSUPPORTED),
        ("codec__publish", "raw32", 3),
        ("codec__push", "bf16", 3),
    ],
)
def test_it_refuses_by_name_what_it_does_not_support(
    key: str, value: str, code: int, tmp_path: Path
) -> None:
    alone = value == "found"
    config = broker_config(tmp_path, **{key: 2 if alone else value})
    with live_broker(config) as service, Peer(service.wires.address, "founder") as founder:
        if not alone:
            founder.send(founder.hello())
            founder.receive(msg.Welcome)
        with minimal_learner(tmp_path, service.wires.address) as process:
            _, log = process.communicate(timeout=HANG_S)
        if code == UNSUPPORTED:
            wait_until(lambda: "left" in states(service.wires.address), "its Bye")
    assert process.returncode == code
    assert value in log


def test_ctrl_c_ends_it_with_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(HANG_S)
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        with minimal_learner(tmp_path, address) as process, server.accept()[0]:
            process.send_signal(signal.SIGINT)
            _, log = process.communicate(timeout=HANG_S)
    assert process.returncode == 130
    assert log == "minimal_learner: stopped by Ctrl-C\n"


def test_a_layout_that_is_not_there_is_named(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--broker", "tcp://a:1", "--name", "a"]
    command += ["--layout", str(tmp_path / "nowhere.json")]
    found = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
    assert found.returncode == 2
    assert "nowhere.json" in found.stderr and "Traceback" not in found.stderr


def states(address: str) -> list[str]:
    """The states of the learners as the broker tells them."""
    return [learner.state for learner in ask_status(address, timeout_s=HANG_S).learners]


@pytest.mark.slow
def test_it_names_a_broker_that_it_cannot_reach(tmp_path: Path) -> None:
    address = f"tcp://127.0.0.1:{free_ports()}"
    with minimal_learner(tmp_path, address, "--join-timeout-s", "0.5") as process:
        _, log = process.communicate(timeout=HANG_S)
    assert process.returncode == 4
    assert "broker_unreachable" in log and address in log
