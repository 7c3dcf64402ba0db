"""Keys: CURVE pairs, the site's key file, the broker's key and its allow list.

A key is an admission. The site makes a pair and mails its public line; the operator of the broker
adds that line to the allow list. A secret stands in one file, which its owner alone may read, and
never in a message, a log or a repr.
"""

from __future__ import annotations

import json
import os
import re
import stat
import tempfile
import tomllib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec
import zmq
from msgspec import Struct

from narrows.proto.errors import ConfigError
from narrows.proto.messages import NAME_PATTERN, Name

if TYPE_CHECKING:
    from zmq.auth.thread import ThreadAuthenticator

DOMAIN: Final = "narrows"
"""ZAP domain of the broker's sockets."""

_LINE: Final = "narrows-key"
_PAIR: Final = 'public = "{0.public}"\nsecret = "{0.secret}"\n'

T = TypeVar("T")


@dataclass(frozen=True)
class KeyPair:
    """A CURVE public key and its secret, both in Z85 (40 characters)."""

    public: str
    secret: str = field(repr=False)


@dataclass(frozen=True)
class SiteKey:
    """All that a learner needs to be let in, and to know that it talks to its broker."""

    name: str
    pair: KeyPair
    servers: tuple[str, ...] = ()
    """Public keys of the broker, tried in turn; empty until its operator has told one."""
    broker: str = ""
    """Control address of the broker, if the file has it."""


def servers_of(key: SiteKey | None) -> tuple[str, ...]:
    """The public keys of the broker, of which each dial tries the next; without a key one that is
    empty, which stands for a broker without keys."""
    return key.servers if key else ("",)


def new_pair() -> KeyPair:
    """A fresh pair from the system's randomness."""
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())


def public_line(name: str, public: str) -> str:
    """A public key as one line that a site may mail."""
    return f"{_LINE} {name} {public}"


def read_public_line(text: str) -> tuple[str, str]:
    """Name and public key of such a line. Raises ConfigError."""
    words = text.split()
    if len(words) != 3 or words[0] != _LINE:
        raise ConfigError(
            "not a public line",
            expected=f"`{_LINE} NAME KEY`, as the site's `narrows keys show` prints it",
            got=repr(text[:100]),
        )
    return check_name(words[1], "the public line"), check_key(words[2], "the public line")


def check_key(text: str, where: str) -> str:
    """`text` if it is a public key. Raises ConfigError that says `where` it stands."""
    # Only the form can be checked: public and secret keys look alike, and any 32 bytes are one.
    if not _public_half(text):
        raise ConfigError(
            where,
            expected="a public key: 40 characters of Z85, as `narrows keys show` prints them",
            got=repr(text[:64]),
        )
    return text


def check_name(text: str, where: str) -> str:
    """`text` if it is the name of a site. Raises ConfigError."""
    if not re.match(NAME_PATTERN, text):
        raise ConfigError(
            where,
            expected="a site's name: up to 48 letters, digits, dots, _ and -",
            got=repr(text[:64]),
        )
    return text


def _public_half(secret: str) -> str:
    """The public key of a secret; "" for a text that is not 32 bytes in Z85."""
    if "\0" in secret:  # libzmq would stop there, and take the rest from whatever is in its memory.
        return ""
    try:
        return zmq.curve_public(secret.encode()).decode()
    except (ValueError, zmq.ZMQError):
        return ""


# Files with a secret.


class _BrokerFile(Struct, forbid_unknown_fields=True):
    public: str
    secret: str

    def pair(self, path: Path) -> KeyPair:
        """The pair in the file. The error shows no secret."""
        if _public_half(self.secret) != self.public:
            raise ConfigError(
                f"{path}: public is not the public half of secret",
                expected="both halves of one pair, 40 characters of Z85 each",
                got=f"a secret of {len(self.secret)} characters (not shown)",
                remedy="copy the file again from where it was made",
            )
        return KeyPair(self.public, self.secret)


class _SiteFile(_BrokerFile, forbid_unknown_fields=True):
    name: Name
    servers: list[str] = []
    broker: str = ""


def write_site_key(path: Path, key: SiteKey, *, replace: bool = False) -> None:
    """Writes a site's file for its owner alone. Raises ConfigError if the file exists; `replace`
    changes the servers or the address in it."""
    text = (
        f'# The key of a site: a secret.\nname = "{key.name}"\n'
        f"{_PAIR.format(key.pair)}"
        f"servers = {json.dumps(key.servers)}\n"
    )
    if key.broker:
        text += f'broker = "{key.broker}"\n'
    _write(path, text, replace=replace)


def read_site_key(path: Path) -> SiteKey:
    """Reads a site's file. Raises ConfigError for one that others may read, or that is none."""
    file = _parsed(_content(path, secret=True), _SiteFile, path)
    servers = tuple(check_key(each, f"{path}: servers") for each in file.servers)
    return SiteKey(file.name, file.pair(path), servers, file.broker)


def check_trust(key: SiteKey, path: Path) -> SiteKey:
    """`key` if it says which broker to trust. Raises ConfigError."""
    if not key.servers:
        raise ConfigError(
            f"{path} does not say which broker to trust",
            expected="the broker's public key, as `narrows keys show` prints it there",
            remedy=f"narrows keys new {path} --server KEY",
        )
    return key


def create_broker_key(folder: Path) -> KeyPair:
    """Makes a broker's folder of keys, with a fresh key and an empty allow list. Raises ConfigError
    if there is a key already, or if others may change the folder."""
    pair = new_pair()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_writers(folder, folder.stat())
    _write(folder / "broker.key", "# The key of a broker: a secret.\n" + _PAIR.format(pair))
    if not AllowList.path(folder).exists():
        _write(AllowList.path(folder), _ALLOW_HEAD)
    return pair


def read_broker_key(folder: Path) -> KeyPair:
    """The key in a broker's folder. Raises ConfigError, which names the command that makes one."""
    path = folder / "broker.key"
    if not path.exists():
        raise ConfigError(
            f"{folder} has no broker.key",
            expected="a folder of keys",
            remedy=f"`narrows keys new --keys {folder}` makes one",
        )
    return _parsed(_content(path, secret=True), _BrokerFile, path).pair(path)


# The allow list.

_ALLOW_HEAD: Final = """\
# Sites that may connect, one a line: "name" = "public key". While a second key of a site takes the
# place of the first: "name" = ["key", "key"]. The broker reads this file again when it changes.
"""


@dataclass(frozen=True)
class AllowList:
    """Which public key speaks for which site: `allow.toml` in a broker's folder of keys."""

    sites: Mapping[str, tuple[str, ...]]
    """Name -> public keys, in the order of the file."""
    keys: Mapping[str, str]
    """Public key -> name. A key that is not here is not admitted."""

    @staticmethod
    def path(folder: Path) -> Path:
        """The allow list in a broker's folder of keys."""
        return folder / "allow.toml"

    @classmethod
    def read(cls, folder: Path) -> AllowList:
        """Raises ConfigError that names the file and the wrong entry."""
        path = cls.path(folder)
        text = _content(path, secret=False)
        if not text:
            # An editor is about to write it. Read as a list, it would cut everybody off.
            raise ConfigError(
                f"{path} is empty",
                expected="sites, or a comment",
                remedy="to admit nobody leave a comment in it",
            )
        return cls._parse(text, path)

    @classmethod
    def allow(cls, folder: Path, name: str, public: str) -> AllowList:
        """Admits a key, beside other keys of that name. Raises ConfigError if it is another's."""
        before = cls.read(folder)
        owner = before.keys.get(check_key(public, name))
        if owner not in (None, name):
            raise ConfigError(f"the key of {name}", expected="its own", got=f"that of {owner}")
        keys = before.sites.get(check_name(name, "a name to allow"), ())
        return before._edit(folder, name, keys if public in keys else (*keys, public))

    @classmethod
    def revoke(cls, folder: Path, name: str, public: str = "") -> AllowList:
        """Takes out a key of a site, or all of them. Raises ConfigError if there is none."""
        before = cls.read(folder)
        keys = before.sites.get(name, ())
        # Without `public` none is kept.
        kept = tuple(key for key in keys if public and key != public)
        if kept == keys:
            raise ConfigError(
                f"{cls.path(folder)}: nothing to revoke", got=f"{name} {public}".rstrip()
            )
        return before._edit(folder, name, kept)

    def _edit(self, folder: Path, name: str, keys: tuple[str, ...]) -> AllowList:
        """Changes the line of one name; an editor's comments and other lines stay."""
        path = self.path(folder)
        expected = {other: its_keys for other, its_keys in self.sites.items() if other != name}
        own = re.compile(rf"\s*[\"']?{re.escape(name)}[\"']?\s*=")
        lines = [line for line in _content(path, secret=False).splitlines() if not own.match(line)]
        if keys:
            expected[name] = keys
            value = json.dumps(keys if len(keys) > 1 else keys[0])
            lines.append(f'"{name}" = {value}')
        text = "\n".join(lines) + "\n"
        after = None
        with suppress(ConfigError):
            after = self._parse(text, path)
        if after is None or after.sites != expected:
            raise ConfigError(
                f"{path}: the entry of {name} was not changed",
                remedy="it is not on a line of its own: change it in an editor",
            )
        _write(path, text, replace=True)
        return after

    @classmethod
    def _parse(cls, text: str, path: Path) -> AllowList:
        owners: dict[str, str] = {}
        sites: dict[str, tuple[str, ...]] = {}
        for name, value in _parsed(text, dict[str, str | list[str]], path).items():
            keys = (value,) if isinstance(value, str) else tuple(value)
            sites[check_name(name, f"{path}: a name")] = keys
            for key in keys:
                owner = owners.setdefault(check_key(key, f"{path}: {name}"), name)
                if owner != name:
                    raise ConfigError(
                        str(path),
                        expected="a key for every name",
                        got=f"{key} for {owner} and {name}",
                    )
        return cls(sites, owners)


def serve_keys(
    context: zmq.Context[zmq.Socket[bytes]], admits: Callable[[str], bool]
) -> ThreadAuthenticator:
    """Lets `admits(public key)` decide every CURVE handshake of the context's servers, on a thread
    of its own. Call it before they bind, and `stop()` the result at the end. Every frame that they
    receive then has the key of its connection as its User-Id."""
    from zmq.auth.thread import ThreadAuthenticator  # It loads asyncio, which a client needs not.

    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(
        domain=DOMAIN,
        credentials_provider=SimpleNamespace(callback=lambda _, key: admits(key.decode())),
    )
    return authenticator


def _write(path: Path, text: str, *, replace: bool = False) -> None:
    """Writes a whole file for its owner alone, in one step, durable when it returns."""
    try:
        fd, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
        try:
            with open(fd, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(fd)
            if replace:
                os.replace(temporary, path)
            else:
                os.link(temporary, path)  # Unlike a rename it fails if the file exists.
        finally:
            Path(temporary).unlink(missing_ok=True)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        os.fsync(folder)
        os.close(folder)
    except FileExistsError:
        raise ConfigError(
            f"{path} exists",
            expected="a new file",
            remedy="a key is never overwritten: choose another name, or move the file away",
        ) from None
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def _content(path: Path, *, secret: bool) -> str:
    """The text of a key file. Raises ConfigError if others could have read or changed it."""
    try:
        if not secret:
            _check_writers(path.parent, path.parent.stat())
        # Without O_NONBLOCK a pipe in the place of the file would hang its reader.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise ConfigError(f"{path}: no key file", expected="a regular file")
            if not secret:
                _check_writers(path, found)
            elif found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise ConfigError(
                    f"{path}: others may read a secret",
                    expected="mode 0600",
                    got=f"mode {stat.S_IMODE(found.st_mode):04o}",
                    remedy=f"chmod 600 {path}; a secret that others have read needs a new key",
                )
            return file.read().decode()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: no key file", expected="UTF-8") from None


def _check_writers(path: Path, found: os.stat_result) -> None:
    """Raises ConfigError unless only this user and root may change a file, or swap the files of a
    folder. A folder with the sticky bit protects the files of each user from the others."""
    mode = found.st_mode
    user = os.geteuid()
    if found.st_uid not in (user, 0):
        raise ConfigError(
            f"{path}: others may admit keys",
            expected=f"a file or folder of user {user} or root",
            got=f"user {found.st_uid}",
            remedy=f"chown {user} {path}; or type the command as the user of the broker",
        )
    is_sticky = stat.S_ISDIR(mode) and mode & stat.S_ISVTX
    if mode & (stat.S_IWGRP | stat.S_IWOTH) and not is_sticky:
        raise ConfigError(
            f"{path}: others may admit keys",
            expected="write permission for its owner alone",
            got=f"mode {stat.S_IMODE(mode):04o}",
            remedy=f"chmod go-w {path}",
        )


def _parsed(text: str, type_: type[T], path: Path) -> T:
    try:
        return msgspec.convert(tomllib.loads(text), type_)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}", remedy="a name with dots needs quotes") from None
    except (ValueError, RecursionError) as error:
        # The parser's own words may quote a line, which may hold a secret.
        line = re.search("line [0-9]+", str(error))
        where = line[0] if line else "at its end"
        raise ConfigError(f"{path}, {where}", expected='TOML: name = "key"') from None
