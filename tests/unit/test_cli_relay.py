"""`narrows relay`: one copy of each publication for a site, with keys on both hops."""

import threading
from pathlib import Path

import pytest
import torch
import zmq
from run_cases import admitted, broker, tiny, train

from narrows.bench.kit.processes import Processes, wait_until
from narrows.broker.cli.relay import _Upstream
from narrows.learner import Learner
from narrows.proto.config import parse_address
from narrows.proto.keys import (
    SiteKey,
    new_pair,
    serve_keys,
    write_site_key,
)
from narrows.proto.sockets import Dial, Kind, make_socket
from narrows.proto.timing import REDIAL_S


@pytest.mark.real
def test_a_site_hears_each_publication_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Holds `relay`."""
    key = admitted(tmp_path)
    models = [tiny(0), tiny(1)]
    listeners: list[int] = []

    def learn(index: int) -> None:
        optimizer = torch.optim.AdamW(models[index].parameters(), lr=1e-3)
        name = f"site-a/{index}"
        with Learner(models[index], optimizer, broker=run.address, name=name, key=key) as learner:
            listeners.append(run.service.host.downlink.sender.fan_out)
            train(learner, models[index], optimizer)

    with (
        broker(tmp_path, broker__keys=str(tmp_path / "keys"), run__goal_tokens=4000) as run,
        Processes(tmp_path) as processes,
    ):
        listen = ["--listen", "tcp://127.0.0.1:0", "--broker", run.address, "--key", str(key)]
        relay = processes.command("relay", "relay", *listen)
        wait_until(lambda: " on to " in relay.log, "the relay", relay)
        monkeypatch.setenv("NARROWS_RELAY", relay.log.split()[-1])
        threads = [threading.Thread(target=learn, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert listeners == [1, 1]
        relay.kill()
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


@pytest.mark.real
def test_a_refused_relay_dials_again_with_the_key_that_is_in_the_file_then(tmp_path: Path) -> None:
    server = new_pair()
    new = new_pair()
    file = tmp_path / "site.key"
    key = SiteKey("site-a", new_pair(), (server.public,))
    write_site_key(file, key)
    with zmq.Context() as context:
        authenticator = serve_keys(context, lambda public: public == new.public)
        downlink = make_socket(context, Kind.BROKER_DOWNLINK, pair=server)
        port = downlink.bind_to_random_port("tcp://127.0.0.1")
        address = parse_address(f"tcp://127.0.0.1:{port}")
        upstream = _Upstream(context, address, key, file)
        upstream.subscribe(b"\1p/00")

        def refused(now: float) -> Dial:
            dial = upstream.dial
            while not dial.is_dead(now):
                assert dial.monitor.poll(10_000)
                dial.look(now)
            upstream.look(now)
            return dial

        assert refused(0.0) is not upstream.dial, "at once, and then every five seconds"
        file.unlink()
        write_site_key(file, SiteKey("site-a", new, (server.public,)))
        assert refused(REDIAL_S - 0.1) is upstream.dial
        upstream.look(now=REDIAL_S)
        assert downlink.poll(10_000) and downlink.recv() == b"\1p/00"
        upstream.dial.close()
        downlink.close(linger=0)
        authenticator.stop()
