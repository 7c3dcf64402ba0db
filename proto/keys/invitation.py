"""Invitations: one line of text with which a site gets a key for its name.

The token in it is the secret of a key that may do one thing: hand over a public key for the name,
once. The broker keeps the token's public half. So no secret of a site ever travels.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec
import xxhash

from narrows.proto.address import parse_address
from narrows.proto.errors import ConfigError
from narrows.proto.keys.pair import KeyPair, check_public_key, pair_of_secret
from narrows.proto.limits import NAME_PATTERN

PREFIX: Final = "narrows-1-"
CHARACTERS_MAX: Final = 1024
_CHECK_BYTES: Final = 4


@dataclass(frozen=True)
class Invitation:
    """All that a site needs to get a key."""

    broker: str
    """Address of the broker, tcp://HOST:PORT."""
    server: str
    """Public key of the broker."""
    name: str
    token: KeyPair
    until: int
    """Time at which it expires, in seconds since 1970 (UTC)."""

    def __str__(self) -> str:
        """The line of text. It is a secret until it has been used."""
        body = msgspec.msgpack.encode(
            _Body(self.broker, self.server, self.name, self.token.secret, self.until)
        )
        text = base64.urlsafe_b64encode(body + _check(body)).decode().rstrip("=")
        return PREFIX + text


class _Body(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    broker: str
    server: str
    name: Annotated[str, msgspec.Meta(pattern=NAME_PATTERN)]
    token: str
    until: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]


def is_invitation(text: str) -> bool:
    """True for a text that begins as an invitation does; `read_invitation` may still refuse it."""
    return text.startswith(PREFIX)


def read_invitation(text: str) -> Invitation:
    """The invitation in a line of text. Raises ConfigError, which does not show the token."""
    text = "".join(text.split())  # Mail programs break long lines.
    if len(text) > CHARACTERS_MAX or not text.startswith(PREFIX):
        raise _damaged()
    coded = text.removeprefix(PREFIX)
    try:
        data = base64.b64decode(coded + "=" * (-len(coded) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as error:
        raise _damaged() from error
    body, check = data[:-_CHECK_BYTES], data[-_CHECK_BYTES:]
    if _check(body) != check:
        raise _damaged()
    try:
        parts = msgspec.msgpack.decode(body, type=_Body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _damaged() from error
    try:
        parse_address(parts.broker)
        check_public_key(parts.server, "the broker's key")
        token = pair_of_secret(parts.token, "the token")
    except ConfigError:
        # Not quoted: the token may stand in the place of any of them.
        raise _damaged() from None
    return Invitation(parts.broker, parts.server, parts.name, token, parts.until)


def _check(body: bytes) -> bytes:
    return xxhash.xxh3_64_digest(body)[:_CHECK_BYTES]


def _damaged() -> ConfigError:
    return ConfigError(
        "the invitation is damaged",
        expected=f"the whole line that `narrows keys invite` printed; it begins with {PREFIX}",
        remedy="copy it again, or ask for a new one",
    )
