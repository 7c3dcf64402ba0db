"""`narrows status`: whom it asks, how long it waits, and what it shows."""

import json
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import zmq
from cli_cases import Narrows
from run_cases import Broker, Loop, admitted, broker, stranger

from narrows.bench.kit.processes import WAIT_S
from narrows.broker.asking import Asker
from narrows.broker.cli import status
from narrows.proto.errors import BrokerUnreachable
from narrows.proto.keys import AllowList, SiteKey, new_pair, read_site_key, write_site_key
from narrows.proto.messages import (
    DiskStatus,
    FragmentStatus,
    LearnerStatus,
    LineStatus,
    Status,
)
from narrows.proto.wire import encode_control


def test_status_with_the_next_key_of_the_broker(narrows: Narrows, tmp_path: Path) -> None:
    """The site trusts an old key first, and then the one that the broker has."""
    key = admitted(tmp_path, new_pair().public)
    with broker(tmp_path, broker__keys=str(tmp_path / "keys")) as run:
        ask = ["status", run.address, "--key", str(key)]
        assert narrows.run(*ask) == 0
        assert "waits for a learner to join" in narrows.out
        AllowList.revoke(tmp_path / "keys", "site-a")
        code = 0
        while code == 0:
            code = narrows.run(*ask)
    public = read_site_key(key).pair.public
    assert code == 3 and f"narrows keys allow 'narrows-key site-a {public}'" in narrows.err


def test_status_waits_for_a_broker_that_stops_and_starts_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as stops, zmq.Context() as context:
        port = stops.getsockname()[1]
        heard = threading.Event()

        def answer() -> None:
            stops.accept()[0].close()
            stops.close()
            with context.socket(zmq.ROUTER) as router:
                router.bind(f"tcp://127.0.0.1:{port}")
                peer, *_ = router.recv_multipart()
                router.send_multipart([peer, *encode_control(Status(phase="running"))])
                # libzmq drops an answer that is not read yet when the connection ends.
                heard.wait(WAIT_S)

        broker = threading.Thread(target=answer, daemon=True)
        broker.start()
        said = status.ask_status(f"tcp://127.0.0.1:{port}", None, timeout_s=30)
        heard.set()
        broker.join()
    assert said.phase == "running"


OTHER_PROGRAM = "another program listens there"
SILENCE = "takes connections and says nothing"
HTTP = b"HTTP/1.0 400 Bad Request\r\n\r\n"


@pytest.mark.parametrize(
    ("says", "key", "timeout_s", "told"),
    [
        (HTTP, "", 600, OTHER_PROGRAM),
        (HTTP, "--key a.key", 600, OTHER_PROGRAM),
        (b"SSH-2.0-x\r\n", "", 600, OTHER_PROGRAM),
        (b"SSH-2.0-x\r\n", "--key a.key", 600, OTHER_PROGRAM),
        (b"", "", 3, SILENCE),
        (b"", "--key a.key", 3, SILENCE),
        # It does not wait for its time to be over: a broker with keys will not admit it later.
        (None, "", 600, "admits only those who have a key.*--key FILE, in Python key="),
        (None, "--key a.key", 600, "as one does whose key is not"),
    ],
)
def test_status_tells_what_listens_there_from_a_broker(
    narrows: Narrows, says: bytes | None, key: str, timeout_s: int, told: str
) -> None:
    """Holds `ask_status`."""
    write_site_key(Path("a.key"), SiteKey("a", new_pair(), (new_pair().public,)))
    with stranger(says) as address:
        line = f"status {address} --timeout-s {timeout_s} {key}"
        assert narrows.run(*line.split()) == 4
    assert re.search(told, narrows.err) and address in narrows.err


def test_an_unknown_host_is_named_at_once(
    narrows: Narrows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Holds `parse_address`."""
    unknown = socket.gaierror(socket.EAI_NONAME, "unknown")
    monkeypatch.setattr(socket, "getaddrinfo", Mock(side_effect=unknown))
    for line in ("status --timeout-s 600", "relay --listen tcp://127.0.0.1:0"):
        assert narrows.run(*line.split(), "--broker", "tcp://no.invalid:7070") == 4
        assert "the host name no.invalid does not resolve" in narrows.err


def test_the_words_of_a_learner_are_no_markup(
    narrows: Narrows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Holds `status`."""
    said = Status(
        phase="running", run_tokens=4, goal_tokens=8, merges=1, contributions=2,
        fragments=(FragmentStatus(version=1), FragmentStatus(version=2)),
        line=LineStatus(up_bytes=5_000_000, down_bytes=10), waiting_for=("a to push",),
        learners={"a": LearnerStatus(state="paused", reason="[/red]")},
    )  # fmt: skip
    monkeypatch.setattr(status, "ask_status", lambda *_, **__: said)
    assert narrows.run("status") == 0
    first, figures, waits, columns, lane, *legend = narrows.out.splitlines()
    assert first.startswith("✓ Nobody trains at the moment")
    assert "4 of 8 tokens learned" in figures and "versions 1 to 2;" in figures
    assert "5MB received, 10B sent" in figures and waits == "waits for a to push"
    assert {"merged", "pushed", "up", "behind"} <= set(columns.split())
    assert "paused: [/red], 0 s" in lane and "\x1b" not in narrows.out
    assert all(f"{word}:" in "".join(legend) for word in ("merged", "pushed", "down", "behind"))


def test_a_status_begins_with_what_is_wrong_and_what_to_do(
    narrows: Narrows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Holds `status`."""
    said = Status(
        phase="running",
        disk=DiskStatus(error="[red]full\x1b[2J", error_s=40.0),
        learners={"a": LearnerStatus(state="lost", since_s=300.0)},
    )
    monkeypatch.setattr(status, "ask_status", lambda *_, **__: said)
    assert narrows.run("status") == 0
    first, second, *_ = narrows.out.splitlines()
    assert first == "✗ The broker's disk has taken nothing for 40 s: [red]full\\x1b[2J"
    assert second.startswith("  → Make room")
    assert re.search(r"^a +lost, 5 min ", narrows.out, re.MULTILINE)
    assert narrows.run("status", "--json") == 0
    facts = json.loads(narrows.out)
    assert facts["verdict"]["level"] == "bad" and facts["learners"]["a"]["state"] == "lost"


@pytest.mark.parametrize("flags", ["--json", ""])
def test_watch_follows_a_run_through_an_outage_to_its_end(
    narrows: Narrows, monkeypatch: pytest.MonkeyPatch, flags: str
) -> None:
    """Holds `watch`."""
    gone = BrokerUnreachable("tcp://127.0.0.1:7070 did not answer")
    ended = Status(phase="ended", run_tokens=8)
    ask = Mock(side_effect=[Status(phase="running"), gone, ended])
    monkeypatch.setattr(Asker, "ask", ask)
    pauses: list[float] = []
    monkeypatch.setattr(status, "time", Mock(wraps=time, sleep=pauses.append))
    assert narrows.run("watch", *flags.split(), "--every", "2s") == 0
    assert {call.args for call in ask.call_args_list} == {(status.TIMEOUT_S,)}
    assert len(pauses) == 2 and 1.0 < min(pauses) <= max(pauses) <= 2.0
    lines = narrows.out.splitlines()
    if flags:
        first, second, last = map(json.loads, lines)
        assert first["phase"] == "running" and first["verdict"]["level"] == "ok"
        assert "did not answer" in second["error"] and "phase" not in second
        assert last["run_tokens"] == 8 and first["at_unix"] <= second["at_unix"]
    else:
        assert "✓ Nobody trains" in lines[0] and "✗ broker_unreachable" in lines[1]
        assert "✓ The run has ended: 8 tokens" in lines[2]
    assert narrows.run("watch", "--every", "soon") == 2 and "--every" in narrows.err


def test_watch_hears_of_an_end_between_two_of_its_questions(
    narrows: Narrows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Holds `Asker.ask` and `Host`: the broker is gone when the second question is due."""
    run = Broker(tmp_path, {"run.goal_tokens": "100"})

    def meanwhile(_: float) -> None:
        Loop(run.address, "site-a").train()
        run.join()

    monkeypatch.setattr(status, "time", Mock(wraps=time, sleep=meanwhile))
    assert narrows.run("watch", run.address, "--every", "1h") == 0
    first, last = narrows.out.splitlines()
    assert "Nobody is here yet" in first and "✓ The run has ended" in last


def test_a_status_loads_nothing_heavy() -> None:
    """So that it can be asked each second."""
    heavy = {"numpy", "numba", "torch", "blosc2", "rich.console", "zmq.auth.thread"}
    look = "import sys, narrows.broker.cli.status; print(*sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", look], capture_output=True, text=True, check=True, timeout=WAIT_S
    )
    assert not heavy & set(found.stdout.split())
