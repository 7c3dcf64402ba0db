"""A live broker with one honest learner, and peers that send messages no honest learner sends."""

from __future__ import annotations

from collections.abc import Generator

import pytest
from peer import Peer, World
from running import Run, broker_config, live_broker

from narrows.__main__ import main
from narrows.proto import messages as msg


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Generator[World]:
    config = broker_config(
        tmp_path_factory.mktemp("bad-input"),
        wan__streams=1,
        liveness__late="5min",
        liveness__lost="10min",
    )
    with live_broker(config) as service, Peer(service.wires.address, "good") as good:
        good.join()
        good.found()
        yield World(service, good)


@pytest.fixture
def world(live: World) -> Generator[World]:
    yield live
    live.check_unharmed()


@pytest.fixture
def mallory(world: World) -> Generator[Peer]:
    """A peer without session."""
    with world.peer() as peer:
        yield peer


@pytest.fixture
def member(world: World) -> Generator[Peer]:
    """A peer that has joined and adopted version 0, and leaves in order."""
    with world.peer() as peer:
        peer.join()
        for fragment in range(2):
            peer.send(msg.Adopted(fragment, 0))
        yield peer
        peer.send(msg.Bye("enough"))
        peer.send(msg.Report(0, 0, 0.0, None, (), msg.TokenLedger(), 0.0))
        # Refused: the Bye before it has ended the session.
        while peer.receive(msg.Refuse).code != "unknown_session":
            pass


@pytest.fixture
def narrows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command line in this process; gives its exit code, output and error output."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["narrows", *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
        output, errors = capsys.readouterr()
        code = caught.value.code
        assert isinstance(code, int)
        assert "Traceback" not in output + errors
        return code, output, errors

    return run
