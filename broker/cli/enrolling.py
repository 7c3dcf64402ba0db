"""Gets a site's key admitted: with an invitation, or with the key that it replaces.

The pair is made here, and only its public half travels. It stands in a file before the broker hears
of it: whatever is lost afterwards, the same command again goes on with the same pair.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Final

from narrows.broker.cli.asking import ask, is_admitted
from narrows.proto.errors import ConfigError, ErrorCode, Refused, RemoteProtocolError
from narrows.proto.keys import (
    Invitation,
    SiteKey,
    new_pair,
    read_site_key,
    write_site_key,
)
from narrows.proto.limits import PROTOCOL
from narrows.proto.messages import Enrol, Enrolled

RING_S: Final = 3.0
"""An invitation may be younger than the broker's last look at its ring: at most 2 s."""


def provisional(path: Path) -> Path:
    """The file of a key that the broker may know already, until its answer is there."""
    return path.with_name(f"{path.name}.new")


def accept(invitation: Invitation, to: Path, *, timeout_s: float) -> SiteKey:
    """Makes the key file `to` for an invitation. Raises ConfigError, Refused, BrokerUnreachable."""
    if to.exists():
        raise ConfigError(
            f"{to} exists",
            expected="a new file: a key is never overwritten",
            remedy="choose another name, or move the old file away",
        )
    servers = (invitation.server,)
    token = SiteKey(invitation.name, invitation.token, invitation.broker, servers)
    key = _provisional_key(SiteKey(invitation.name, new_pair(), invitation.broker, servers), to)
    try:
        enrol(token, key, timeout_s=timeout_s)
    except Refused as error:
        if error.code is not ErrorCode.KEY_REFUSED:
            raise
        raise Refused(
            ErrorCode.INVITATION,
            f"the broker at {invitation.broker} does not know the invitation for {invitation.name}",
            expected="an invitation that is neither used, replaced nor expired",
            remedy=f"ask its operator for a new one (`narrows keys invite {invitation.name} "
            f"--address {invitation.broker}`), and accept it with the same --to",
        ) from error
    provisional(to).rename(to)
    return key


def rotate(path: Path, *, timeout_s: float) -> SiteKey:
    """Puts a new pair into a site's key file; the old one lets it in. Errors as `accept`."""
    old = read_site_key(path)
    key = _provisional_key(dataclasses.replace(old, pair=new_pair()), path)
    enrol(old, key, timeout_s=timeout_s)
    provisional(path).rename(path)
    return key


def _provisional_key(key: SiteKey, path: Path) -> SiteKey:
    """Writes a key beside `path`. One that an attempt before has left there is taken instead."""
    file = provisional(path)
    if not file.exists():
        write_site_key(file, key)
        return key
    left = read_site_key(file)
    if (left.name, left.broker) != (key.name, key.broker):
        raise ConfigError(
            f"{file} is left from another attempt",
            expected=f"a key of {key.name} for {key.broker}",
            got=f"one of {left.name} for {left.broker}",
            remedy="choose another file, or move that one away",
        )
    return left


def enrol(door: SiteKey, key: SiteKey, *, timeout_s: float) -> None:
    """Has the broker admit `key`, over a connection with the key of `door`.

    The answer to an attempt before this one may have been lost: then `key` is admitted, and `door`
    perhaps no more.
    """
    patient_until = time.monotonic() + RING_S
    while True:
        try:
            answer = ask(door.broker, door, Enrol(PROTOCOL, key.pair.public), timeout_s=timeout_s)
            break
        except Refused as error:
            if is_admitted(key, timeout_s=timeout_s):
                return
            if error.code is not ErrorCode.KEY_REFUSED or time.monotonic() > patient_until:
                raise
            time.sleep(0.25)
    if answer != Enrolled(key.name):
        raise RemoteProtocolError(
            ErrorCode.BAD_MESSAGE,
            f"answer of {door.broker}",
            expected=f"Enrolled({key.name})",
            got=str(answer)[:200],
        )
