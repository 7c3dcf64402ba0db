"""`narrows status`: whom it asks, how long it waits, and what it shows."""

import re
import socket
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest
import zmq
from cli_cases import Narrows
from run_cases import admitted, broker, stranger

from narrows.bench.kit.processes import WAIT_S
from narrows.broker.cli import status
from narrows.proto.keys import AllowList, SiteKey, new_pair, read_site_key, write_site_key
from narrows.proto.messages import FragmentStatus, LearnerStatus, LineStatus, Status
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
    assert "paused: [/red]" in narrows.out and "received 5MB and sent 10B" in narrows.out
    assert "4 of 8 tokens are learned" in narrows.out and "fragments: 1 to 2;" in narrows.out
    columns = narrows.out.splitlines()[3].split()
    assert {"heard", "logged", "merged", "behind"} <= set(columns)
    legend = "".join(narrows.out.splitlines()[-2:])
    assert all(f"{word}:" in legend for word in ("heard", "logged", "merged", "behind"))
