"""TOML files and flags into typed structs, checked key by key; and addresses as users write them.

A msgspec struct declares a configuration. Each of its fields is a section, itself a struct, which
holds the types, bounds and defaults; the docstrings under its fields are the help. A file has one
table per section; a flag is a dotted key (`wan.up`).
"""

from __future__ import annotations

import ast
import difflib
import inspect
import ipaddress
import math
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from narrows.proto.errors import ConfigError
from narrows.proto.units import Quantity

AnyStruct = TypeVar("AnyStruct", bound=msgspec.Struct)

_ADDRESS: Final = re.compile(
    r"tcp://(\*|\[[^\[\]]+\]|[A-Za-z0-9_][A-Za-z0-9._-]{0,253}):([0-9]{1,5})"
)


class Setting(NamedTuple):
    """One key of a configuration."""

    type: Any
    """Type with its bounds, as the struct declares it."""
    default: object
    doc: str


def load(
    type_: type[AnyStruct],
    path: Path | None,
    flags: Mapping[str, object],
    preset: Mapping[str, object] | None = None,
) -> AnyStruct:
    """Defaults, then the preset, then the file, then the flags; later ones win.

    `flags` maps dotted keys to values, or to texts such as a command line holds ("true", "2").
    Raises ConfigError, which names the file or the flag, the key, what was expected and what came.
    """
    known = _settings(type_)
    values = dict(preset or {})
    for key, value in _rows(path, known):
        values[key] = _checked(known, key, value, str(path), is_text=False)
    for key, value in flags.items():
        # A text of the command line may stand for a number or for true and false.
        values[key] = _checked(known, key, value, "command line", is_text=isinstance(value, str))

    def fields(section: str) -> dict[str, object]:
        start = f"{section}."
        return {k.removeprefix(start): v for k, v in values.items() if k.startswith(start)}

    return type_(**{name: struct(**fields(name)) for name, struct in get_type_hints(type_).items()})


def given_keys(type_: type[msgspec.Struct], path: Path | None) -> set[str]:
    """The dotted keys that a file names, also where it names the default."""
    return {key for key, _ in _rows(path, _settings(type_))}


def describe(type_: type[msgspec.Struct]) -> Iterator[tuple[str, str, str]]:
    """(dotted key, default, docstring) of every setting, for `--help`."""
    for key, (_, default, doc) in _settings(type_).items():
        text = default.text() if isinstance(default, Quantity) else str(default) or '""'
        yield key, text.lower() if isinstance(default, bool) else text, doc


def nearest(name: str, names: Iterable[str]) -> str:
    """A remedy that names the most similar of `names`; "" if nothing is similar.

    The last word of a dotted key counts too: `quorum` finds `merge.quorum`.
    """
    ends = {known.rpartition(".")[2]: known for known in names}
    found = difflib.get_close_matches(name, names, n=1, cutoff=0.75)
    found += [ends[end] for end in difflib.get_close_matches(name.rpartition(".")[2], ends, n=1)]
    return f"did you mean {found[0]}?" if found else ""


_KINDS: Final = {"int": "a whole number", "float": "a number", "bool": "true or false"}
"""Words for the types that the decoder names."""


class Address(NamedTuple):
    """A host and a TCP port."""

    host: str
    """Name or number; an IPv6 address stands in brackets, as ZeroMQ wants it."""
    port: int

    @property
    def is_loopback(self) -> bool:
        """True if only this machine can reach it: there a broker needs no keys."""
        with suppress(ValueError):
            return ipaddress.ip_address(self.host.strip("[]")).is_loopback
        # A name may be anywhere; a look-up would make the answer depend on the network.
        return self.host == "localhost"

    @property
    def listens_on_ipv6(self) -> bool:
        """Whether a socket that is bound here needs IPv6. `*` means all interfaces of both kinds;
        libzmq takes IPv4 alone where the kernel has no IPv6."""
        return self.host == "*" or self.host.startswith("[")

    def __str__(self) -> str:
        return f"tcp://{self.host}:{self.port}"


def parse_address(text: str, *, listen: bool = False) -> Address:
    """tcp://HOST:PORT. To `listen`, `*` means all interfaces and port 0 any free one.

    Raises ConfigError for anything else.
    """
    match = _ADDRESS.fullmatch(text)
    address = Address(match[1], int(match[2])) if match else Address("", -1)
    valid = 0 <= address.port <= 65535 and (listen or (address.host != "*" and address.port > 0))
    if address.host.startswith("["):
        try:
            ipaddress.IPv6Address(address.host[1:-1])
        except ValueError:
            valid = False
    if valid:
        return address
    if listen:
        raise ConfigError("address to listen on", expected="tcp://HOST:PORT", got=repr(text[:300]))
    raise ConfigError(
        "the broker's address",
        expected="tcp://HOST:PORT",
        got=repr(text[:300]),
        remedy="`narrows broker` prints the address when it starts",
    )


def _rows(path: Path | None, known: Mapping[str, Setting]) -> Iterator[tuple[str, object]]:
    """Dotted keys and values of a file, if there is one. An entry outside of every section comes
    as it is, and is refused as an unknown key."""
    if path is None:
        return
    try:
        sections = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read", got=error.strerror or str(error)) from error
    except (ValueError, RecursionError) as error:
        # tomllib raises ValueError also for numbers of thousands of digits.
        raise ConfigError(f"{path}: not a TOML file", got=str(error)[:200]) from error
    for section, table in sections.items():
        if isinstance(table, dict) and (table or _is_section(section, known)):
            yield from ((f"{section}.{name}", value) for name, value in table.items())
        else:
            yield section, table


def _is_section(name: str, known: Mapping[str, Setting]) -> bool:
    return any(key.startswith(name + ".") for key in known)


def _checked(
    known: Mapping[str, Setting], key: str, value: object, source: str, *, is_text: bool
) -> object:
    """The value as the struct holds it. Raises ConfigError, which names the source first."""
    place = f"{source}: {key}: "
    got = repr(value)[:64]
    if key not in known:
        if _is_section(key, known):
            raise ConfigError(f"{place}wrong value", expected="a table", got=got)
        raise ConfigError(f"{place}unknown key", remedy=nearest(key, known))
    type_ = known[key].type
    if isinstance(type_, type) and issubclass(type_, Quantity):
        return type_.parse(value, place)
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{place}wrong value", expected="a finite number", got=got)
    try:
        return msgspec.convert(value, type_, strict=not is_text)
    except msgspec.ValidationError as error:
        names = [str(each) for each in getattr(type_, "__members__", {}).values()]
        names += get_args(type_) if get_origin(type_) is Literal else ()
        expected = str(error).partition(", got")[0].removeprefix("Expected ").replace("`", "")
        for kind, words in _KINDS.items():
            expected = re.sub(rf"\b{kind}\b", words, expected)
        if names:
            expected = f"one of {', '.join(names)}"
        raise ConfigError(
            f"{place}wrong value", expected=expected, got=got, remedy=nearest(str(value), names)
        ) from error


def check_output(path: Path, flag: str) -> None:
    """Raises ConfigError unless `path` can become a file or a folder: its parent must exist, and
    `path` must not be a folder yet. `flag` gave it."""
    if path.is_dir():
        raise ConfigError(f"{flag} {path}", expected="a new name or a file", got="a folder")
    if not path.absolute().parent.is_dir():
        raise ConfigError(
            f"{flag} {path}",
            expected="a name in a folder that exists",
            remedy=f"make the folder first: mkdir -p {path.parent}",
        )


@cache
def _settings(type_: type[msgspec.Struct]) -> Mapping[str, Setting]:
    """Every dotted key of a struct of sections, in the order of declaration."""
    found: dict[str, Setting] = {}
    for section, struct in get_type_hints(type_).items():
        hints = get_type_hints(struct, include_extras=True)
        # The docstring under a field is read from the source: Python does not keep it.
        body = ast.parse(inspect.getsource(struct)).body[0]
        assert isinstance(body, ast.ClassDef), struct
        for field, node in pairwise([*body.body, ast.Pass()]):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                assert isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant), field
                name = field.target.id
                doc = inspect.cleandoc(str(node.value.value))
                found[f"{section}.{name}"] = Setting(hints[name], getattr(struct(), name), doc)
    return found
