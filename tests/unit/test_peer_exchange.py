"""Scripts and environments of other systems, as far as they can be tested without these systems."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest
import torch

from narrows.bench.peers import envs as peer_envs
from narrows.bench.peers import exchange as peer_exchange
from narrows.bench.peers.envs import PeerAbsent, environment, install_commands
from narrows.proto.errors import ConfigError

PINNED = sorted(path.stem for path in peer_envs.REQUIREMENTS.glob("*.txt"))


def task(*more: str) -> peer_exchange.Task:
    arguments = ["--world", "2", "--address", "127.0.0.1:7000", *more]
    return peer_exchange.task_of(("f32", "bf16"), arguments)


def test_a_member_is_told_its_task() -> None:
    told = task("--rank", "1", "--params", "8", "--variant", "bf16")
    assert (told.rank, told.world, told.params, told.variant) == (1, 2, 8, "bf16")
    assert told.meeting == ("127.0.0.1", 7000) and told.host == "127.0.0.1"
    assert task("--params", "8", "--host", "10.0.0.2").host == "10.0.0.2"
    assert task("--coordinator").host == "127.0.0.1"


@pytest.mark.parametrize(
    "wrong",
    [
        ["--params", "8", "--rank", "2"],
        ["--params", "8", "--variant", "int1"],
        ["--params", "8", "--address", "nowhere"],
        [],
    ],
)
def test_a_wrong_task_is_refused(wrong: list[str]) -> None:
    with pytest.raises(SystemExit):
        task(*wrong)


def test_only_the_right_average_passes() -> None:
    base = torch.arange(1.0, 9.0)
    peer_exchange.check(base * 3, base, 3.0, 1e-6)
    for wrong in (base * 3.01, base * 3 * torch.nan):
        with pytest.raises(ArithmeticError, match="the average is off"):
            peer_exchange.check(wrong, base, 3.0, 1e-3)


def test_the_loopback_interface_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    peer_exchange.use_interface_of("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] in {name for _, name in socket.if_nameindex()}
    with pytest.raises(ValueError, match=r"203\.0\.113\.1"):
        peer_exchange.use_interface_of("203.0.113.1")


def test_a_measurement_of_two_members(capsys: pytest.CaptureFixture[str]) -> None:
    values: dict[int, torch.Tensor] = {}
    both = threading.Barrier(2)

    def member(rank: int) -> None:
        def average(mine: torch.Tensor) -> torch.Tensor:
            values[rank] = mine.clone()
            both.wait()
            mean = (values[0] + values[1]) / 2
            both.wait()
            return mean

        options = ["--rank", str(rank), "--params", "64", "--exchanges", "2", "--warmup", "1"]
        peer_exchange.measure(task(*options), store, average, tolerance=1e-6)

    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    other = threading.Thread(target=member, args=[1])
    other.start()
    member(0)
    other.join()
    rows = [row for row in capsys.readouterr().out.splitlines() if row]
    assert len(rows) == 4 and all('"seconds"' in row and '"cpu_s"' in row for row in rows)


def test_cpu_time_counts_up() -> None:
    before_s = peer_exchange.tree_cpu_s(os.getpid())
    while peer_exchange.tree_cpu_s(os.getpid()) <= before_s:
        pass


@pytest.mark.parametrize("name", PINNED)
def test_every_requirement_is_pinned(name: str) -> None:
    lines = peer_envs.requirements(name).read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert all("==" in pin for pin in pins)
    assert {"torch", "numpy", "xxhash", name} <= {pin.split("==")[0] for pin in pins}


def test_pins_are_those_of_the_systems() -> None:
    assert {*PINNED, "ddp"} == set(peer_envs.PEERS)


def test_torch_comes_alone_from_its_index(tmp_path: Path) -> None:
    pins = tmp_path / "pins.txt"
    pins.write_text("numpy==1.26.4\ntorch==2.13.0\n")
    first, second = install_commands(Path("python"), pins, "https://example.org/cpu")
    assert first[-4:] == ["--no-deps", "--index-url", "https://example.org/cpu", "torch==2.13.0"]
    assert second[-2:] == ["--requirement", str(pins)]
    assert install_commands(Path("python"), pins, "")[0][-2:] == ["--no-deps", "torch==2.13.0"]


def test_an_unknown_system_is_a_wrong_setting() -> None:
    with pytest.raises(ConfigError, match="did you mean hivemind"):
        environment("hivmind")


def test_what_cannot_be_built_is_absent_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pins = tmp_path / "pins"
    pins.mkdir()
    monkeypatch.setattr(peer_envs, "REQUIREMENTS", pins)
    with pytest.raises(PeerAbsent, match="checkout"):
        environment("flwr", tmp_path)
    # No index at all is asked: what is wanted cannot be there.
    (pins / "flwr.txt").write_text("torch==0.0.0\n")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with pytest.raises(PeerAbsent, match=r"torch==0\.0\.0.*TORCH_INDEX") as failure:
        environment("flwr", tmp_path)
    assert failure.value.name == "flwr"
