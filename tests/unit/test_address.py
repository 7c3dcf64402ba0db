"""Addresses: what is accepted, and that nothing else reaches a socket."""

from __future__ import annotations

import pytest

from narrows.proto.address import parse_address, parse_listen
from narrows.proto.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("tcp://127.0.0.1:7070", "127.0.0.1", 7070),
        ("tcp://broker-1.example.org:1", "broker-1.example.org", 1),
        ("tcp://my_host:65535", "my_host", 65535),
        ("tcp://[::1]:7070", "[::1]", 7070),
    ],
)
def test_host_and_port(text: str, host: str, port: int) -> None:
    address = parse_address(text)
    assert address == (host, port)
    assert str(address) == text
    assert address.is_ipv6 == host.startswith("[")


@pytest.mark.parametrize(
    "text",
    [
        "", "7070", "127.0.0.1:7070", "tcp://127.0.0.1", "udp://127.0.0.1:7070", "tcp://:7070",
        "tcp://a b:7070", "tcp://-x:7070", "tcp://h:7070/x", "tcp://user@h:7070",
        "tcp://h:70700", "tcp://h:-1", "tcp://h:7070\n", "tcp://::1:7070", "tcp://[]:7070",
        "tcp://[gg::1]:7070", "tcp://[::1]x:7070", "tcp://h:٣", "ipc:///tmp/x", "inproc://x",
    ],
)  # fmt: skip
def test_what_is_no_address_is_refused(text: str) -> None:
    for parse in (parse_address, parse_listen):
        with pytest.raises(ConfigError) as caught:
            parse(text)
        assert caught.value.expected == "tcp://HOST:PORT"


@pytest.mark.parametrize("text", ["tcp://*:7070", "tcp://127.0.0.1:0"])
def test_what_can_only_be_bound(text: str) -> None:
    assert str(parse_listen(text)) == text
    with pytest.raises(ConfigError, match="broker's address"):
        parse_address(text)


@pytest.mark.parametrize(
    ("text", "loopback"),
    [
        ("tcp://127.9.9.9:1", True),
        ("tcp://localhost:1", True),
        ("tcp://[::1]:1", True),
        ("tcp://*:1", False),
        ("tcp://0.0.0.0:1", False),
        ("tcp://[::]:1", False),
        ("tcp://10.0.0.1:1", False),
        ("tcp://127.example.org:1", False),
    ],
)
def test_loopback(text: str, loopback: bool) -> None:
    assert parse_listen(text).is_loopback == loopback
