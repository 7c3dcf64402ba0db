"""Keys change while a learner trains at a real broker: rotated, revoked, allowed again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from running import HANG_S, LAYOUT, Run, ToyHost, broker_config, live_broker, vector, wait_until

from narrows.bench.kit.processes import free_ports
from narrows.broker.process.service import Service
from narrows.learner.transport.client import Client
from narrows.learner.transport.options import ClientOptions
from narrows.proto.keys import SiteKey, read_broker_key, read_site_key


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, narrows: Run) -> Generator[Service]:
    monkeypatch.chdir(tmp_path)
    assert narrows("keys", "new")[0] == 0
    with live_broker(
        broker_config(tmp_path, security__keys="keys", run__founder="site-a", wan__streams=1)
    ) as service:
        yield service


def admit(narrows: Run, service: Service, name: str) -> SiteKey:
    """A key by invitation, in NAME.key."""
    _, invitation, _ = narrows("keys", "invite", name, "--address", service.wires.address)
    Path(f"{name}.invite").write_text(invitation)
    assert narrows("keys", "accept", f"{name}.invite", "--to", f"{name}.key")[0] == 0
    return read_site_key(Path(f"{name}.key"))


@contextmanager
def training(key: SiteKey) -> Generator[Client]:
    """A learner that trains until the end of the block; nothing but its end may raise."""
    host, over = ToyHost(vector(1)), threading.Event()
    client = Client(
        ClientOptions(
            broker=key.broker, name=key.name, layout=LAYOUT, frozen_digest=0, host=host,
            join_timeout_s=HANG_S, key=key, key_file=Path(f"{key.name}.key").absolute(),
        )
    )  # fmt: skip
    errors: list[BaseException] = []

    def loop() -> None:
        try:
            while not over.wait(0.01):
                host.step(0.1)
                client.boundary(1, 1.0)
        except BaseException as error:
            errors.append(error)

    client.start()
    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield client
    finally:
        over.set()
        thread.join()
        client.abort()
    assert not errors


def test_a_revoked_learner_trains_on_and_comes_back_when_it_is_allowed(
    service: Service, narrows: Run, caplog: pytest.LogCaptureFixture
) -> None:
    key = admit(narrows, service, "site-a")
    with training(key) as client:
        wait_until(lambda: service.syncer.state.tally.merges, "a merge")
        assert narrows("keys", "revoke", "site-a")[0] == 0
        line = f"narrows keys allow site-a '{key.pair.public}'"
        wait_until(lambda: line in caplog.text, "the line")
        wait_until(lambda: client.health == "joining", "the learner to notice")
        merges = service.syncer.state.tally.merges
        assert narrows("keys", "allow", "site-a", key.pair.public)[0] == 0
        wait_until(lambda: service.syncer.state.tally.merges > merges + 2, "merges again")
        assert client.health == "joined"


def test_a_key_is_rotated_while_its_learner_trains(
    service: Service, narrows: Run, caplog: pytest.LogCaptureFixture
) -> None:
    old = admit(narrows, service, "site-a")
    with training(old) as client:
        wait_until(lambda: service.syncer.state.tally.merges, "a merge")
        assert narrows("keys", "rotate", "site-a.key")[0] == 0
        new = read_site_key(Path("site-a.key"))
        assert new.pair != old.pair
        # The old key's day is over: the operator admits the new one alone.
        narrows("keys", "revoke", "site-a")
        narrows("keys", "allow", "site-a", new.pair.public)
        gate = service.wires.gate
        assert gate is not None
        wait_until(lambda: gate.holder(old.pair.public) is None, "the end of the old key")
        merges = service.syncer.state.tally.merges
        wait_until(
            lambda: service.syncer.state.tally.merges > merges + 5, "merges with the new key"
        )
        assert client.health == "joined"
        # Between the two commands the new key may have been refused; the old one is never named.
        said = [r.getMessage() for r in caplog.records if r.name == "narrows.learner"]
        assert not any(old.pair.public in line for line in said)


@pytest.mark.parametrize("trusted", ["before", "after"])
def test_the_broker_changes_to_its_successor_while_a_learner_trains(
    trusted: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    narrows: Run,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert narrows("keys", "new")[0] == 0
    config = broker_config(
        tmp_path, security__keys="keys", run__founder="site-a", wan__streams=1,
        broker__listen=f"tcp://127.0.0.1:{free_ports()}",
    )  # fmt: skip

    def merges_of(service: Service) -> Callable[[], bool]:
        begun = service.syncer.state.version_sum
        return lambda: service.syncer.state.version_sum > begun + 2

    with ExitStack() as learners:
        with live_broker(config) as service:
            admit(narrows, service, "site-a")
            assert narrows("keys", "rotate")[0] == 0
            successor = read_broker_key(Path("keys")).next
            assert successor is not None
            if trusted == "before":
                assert narrows("keys", "trust", "site-a.key", successor.public)[0] == 0
            client = learners.enter_context(training(read_site_key(Path("site-a.key"))))
            wait_until(merges_of(service), "merges")
        assert narrows("keys", "rotate", "--now")[0] == 0
        assert read_broker_key(Path("keys")).current == successor
        with live_broker(config) as service:
            if trusted == "after":
                wait_until(lambda: "narrows keys trust" in caplog.text, "the line")
                assert narrows("keys", "trust", "site-a.key", successor.public)[0] == 0
            wait_until(merges_of(service), "merges with the successor")
            assert client.health == "joined"
