"""The `narrows` command: one line and an exit code for whatever goes wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from pathlib import Path

import pytest
from peer import Peer
from running import Run, broker_config, live_broker

from narrows.bench.kit.processes import free_ports
from narrows.broker.config import BrokerConfig
from narrows.broker.process.service import Service
from narrows.proto.config import described


@pytest.fixture
def service(tmp_path: Path) -> Generator[Service]:
    with live_broker(broker_config(tmp_path, wan__streams=1)) as service:
        yield service


@pytest.fixture
def closed_port() -> int:
    return free_ports()


@pytest.mark.parametrize("arguments", [("--help",), ("broker", "--help"), ("--version",)])
def test_help(narrows: Run, arguments: tuple[str, ...]) -> None:
    code, output, _ = narrows(*arguments)
    assert code == 0
    assert output


def test_the_help_of_the_broker_shows_every_setting_with_its_unit(narrows: Run) -> None:
    _, output, _ = narrows("broker", "--help")
    lines = [line.split() for line in output.splitlines()]
    for key, default, takes in described(BrokerConfig):
        (row,) = (line for line in lines if line[:1] == [key])
        assert row[1] == default and takes.split()[0] in row, key
    assert ["broker.journal_segment", "64MiB", "a", "size,", "4KiB", "to", "1TiB"] in lines
    assert "Exit codes" in output


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("broker", "--listen", "nonsense"), "listen: no address"),
        (("broker", "--set", "merge.quorum"), "expected KEY=VALUE"),
        (("broker", "--set", "merge.quorun=2"), "merge.quorum"),
        (("broker", "--config", "/nowhere/x.toml"), "/nowhere/x.toml"),
        (("broker", "--listen", "tcp://0.0.0.0:7070"), "--insecure"),
        (("learner", "--broker", "nonsense", "--name", "a"), "tcp://HOST:PORT"),
        (("learner", "--broker", "tcp://h:1", "--name", "a", "--preset", "big"), "tiny"),
        (("learner", "--broker", "tcp://h:1", "--name", "a", "--part", "3/2"), "1 <= i <= n"),
        (("status", "nonsense"), "tcp://HOST:PORT"),
    ],
)
def test_wrong_usage_is_code_2(
    narrows: Run, arguments: tuple[str, ...], told: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    code, _, errors = narrows(*arguments)
    assert code == 2
    assert told in errors
    assert not list(tmp_path.iterdir())


def test_nobody_there_is_code_4(narrows: Run, closed_port: int, data: Path) -> None:
    address = f"tcp://127.0.0.1:{closed_port}"
    code, _, errors = narrows("status", address, "--timeout-s", "0.2")
    assert code == 4
    assert errors.startswith(f"narrows: broker_unreachable: {address} did not answer")
    code, _, errors = narrows(
        "learner", "--broker", address, "--name", "a", "--data", str(data),
        "--join-timeout-s", "0.2",
    )  # fmt: skip
    assert code == 4
    assert f"no broker answered at {address} for 0.2 s" in errors


def test_a_refusal_is_code_3(narrows: Run, service: Service, data: Path) -> None:
    start = ("learner", "--broker", service.wires.address, "--data", str(data), "--name")
    with Peer(service.wires.address, "other") as other:
        other.join()  # The run's model is the toy's from now on.
        code, _, errors = narrows(*start, "a")
        assert code == 3
        assert "narrows: layout_mismatch: " in errors
        assert "--state-dir" in errors
        code, _, errors = narrows(*start, "no such name")
        assert code == 3
        assert "narrows: bad_name: " in errors


def test_a_port_in_use_is_code_1(narrows: Run, service: Service, tmp_path: Path) -> None:
    code, _, errors = narrows(
        "broker", "--listen", service.wires.address, "--state-dir", str(tmp_path / "other")
    )
    assert code == 1
    assert errors.startswith("narrows: port_in_use: cannot bind the control port")
    assert "is a broker running already?" in errors


def test_a_state_directory_in_use_is_code_1(narrows: Run, service: Service) -> None:
    code, _, errors = narrows(
        "broker", "--listen", "tcp://127.0.0.1:0",
        "--state-dir", service.syncer.state.config.broker.state_dir,
    )  # fmt: skip
    assert code == 1
    assert "another broker" in errors


def test_status_as_a_table_and_as_json(narrows: Run, service: Service) -> None:
    with Peer(service.wires.address, "site-a") as peer:
        peer.join()
        peer.found()
        code, table, _ = narrows("status", service.wires.address)
        assert code == 0
        assert "running" in table
        assert re.search(r"^site-a +live .* 127\.0\.0\.1 *$", table, re.MULTILINE)
        code, text, _ = narrows("status", service.wires.address, "--json")
        assert code == 0
        assert [learner["name"] for learner in json.loads(text)["learners"]] == ["site-a"]


PLAN = ("plan", "--params", "12e9", "--step", "2s", "--learners", "4", "--wan")


def test_plan_answers_in_words_and_in_json(narrows: Run) -> None:
    code, output, _ = narrows(*PLAN, "2Gbit/s")
    assert code == 0
    assert "It fits. Fullest:" in output
    code, output, _ = narrows(*PLAN, "2Gbit/s", "--json")
    assert code == 0
    plan = json.loads(output)
    assert plan["fits"] is True
    assert plan["brokers"] == 1
    assert plan["bottleneck"] in [load["name"] for load in plan["loads"]]


def test_a_plan_that_does_not_fit_is_told_by_the_exit_code_too(narrows: Run) -> None:
    code, output, _ = narrows(*PLAN, "20Mbit/s")
    assert code == 1
    assert "It does not fit" in output


def test_plan_keeps_settings(narrows: Run, tmp_path: Path) -> None:
    config = tmp_path / "broker.toml"
    config.write_text("[fragments]\ncount = 4\nsync_period_steps = 40\n")
    _, output, _ = narrows(*PLAN, "2Gbit/s", "--json", "--config", str(config))
    plan = json.loads(output)
    assert (plan["fragments"], plan["sync_period_steps"]) == (4, 40)
    _, output, _ = narrows(*PLAN, "2Gbit/s", "--json", "--set", "fragments.count=8")
    plan = json.loads(output)
    assert plan["fragments"] == 8
    assert plan["sync_period_steps"] > 10


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((*PLAN, "2"), "--wan"),
        ((*PLAN, "0"), "line_bits_per_s"),
        ((*PLAN, "2Gbit/s", "--disk", "fast"), "--disk"),
        ((*PLAN, "2Gbit/s", "--broker-cores", "0"), "broker_cores"),
        ((*PLAN, "2Gbit/s", "--set", "run.mode=diloco"), "run.mode"),
        ((*PLAN, "2Gbit/s", "--set", "fragments.cuont=3"), "fragments.count"),
    ],
)
def test_plan_refuses_nonsense(narrows: Run, arguments: tuple[str, ...], named: str) -> None:
    code, _, errors = narrows(*arguments)
    assert code == 2
    assert named in errors
