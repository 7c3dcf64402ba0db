"""`narrows relay`: one copy of each publication for a site, with keys on both hops."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch
import zmq
from run_cases import broker, same, state, tiny, train, until

from narrows.broker.cli.relay import REDIAL_S, _Upstream
from narrows.learner import Learner
from narrows.proto.config import parse_address
from narrows.proto.keys import (
    AllowList,
    SiteKey,
    create_broker_key,
    new_pair,
    serve_keys,
    write_site_key,
)
from narrows.proto.sockets import Kind, make_socket

pytestmark = pytest.mark.real


@contextmanager
def relaying(broker: str, key: Path, log: Path) -> Iterator[str]:
    """The address of a relay that runs as a process."""
    command = ["relay", "--listen", "tcp://127.0.0.1:0", "--broker", broker, "--key", str(key)]
    with log.open("w") as out:
        process = subprocess.Popen([sys.executable, "-m", "narrows", *command], stderr=out)
    try:
        until(lambda: process.poll() is not None or " on to " in log.read_text(), log.read_text)
        yield log.read_text().split()[-1]
        assert process.poll() is None, log.read_text()
    finally:
        process.kill()
        process.wait()


def test_a_site_hears_each_publication_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, key = tmp_path / "keys", tmp_path / "site.key"
    site = SiteKey("site-a", new_pair(), (create_broker_key(folder).public,))
    AllowList.allow(folder, site.name, site.pair.public)
    write_site_key(key, site)
    models = [tiny(0), tiny(1)]

    def learn(index: int) -> None:
        optimizer = torch.optim.AdamW(models[index].parameters(), lr=1e-3)
        name = f"site-a/{index}"
        with Learner(models[index], optimizer, broker=run.address, name=name, key=key) as learner:
            listeners.append(run.service.host.downlink.sender.fan_out)
            train(learner, models[index], optimizer)

    listeners: list[int] = []
    with (
        broker(tmp_path, broker__keys=str(folder), run__goal_tokens=4000) as run,
        relaying(run.address, key, tmp_path / "relay.log") as address,
    ):
        monkeypatch.setenv("NARROWS_RELAY", address)
        threads = [threading.Thread(target=learn, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert listeners == [1, 1]
    assert same(state(models[0]), state(models[1]))


def test_a_refused_relay_dials_again_with_the_key_that_is_in_the_file_then(tmp_path: Path) -> None:
    server, old, new, file = new_pair(), new_pair(), new_pair(), tmp_path / "site.key"
    write_site_key(file, SiteKey("site-a", new, (server.public,)))
    with zmq.Context() as context:
        authenticator = serve_keys(context, lambda public: public == new.public)
        downlink = make_socket(context, Kind.BROKER_DOWNLINK, pair=server)
        port = downlink.bind_to_random_port("tcp://127.0.0.1")
        address = parse_address(f"tcp://127.0.0.1:{port}")
        with closing(
            _Upstream(context, address, SiteKey("site-a", old, (server.public,)), file)
        ) as upstream:
            upstream.subscribe(b"\1p/00")
            refused = upstream.socket
            assert upstream.monitor.socket.poll(10_000)
            upstream.look(now=0.0)
            upstream.look(now=REDIAL_S - 0.1)
            assert upstream.socket is refused
            upstream.look(now=REDIAL_S)
            assert downlink.poll(10_000) and downlink.recv() == b"\1p/00"
        downlink.close(linger=0)
        authenticator.stop()
