"""Units, configuration and addresses: what people write, and what they are told if it is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrows.broker.config import BrokerConfig, chunk_elements, load_broker
from narrows.proto.config import describe, parse_address
from narrows.proto.errors import ConfigError
from narrows.proto.messages import Mode
from narrows.proto.units import Amount, BitRate, Duration, Quantity


@pytest.mark.parametrize(
    ("kind", "written", "value"),
    [
        (Duration, "1.5s", 1.5), (Duration, "200 ms", 0.2), (Duration, " 2min ", 120),
        (Duration, "0.1s", 0.1), (Duration, 3, 3),
        (BitRate, "2Gbit/s", 2e9), (BitRate, "0", 0), (BitRate, "1e3kbit/s", 1e6),
        (Amount, "12e9", 12_000_000_000), (Amount, "1.5M", 1_500_000),
        (Amount, "3B", 3_000_000_000), (Amount, 2.0**40, 1 << 40),
    ],
)  # fmt: skip
def test_units_are_read_exactly(kind: type[Quantity], written: object, value: float) -> None:
    assert kind.parse(written) == value


@pytest.mark.parametrize(
    ("kind", "written", "hint"),
    [
        (Duration, "5 parsecs", "units: us, ms, s, min, h, d"),
        (Duration, "-1s", "not a duration"), (Duration, float("nan"), "not a duration"),
        (Duration, True, "not a duration"), (Duration, None, "not a duration"),
        (Duration, "1" * 65 + "s", "not a duration"),
        (BitRate, "2GB", "units: bit/s, kbit/s"), (BitRate, "2gbit/S", 'write "2Gbit/s"'),
        (BitRate, "1e19", "out of range"),
        (Amount, "1.5", "not a whole number"), (Amount, "1e99", "out of range"),
    ],
)  # fmt: skip
def test_wrong_units_name_what_is_accepted(
    kind: type[Quantity], written: object, hint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        kind.parse(written)
    assert hint in str(caught.value)


@given(st.sampled_from([Duration, BitRate, Amount]), st.integers(0, 9 * 10**8))
def test_what_is_shown_can_be_read_again(kind: type[Quantity], value: int) -> None:
    assert kind.parse(kind(value).text()) == pytest.approx(value, rel=1e-3)


def test_flags_win_over_the_file_the_file_over_the_preset(tmp_path: Path) -> None:
    path = tmp_path / "broker.toml"
    path.write_text(
        """
        [run]
        mode = "diloco"
        goal_tokens = "12e9"
        [fragments]
        sync_period_steps = 20
        [merge]
        [wan]
        up = "2Gbit/s"
        """
    )
    flags = {"fragments.sync_period_steps": "30", "broker.insecure": "true", "merge.quorum": 2}
    config = load_broker(path, flags)
    assert (config.run.mode, config.merge.weights) == (Mode.DILOCO, "equal")
    assert config.fragments.count == 1
    assert (config.fragments.sync_period_steps, config.broker.insecure) == (30, True)
    assert (config.merge.quorum, config.wan.up, config.run.goal_tokens) == (2, 2e9, 12e9)
    assert config.run.max_offline == BrokerConfig().run.max_offline
    assert load_broker(path, {"run.mode": "decoupled"}).fragments.count == 4


@pytest.mark.parametrize(
    ("toml", "flags", "hints"),
    [
        ("", {"quorum": "2"}, ["command line: quorum: unknown key", "did you mean merge.quorum?"]),
        ("", {"merge.quorum": "-2"}, ["command line: merge.quorum", ">= 0", "got '-2'"]),
        ("", {"merge.quorum": "1.5"}, ["command line: merge.quorum", "expected a whole number"]),
        ("", {"run.mode": "dilco"}, ["decoupled, streaming, diloco", "did you mean diloco?"]),
        ("", {"merge.weights": "token"}, ["one of tokens, equal"]),
        ("", {"wan.up": "2GB"}, ["command line: wan.up", "units: bit/s"]),
        ("", {"wan.up": "2"}, ["wan.up", "at least 64kbit/s, with its unit"]),
        ("", {"broker.listen": "http://x"}, ["tcp://HOST:PORT"]),
        ("", {"broker.listen": "tcp://x:65534"}, ["it takes three"]),
        ("", {"broker.insecure": "maybe"}, ["broker.insecure", "expected true or false"]),
        ("", {"run.seeder": "a b"}, ["run.seeder", "a learner's name"]),
        ("", {"fragments.overlap_steps": 10}, ["less than fragments.sync_period_steps = 10"]),
        ("[wan\n", {}, ["broker.toml: not a TOML file", "line 1"]),
        ("[wann]\nup = 1\n", {}, ["broker.toml: wann.up: unknown key", "did you mean wan.up?"]),
        ("wan = 1\n", {}, ["wan: wrong value", "expected a table"]),
        ("[nothing]\n", {}, ["nothing: unknown key"]),
        ("[merge]\nouter_lr = nan\n", {}, ["merge.outer_lr", "a finite number"]),
        ("[merge]\nquorum = '2'\n", {}, ["merge.quorum", "expected a whole number, got '2'"]),
        ("[run]\nmode = {a = 1}\n", {}, ["run.mode", "one of decoupled"]),
        ("x = " + "[" * 10_000, {}, ["not a TOML file"]),
        (None, {}, ["broker.toml: cannot be read"]),
    ],
)
def test_errors_name_the_place_the_key_and_the_remedy(
    toml: str | None, flags: dict[str, object], hints: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "broker.toml"
    if toml is not None:
        path.write_text(toml)
    with pytest.raises(ConfigError) as caught:
        load_broker(path, flags)
    for hint in hints:
        assert hint in str(caught.value)


def test_every_setting_is_described() -> None:
    rows = {key: (default, doc) for key, default, doc in describe(BrokerConfig)}
    assert rows["run.max_offline"][0] == "1h"
    assert rows["broker.insecure"][0] == "false"
    assert rows["wan.up"] == ("0", "From each learner to the broker.")
    assert all(doc for _, doc in rows.values())


def test_the_rate_of_a_learner_cuts_the_messages() -> None:
    assert BrokerConfig().shared.chunk_elements == 1 << 18
    shared = load_broker(None, {"wan.up": "10Mbit/s"}).shared
    # 10 ms of 10 Mbit/s are 100,000 bits: 4 bits an element, or 32.
    assert (shared.chunk_elements, shared.state_chunk_elements) == (16384, 2048)
    assert (shared.streams, shared.window_messages) == (1, 32)
    assert chunk_elements(1.0, bits_per_element=4) == 1024


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "b.example.org", "10.0.0.1"])
def test_addresses(host: str) -> None:
    address = parse_address(f"tcp://{host}:7070")
    assert str(address) == f"tcp://{host}:7070"
    assert address.is_loopback is (host in ("127.0.0.1", "localhost", "[::1]"))
    everywhere = parse_address("tcp://*:0", listen=True)
    assert everywhere == ("*", 0) and not everywhere.is_loopback


@pytest.mark.parametrize(
    "text",
    ["", "127.0.0.1:7070", "tcp://host", "tcp://host:70700", "tcp://[::g]:1", "tcp://a/b:1",
     "tcp://*:7070", "tcp://host:0", "tcp://host:7070\n"],
)  # fmt: skip
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="tcp://HOST:PORT"):
        parse_address(text)
