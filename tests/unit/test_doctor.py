"""`narrows doctor`: each planted failure is named by its check alone, and has a remedy."""

import json
import socket
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from cli_cases import Narrows
from run_cases import admitted, broker, stranger, tiny, train

from narrows.bench.kit.processes import wait_until
from narrows.broker.doctor.findings import Check, examine, failed, ok, unknown
from narrows.learner import Learner
from narrows.proto.keys import AllowList, SiteKey, new_pair, write_site_key

HTTP = b"HTTP/1.0 400 Bad Request\r\n\r\n"


def findings(narrows: Narrows, *arguments: str) -> dict[str, dict[str, str]]:
    """Runs `narrows doctor ARGUMENTS`; the findings by check. Its exit code must say whether all is
    well, and each failure must have a remedy."""
    code = narrows.run("doctor", *arguments, "--json")
    found = {row.pop("check"): row for row in json.loads(narrows.out)}
    ills = [each for each in found.values() if each["verdict"] == "failed"]
    assert code == bool(ills), found
    assert all(each["remedy"] for each in ills), found
    return found


def ills(found: dict[str, dict[str, str]]) -> list[str]:
    """The checks that have failed."""
    return [check for check, row in found.items() if row["verdict"] == "failed"]


def test_a_check_without_its_basis_is_not_made() -> None:
    """Holds `examine`."""
    checks = (
        Check[None]("a", lambda _: ok("well")),
        Check[None]("b", lambda _: failed("ill", "do"), "a"),
        Check[None]("c", lambda _: ok("well"), "b"),
        Check[None]("d", lambda _: unknown("nothing to see"), "a"),
        Check[None]("e", lambda _: ok("well"), "d"),
        Check[None]("f", lambda _: ok("well"), "a"),
    )
    rows = {check: finding.verdict.value for check, finding in examine(checks, None)}
    assert rows == {
        "a": "ok",
        "b": "failed",
        "c": "unknown",
        "d": "unknown",
        "e": "unknown",
        "f": "ok",
    }


def test_a_host_name_that_does_not_resolve(
    narrows: Narrows, monkeypatch: pytest.MonkeyPatch
) -> None:
    nobody = socket.gaierror(socket.EAI_NONAME, "unknown")
    monkeypatch.setattr(socket, "getaddrinfo", Mock(side_effect=nobody))
    found = findings(narrows, "--broker", "tcp://no.invalid:7070")
    assert ills(found) == ["host name"]
    assert "no.invalid" in found["host name"]["text"]


def test_a_port_at_which_nobody_listens(narrows: Narrows) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{held.getsockname()[1]}"
        found = findings(narrows, "--broker", address)
    assert ills(found) == ["control port"]
    assert address in found["control port"]["text"]


@pytest.mark.parametrize(
    ("says", "told"),
    [
        (HTTP, "another program"),
        (b"SSH-2.0-x\r\n", "another program"),
        (b"", "says nothing"),
        (None, "says nothing"),
    ],
)
def test_another_program_at_the_port(narrows: Narrows, says: bytes | None, told: str) -> None:
    with stranger(says) as address:
        found = findings(narrows, "--broker", address)
    assert ills(found) == ["broker there"]
    assert told in found["broker there"]["text"]


def test_keys_on_one_side_only(narrows: Narrows, tmp_path: Path) -> None:
    key = admitted(tmp_path)
    with broker(tmp_path) as run:
        found = findings(narrows, "--broker", run.address, "--key", str(key))
        assert ills(found) == ["keys"]
        assert "the broker has none" in found["keys"]["text"]
    with broker(tmp_path, broker__keys=str(tmp_path / "keys")) as run:
        found = findings(narrows, "--broker", run.address)
        assert ills(found) == ["keys"]
        assert "--key" in found["keys"]["remedy"]


def test_the_wrong_key_of_the_broker_and_a_key_that_is_not_admitted(
    narrows: Narrows, tmp_path: Path
) -> None:
    key = admitted(tmp_path, new_pair().public)
    wrong = tmp_path / "wrong.key"
    write_site_key(wrong, SiteKey("site-a", new_pair(), (new_pair().public,)))
    with broker(tmp_path, broker__keys=str(tmp_path / "keys")) as run:
        assert ills(findings(narrows, "--broker", run.address, "--key", str(key))) == []
        found = findings(narrows, "--broker", run.address, "--key", str(wrong))
        assert ills(found) == ["broker's key"]
        AllowList.revoke(tmp_path / "keys", "site-a")
        found = findings(narrows, "--broker", run.address, "--key", str(key))
        while not ills(found):
            found = findings(narrows, "--broker", run.address, "--key", str(key))
    assert ills(found) == ["key admitted"]
    assert "narrows keys allow" in found["key admitted"]["remedy"]


def test_a_run_that_is_well(narrows: Narrows, tmp_path: Path) -> None:
    """Every check is made and none fails, at the site and at the broker."""
    key = admitted(tmp_path)
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    over = threading.Event()
    with broker(tmp_path, broker__keys=str(tmp_path / "keys")) as run:

        def learn() -> None:
            with Learner(model, optimizer, broker=run.address, key=key) as learner:
                train(learner, model, optimizer, until=over.is_set)

        thread = threading.Thread(target=learn)
        thread.start()
        try:
            wait_until(lambda: run.events("merged"), "a merge")
            given = ["--broker", run.address, "--key", str(key), "--timeout-s", "2"]
            for more in ((), ("--state-dir", str(tmp_path / "state"))):
                found = findings(narrows, *given, *more)
                assert {row["verdict"] for row in found.values()} == {"ok"}, found
            assert "refused" not in {note["kind"] for note in run.events("note")}
        finally:
            over.set()
            thread.join()
