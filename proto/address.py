"""Addresses as users write them: tcp://HOST:PORT."""

from __future__ import annotations

import ipaddress
import re
from typing import NamedTuple

from narrows.proto.errors import ConfigError

_ADDRESS = re.compile(r"tcp://(\*|\[[^\[\]]+\]|[A-Za-z0-9_][A-Za-z0-9._-]{0,253}):([0-9]{1,5})")


class Address(NamedTuple):
    """A host and a TCP port."""

    host: str
    """Name or number; an IPv6 address stands in brackets, as ZeroMQ wants it."""
    port: int

    @property
    def is_ipv6(self) -> bool:
        return self.host.startswith("[")

    @property
    def is_loopback(self) -> bool:
        """True if only this machine can reach it. A broker without keys may listen there."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host.strip("[]")).is_loopback
        except ValueError:
            # A name may be anywhere. To look it up would make the answer depend on the network.
            return False

    def __str__(self) -> str:
        return f"tcp://{self.host}:{self.port}"


def parse_address(text: str, what: str = "the broker's address") -> Address:
    """Where to connect to. Raises ConfigError for anything but a host and a port."""
    address = _parse(text)
    if address is None or address.host == "*" or address.port == 0:
        raise ConfigError(
            what,
            expected="tcp://HOST:PORT",
            got=repr(text),
            remedy="name the broker's host, and the port that `narrows broker` prints",
        )
    return address


def parse_listen(text: str) -> Address:
    """Where to bind: `*` for all interfaces, port 0 for any free one. Raises ConfigError."""
    address = _parse(text)
    if address is None:
        raise ConfigError("listen: no address", expected="tcp://HOST:PORT", got=text)
    return address


def _parse(text: str) -> Address | None:
    """The address in `text`, None if it is none."""
    # A regular expression, because urllib accepts user names, paths and queries as well.
    match = _ADDRESS.fullmatch(text)
    if match is None or int(match[2]) > 65535:
        return None
    address = Address(match[1], int(match[2]))
    if address.is_ipv6:
        try:
            ipaddress.IPv6Address(address.host[1:-1])
        except ValueError:
            return None
    return address
