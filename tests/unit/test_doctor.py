"""`narrows doctor`: each planted failure is named by its check alone, and has a remedy."""

import errno
import json
import os
import shutil
import socket
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import zmq
from cli_cases import Narrows
from msgspec import structs
from run_cases import admitted, broker, stranger, tiny, train
from torch import nn

from narrows.bench.kit.processes import wait_until
from narrows.broker.doctor import machine, told, way
from narrows.broker.doctor.findings import Check, Verdict, examine, failed, ok, unknown
from narrows.learner import Learner, Refused
from narrows.proto.config import parse_address
from narrows.proto.errors import ErrorCode
from narrows.proto.keys import AllowList, SiteKey, new_pair, write_site_key
from narrows.proto.messages import (
    FragmentStatus,
    LearnerStatus,
    RefusalStatus,
    SettingsStatus,
    Status,
)

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
        (b"", "no handshake"),
        (None, "breaks handshakes off"),
    ],
)
def test_another_program_at_the_port(narrows: Narrows, says: bytes | None, told: str) -> None:
    with stranger(says) as address:
        found = findings(narrows, "--broker", address, "--timeout-s", "3")
    assert ills(found) == ["handshake"]
    assert told in found["handshake"]["text"]


def test_keys_on_one_side_only(narrows: Narrows, tmp_path: Path) -> None:
    key = admitted(tmp_path)
    with broker(tmp_path) as run:
        found = findings(narrows, "--broker", run.address, "--key", str(key))
        assert ills(found) == ["handshake"]
        assert "has no keys" in str(found["handshake"]), "as text, or as one of two causes"
    with broker(tmp_path, broker__keys=str(tmp_path / "keys")) as run:
        found = findings(narrows, "--broker", run.address)
        assert ills(found) == ["handshake"]
        assert "--key" in found["handshake"]["remedy"]


def test_the_wrong_key_of_the_broker_and_a_key_that_is_not_admitted(
    narrows: Narrows, tmp_path: Path
) -> None:
    key = admitted(tmp_path, new_pair().public)
    wrong = tmp_path / "wrong.key"
    write_site_key(wrong, SiteKey("site-a", new_pair(), (new_pair().public,)))
    with broker(tmp_path, broker__keys=str(tmp_path / "keys")) as run:
        given = ["--broker", run.address, "--timeout-s", "1.5", "--key"]
        assert ills(findings(narrows, *given, str(key))) == []
        found = findings(narrows, *given, str(wrong))
        assert ills(found) == ["handshake"] and "whose key is not" in found["handshake"]["text"]
        AllowList.revoke(tmp_path / "keys", "site-a")
        found = findings(narrows, *given, str(key))
        while not ills(found):
            found = findings(narrows, *given, str(key))
    assert ills(found) == ["handshake"]
    assert "narrows keys allow" in found["handshake"]["remedy"]


def test_a_run_that_is_well(narrows: Narrows, tmp_path: Path) -> None:
    """Every check is made, and none fails."""
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
            found = findings(narrows, *given, "--state-dir", str(tmp_path / "state"))
            assert {row["verdict"] for row in found.values()} == {"ok"}, found
            assert "refused" not in {note["kind"] for note in run.events("note")}
        finally:
            over.set()
            thread.join()


def test_another_model_is_told(narrows: Narrows, tmp_path: Path) -> None:
    """Holds `refusals`."""
    with broker(tmp_path) as run:
        for width, outcome in ((16, nullcontext()), (8, pytest.raises(Refused))):
            model = nn.Linear(32, width)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            with outcome, Learner(model, optimizer, broker=run.address, name=f"site-{width}"):
                pass
        given = ["--broker", run.address, "--timeout-s", "1", "--name"]
        assert ills(findings(narrows, *given, "site-16")) == []
        found = findings(narrows, *given, "site-8")
    assert ills(found) == ["kept out"]
    assert "site-8" in found["kept out"]["text"]


@pytest.mark.parametrize("name", ["", "site-a", "site-b", "site"])
def test_a_refusal_is_told_to_its_learner_and_to_the_operator(name: str) -> None:
    refused = RefusalStatus("site-a/0", ErrorCode.NAME_IN_USE, "no", 3.0, 9)
    finding = told.refusals(Status(refused=(refused,)), name)
    is_ill = name in ("", "site-a")
    assert finding.verdict is (Verdict.FAILED if is_ill else Verdict.OK)
    assert bool(finding.remedy) is is_ill


def test_a_hint_of_the_broker_is_told_to_its_learner_and_to_the_operator() -> None:
    hint = "site-a has taken no new version for 12 s"
    status = Status(learners={"site-a": LearnerStatus(hint=hint), "site-b": LearnerStatus()})
    verdicts = [told.data(status, name).verdict for name in ("", "site-a", "site-b", "site-c")]
    assert verdicts == [Verdict.FAILED, Verdict.FAILED, Verdict.OK, Verdict.UNKNOWN]
    assert told.data(status, "").text == hint


def test_the_bits_that_a_run_needs() -> None:
    """Holds `needed_bits_per_s`."""
    fragments = (FragmentStatus(elements=600), FragmentStatus(elements=400))
    settings = SettingsStatus(push_codec="f32-blosc2", push_rho=0.5)
    status = Status(period_s=2.0, fragments=fragments, settings=settings)
    assert told.needed_bits_per_s(status) == 1000 * 32 / 2
    assert told.needed_bits_per_s(structs.replace(status, period_s=0.0)) == 0
    newer = structs.replace(settings, push_codec="int2-later")
    assert told.needed_bits_per_s(structs.replace(status, settings=newer)) == 0


@pytest.fixture
def place(tmp_path: Path) -> machine.Machine:
    """A state directory with a run of 3,000 parameters at version 1 or more."""
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with (
        broker(tmp_path) as run,
        Learner(model, optimizer, broker=run.address, name="a") as learner,
    ):
        train(learner, model, optimizer, until=lambda: run.events("merged"))
    return machine.Machine(tmp_path / "state", (time.time(), time.monotonic()))


def verdicts_on(place: machine.Machine) -> dict[str, Verdict]:
    """The verdicts on a machine, by check."""
    return {check: finding.verdict for check, finding in examine(machine.CHECKS, place)}


def test_a_machine_that_is_well_and_one_whose_disk_or_clock_is_not(
    place: machine.Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = dict.fromkeys(("state directory", "room", "disk", "clock"), Verdict.OK)
    monkeypatch.setattr(os, "fdatasync", lambda _: None)  # This machine's disk may be busy.
    assert verdicts_on(place) == sound
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda _: Mock(free=machine.SPARE_BYTES))
        assert verdicts_on(place) == sound | {"room": Verdict.FAILED}
    with monkeypatch.context() as patched:
        pause = threading.Event()
        patched.setattr(os, "fdatasync", lambda _: pause.wait(1.5 * machine.SLOW_S))
        assert verdicts_on(place) == sound | {"disk": Verdict.FAILED}
    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", Mock(side_effect=OSError(errno.ENOSPC, "no room")))
        assert verdicts_on(place) == sound | {"disk": Verdict.FAILED}
    # It was set back after the newest round, and it stands.
    place.began = (time.time(), time.monotonic())
    with monkeypatch.context() as patched:
        now = time.time()
        patched.setattr(time, "time", lambda: now - 3600)
        place.began = (now - 3600, time.monotonic())
        assert verdicts_on(place) == sound | {"clock": Verdict.FAILED}
    place.began = (time.time(), time.monotonic() - 10 * machine.CLOCK_S)
    assert verdicts_on(place) == sound | {"clock": Verdict.FAILED}


def test_an_empty_state_directory_is_no_failure_by_itself(tmp_path: Path) -> None:
    """Holds `state_directory`: a new run begins so. The learners of another run tell the rest."""
    empty = machine.Machine(tmp_path / "none", (time.time(), time.monotonic()))
    verdicts = verdicts_on(empty)
    assert verdicts["state directory"] is verdicts["disk"] is Verdict.UNKNOWN


@pytest.mark.parametrize("wrong", ["0", "-1", "nan", "1e9"])
def test_a_timeout_that_cannot_be_used(narrows: Narrows, wrong: str) -> None:
    assert narrows.run("doctor", "--timeout-s", wrong) == 2
    assert "--timeout-s" in narrows.err


@pytest.mark.parametrize(("made", "verdict"), [(0, Verdict.UNKNOWN), (2, Verdict.FAILED)])
def test_publications_that_do_not_come(
    made: int, verdict: Verdict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Holds `line_down`: the broker tells of versions, and its downlink says nothing."""
    with zmq.Context() as context, context.socket(zmq.XPUB) as silent:
        port = silent.bind_to_random_port("tcp://127.0.0.1")
        begun = Status(downlink_port=port, settings=SettingsStatus(streams=1))
        later = structs.replace(begun, fragments=(FragmentStatus(version=made),))
        before = structs.replace(begun, fragments=(FragmentStatus(version=0),))
        monkeypatch.setattr(way, "_ask", Mock(side_effect=[before, later]))
        visit = way.Visit(parse_address(f"tcp://127.0.0.1:{port}"), None, "a", 0.5, status=begun)
        assert way.line_down(visit).verdict is verdict
