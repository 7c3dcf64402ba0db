"""CURVE key pairs (Curve25519) in the text form Z85, as ZeroMQ takes them."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field
from typing import Final

import zmq
import zmq.utils.z85

from narrows.proto.errors import ConfigError

KEY_CHARACTERS: Final = 40
"""Characters of a key: 32 bytes in Z85."""

_KEY: Final = re.compile(r"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")


@dataclass(frozen=True)
class KeyPair:
    """A public key and its secret. The secret is left out of every printed form."""

    public: str
    secret: str = field(repr=False)


def new_pair() -> KeyPair:
    """A fresh pair from the system's randomness."""
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())


def pair_of_secret(secret: str, what: str) -> KeyPair:
    """The pair that belongs to a secret. Raises ConfigError, which does not show the secret."""
    if not _is_key(secret):
        raise ConfigError(
            f"{what}: not a secret key",
            expected=f"{KEY_CHARACTERS} characters of Z85",
            got=f"{len(secret)} characters (not shown)",
            remedy="copy the file again from where it was made",
        )
    return KeyPair(zmq.curve_public(secret.encode()).decode(), secret)


def check_public_key(text: str, what: str) -> str:
    """`text` if it is a public key. Raises ConfigError."""
    if not _is_key(text):
        raise ConfigError(
            f"{what}: not a public key",
            expected=f"{KEY_CHARACTERS} characters of Z85, as `narrows keys show FILE` prints them",
            got=repr(text[:64]),
        )
    return text


def _is_key(text: str) -> bool:
    """True for 32 bytes in Z85. Five characters can spell more than four bytes hold."""
    if not _KEY.fullmatch(text):
        return False
    try:
        zmq.utils.z85.decode(text)
    except struct.error:
        return False
    return True
