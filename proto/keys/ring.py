"""A broker's key ring: the public keys that are admitted, with name, role and organisation.

The file is TOML with one table per key. A broker that runs reads it again when it changes, so
`narrows keys` and an operator's editor both work.
"""

from __future__ import annotations

import dataclasses
import fcntl
import math
import os
import re
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Final

import msgspec

from narrows.proto.errors import ConfigError
from narrows.proto.key_holder import KeyHolder, KeyRole
from narrows.proto.keys.pair import check_public_key
from narrows.proto.keys.secret_file import TomlValue, read_toml, replace_secret, toml_lines
from narrows.proto.limits import NAME_PATTERN

FORMAT: Final = 1
KEYS_PER_NAME_MAX: Final = 2
"""A key and its successor: more would hide a key that nobody uses."""
ROTATION_S: Final = 86_400
"""Time for which the old key stays valid beside its successor."""

_NAME: Final = re.compile(NAME_PATTERN)
_ORGANISATION: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._-]{0,63}|")


@dataclass(frozen=True)
class Grant:
    """One admitted key."""

    holder: KeyHolder
    public: str
    until: float = math.inf
    """Time at which it ends, in seconds since 1970 (UTC)."""


@dataclass(frozen=True)
class Invited:
    """A name that waits for its key: the token's public half, and what the name will be."""

    holder: KeyHolder
    public: str
    until: float


@dataclass(frozen=True)
class Keyring:
    """Everybody whom the broker admits. Changes make a new ring."""

    grants: tuple[Grant, ...] = ()
    invitations: tuple[Invited, ...] = ()

    def __post_init__(self) -> None:
        """Raises ConfigError unless a name has one holder and a key one holder."""
        holders: dict[str, str] = {}
        for each in self.everybody:
            name = each.holder.name
            if each.public in holders:
                raise ConfigError(
                    "one key twice in the ring",
                    expected="a key of its own for every name",
                    got=f"{each.public} for {holders[each.public]} and for {name}",
                )
            holders[each.public] = name
        for name, grants in self._grants_by_name.items():
            _check_name(name, grants)

    @property
    def everybody(self) -> tuple[Grant | Invited, ...]:
        """Keys, then invitations, each in the order of the file."""
        return (*self.grants, *self.invitations)

    @cached_property
    def _grants_by_name(self) -> dict[str, list[Grant]]:
        by_name: dict[str, list[Grant]] = {}
        for grant in self.grants:
            by_name.setdefault(grant.holder.name, []).append(grant)
        return by_name

    @cached_property
    def _entries(self) -> dict[str, Grant | Invited]:
        return {each.public: each for each in self.everybody}

    def of(self, name: str) -> list[Grant]:
        """The keys of a name, in the order of the file: the newest is the last."""
        return self._grants_by_name.get(name, [])

    def holder(self, public: str, now: float) -> KeyHolder | None:
        """The holder of a public key at the time `now` (seconds since 1970), None: nobody."""
        entry = self._entries.get(public)
        if entry is None or now >= entry.until:
            return None
        if isinstance(entry, Invited):
            return KeyHolder(entry.holder.name, KeyRole.ENROL)
        return entry.holder

    def organisations(self) -> int:
        """Number of organisations that learners of the ring belong to."""
        return len({g.holder.organisation for g in self.grants if g.holder.trains})

    def allow(self, holder: KeyHolder, public: str, *, now: float) -> Keyring:
        """A ring that admits one more key. The newest other key of that name ends in a day.

        A key that is there already stays: an answer may have been lost, and the question comes
        again.
        """
        check_public_key(public, f"the key of {holder.name}")
        grants = [g for g in self.grants if now < g.until and g.holder.name != holder.name]
        if before := [g for g in self.of(holder.name) if g.public != public]:
            until = min(before[-1].until, now + ROTATION_S)
            grants.append(dataclasses.replace(before[-1], until=until))
        return dataclasses.replace(self, grants=(*grants, Grant(holder, public)))

    def invite(self, holder: KeyHolder, token: str, *, until: float) -> Keyring:
        """A ring that lets the holder of `token` (a public key) hand over a key for a name."""
        others = [each for each in self.invitations if each.holder.name != holder.name]
        invited = Invited(holder, token, until)
        return dataclasses.replace(self, invitations=(*others, invited))

    def enrol(self, token: str, public: str, *, now: float) -> Keyring:
        """A ring in which an invitation has become a key. Raises ConfigError if there is none."""
        for invited in self.invitations:
            if invited.public == token and now < invited.until:
                left = tuple(each for each in self.invitations if each is not invited)
                ring = dataclasses.replace(self, invitations=left)
                return ring.allow(invited.holder, public, now=now)
        raise ConfigError(
            "the invitation is unknown, used or expired",
            remedy="ask the broker's operator for a new one: `narrows keys invite NAME`",
        )

    def revoke(self, name: str) -> Keyring:
        """A ring without the keys and invitations of a name."""
        return Keyring(
            tuple(each for each in self.grants if each.holder.name != name),
            tuple(each for each in self.invitations if each.holder.name != name),
        )


def _check_name(name: str, grants: list[Grant]) -> None:
    """Raises ConfigError unless all keys of a name make it the same holder."""
    if len({grant.holder for grant in grants}) > 1:
        raise ConfigError(
            f"the keys of {name} differ in role, organisation, carries or tokens_per_s_max",
            expected="two keys of one name to have the same",
            remedy=f"`narrows keys revoke {name}`, then allow it anew",
        )
    if len(grants) > KEYS_PER_NAME_MAX:
        raise ConfigError(
            f"{name} has too many keys",
            expected=f"at most {KEYS_PER_NAME_MAX}, a key and its successor",
            got=str(len(grants)),
            remedy=f"`narrows keys revoke {name}`, then allow it anew",
        )


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    public: str
    role: KeyRole = KeyRole.LEARNER
    organisation: str = ""
    carries: list[str] = msgspec.field(default_factory=list[str])
    tokens_per_s_max: float = 0.0
    until: str = ""


class _RingFile(msgspec.Struct, forbid_unknown_fields=True):
    format: int
    key: list[_Entry] = msgspec.field(default_factory=list[_Entry])
    invitation: list[_Entry] = msgspec.field(default_factory=list[_Entry])


def ring_path(directory: Path) -> Path:
    """The key ring in a broker's directory of keys."""
    return directory / "allowed.toml"


def new_ring(directory: Path) -> None:
    """Makes a ring that admits nobody; one that is there stays."""
    if not ring_path(directory).exists():
        write_ring(directory, Keyring())


def read_ring(directory: Path) -> Keyring:
    """The ring in `directory`. Raises ConfigError, naming the file and the entry."""
    path = ring_path(directory)
    try:
        file = msgspec.convert(read_toml(path), _RingFile, strict=True)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}") from error
    if file.format != FORMAT:
        raise ConfigError(
            f"{path}: unknown format", expected=f"format = {FORMAT}", got=str(file.format)
        )
    grants = tuple(
        Grant(_holder(path, e), e.public, _seconds(path, e) if e.until else math.inf)
        for e in file.key
    )
    invitations = tuple(
        Invited(_holder(path, e), e.public, _seconds(path, e)) for e in file.invitation
    )
    return Keyring(grants, invitations)


@contextmanager
def edit_ring(directory: Path) -> Generator[list[Keyring]]:
    """The ring as the one element of a list. The ring that stands in it at the end is written.

    A lock on the directory keeps two editors apart, the broker included.
    """
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        rings = [read_ring(directory)]
        yield rings
        write_ring(directory, rings[0])
    finally:
        os.close(fd)


def write_ring(directory: Path, ring: Keyring) -> None:
    """Puts a ring in the place of the one in `directory`, in one step."""
    lines = ["# The keys that the broker admits. A running broker reads changes at once.", ""]
    lines.append(f"format = {FORMAT}")
    for each in ring.everybody:
        table = "key" if isinstance(each, Grant) else "invitation"
        lines += ["", f"[[{table}]]", *toml_lines(_values(each))]
    replace_secret(ring_path(directory), "\n".join([*lines, ""]))


def _values(entry: Grant | Invited) -> dict[str, TomlValue]:
    holder = entry.holder
    values: dict[str, TomlValue] = {"name": holder.name, "public": entry.public}
    values["role"] = str(holder.role)
    if holder.organisation:
        values["organisation"] = holder.organisation
    if holder.carries:
        values["carries"] = list(holder.carries)
    if holder.tokens_per_s_max:
        values["tokens_per_s_max"] = holder.tokens_per_s_max
    if entry.until != math.inf:
        values["until"] = datetime.fromtimestamp(entry.until, UTC).isoformat()
    return values


def _holder(path: Path, entry: _Entry) -> KeyHolder:
    holder = KeyHolder(
        entry.name, entry.role, entry.organisation, tuple(entry.carries), entry.tokens_per_s_max
    )
    check_holder(holder, str(path))
    check_public_key(entry.public, f"{path}: {entry.name}")
    return holder


def check_holder(holder: KeyHolder, where: str) -> KeyHolder:
    """`holder` if a ring may hold it. Raises ConfigError, naming `where` it comes from."""
    for name in (holder.name, *holder.carries):
        if not _NAME.match(name):
            raise ConfigError(f"{where}: a name", expected="letters, digits, . _ -", got=repr(name))
    what = f"{where}: {holder.name}"
    if holder.role is KeyRole.ENROL:
        raise ConfigError(f"{what}: role", expected="a role but enrol, which invitations have")
    if not _ORGANISATION.fullmatch(holder.organisation):
        raise ConfigError(f"{what}: organisation", expected="up to 64 letters, digits, ' ', . _ -")
    if not 0.0 <= holder.tokens_per_s_max <= 1e18:
        raise ConfigError(f"{what}: tokens_per_s_max", expected="0 to 1e18")
    return holder


def _seconds(path: Path, entry: _Entry) -> float:
    try:
        at = datetime.fromisoformat(entry.until)
    except ValueError as error:
        raise ConfigError(
            f"{path}: {entry.name}: until",
            expected="a time such as 2027-01-31T12:00:00+00:00",
            got=repr(entry.until),
        ) from error
    return at.replace(tzinfo=at.tzinfo or UTC).timestamp()
