"""TOML files and flags into typed structs, checked key by key; and addresses as users write them.

The msgspec struct is the truth: it holds types, bounds and defaults, and the docstrings under its
fields are the help. A file has one table per section; a flag is a dotted key (`wan.up`).
"""

from __future__ import annotations

import ast
import difflib
import inspect
import ipaddress
import math
import re
import tomllib
from collections.abc import Iterator, Mapping
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

    key: str
    """Dotted: `wan.up`."""
    type: Any
    """Type with its bounds, as the struct declares it."""
    default: object
    section: type[msgspec.Struct]
    """The struct that declares it."""


def load(
    type_: type[AnyStruct],
    path: Path | None,
    flags: Mapping[str, object],
    presets: Mapping[str, Mapping[Any, Mapping[str, object]]] | None = None,
) -> AnyStruct:
    """Defaults, then presets, then the file, then the flags; later ones win.

    `flags` maps dotted keys to values, or to texts such as a command line holds ("true", "2").
    `presets` maps a key and its value to settings that this value changes. Raises ConfigError,
    which names the file or the flag, the key, what was expected and what came.
    """
    known = {setting.key: setting for setting in settings(type_)}
    given: dict[str, object] = {}
    if path is not None:
        for key, value in _flatten(_read(path), known, ""):
            given[key] = _checked(f"{path}: {key}", known, key, value, is_text=False)
    for key, value in flags.items():
        given[key] = _checked(
            f"command line: {key}", known, key, value, is_text=isinstance(value, str)
        )
    values: dict[str, object] = {}
    for key, by_value in (presets or {}).items():
        preset = by_value[str(given.get(key, known[key].default))]
        values |= {k: _checked("preset", known, k, v, is_text=False) for k, v in preset.items()}
    return _built(type_, values | given, "")


def given_keys(type_: type[msgspec.Struct], path: Path | None) -> set[str]:
    """The dotted keys that a file names, also where it names the default."""
    known = {setting.key: setting for setting in settings(type_)}
    return {key for key, _ in _flatten(_read(path), known, "")} if path else set()


def settings(type_: type[msgspec.Struct], prefix: str = "") -> Iterator[Setting]:
    """Every key of a struct and of the sections in it, in the order of declaration."""
    hints, defaults = get_type_hints(type_, include_extras=True), type_()
    for name in type_.__struct_fields__:
        if _is_section(hints[name]):
            yield from settings(hints[name], f"{prefix}{name}.")
        else:
            yield Setting(prefix + name, hints[name], getattr(defaults, name), type_)


def describe(type_: type[msgspec.Struct]) -> Iterator[tuple[str, str, str]]:
    """(dotted key, default, docstring) of every setting, for `--help`."""
    for key, _, default, section in settings(type_):
        text = default.text() if isinstance(default, Quantity) else str(default) or '""'
        shown = text.lower() if isinstance(default, bool) else text
        yield key, shown, _field_docs(section)[key.rpartition(".")[2]]


def nearest(name: str, names: list[str]) -> str:
    """A remedy that names the most similar of `names`; "" if nothing is similar.

    The last word of a dotted key counts too: `quorum` finds `merge.quorum`.
    """
    ends = {known.rpartition(".")[2]: known for known in names}
    found = difflib.get_close_matches(name, names, n=1, cutoff=0.75)
    found += [ends[end] for end in difflib.get_close_matches(name.rpartition(".")[2], ends, n=1)]
    return f"did you mean {found[0]}?" if found else ""


KINDS: Final = {"int": "a whole number", "float": "a number", "bool": "true or false"}
"""Words for the types that the decoder names."""


class Address(NamedTuple):
    """A host and a TCP port."""

    host: str
    """Name or number; an IPv6 address stands in brackets, as ZeroMQ wants it."""
    port: int

    @property
    def is_loopback(self) -> bool:
        """True if only this machine can reach it: there a broker needs no keys."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host.strip("[]")).is_loopback
        except ValueError:
            # A name may be anywhere; a look-up would make the answer depend on the network.
            return False

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
    if not valid:
        raise ConfigError(
            "address to listen on" if listen else "the broker's address",
            expected="tcp://HOST:PORT",
            got=repr(text[:300]),
            remedy="" if listen else "`narrows broker` prints the address when it starts",
        )
    return address


def _read(path: Path) -> dict[str, object]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read", got=error.strerror or str(error)) from error
    except (ValueError, RecursionError) as error:
        # tomllib raises ValueError also for numbers of thousands of digits.
        raise ConfigError(f"{path}: not a TOML file", got=str(error)[:200]) from error


def _flatten(
    table: Mapping[str, object], known: Mapping[str, Setting], prefix: str
) -> Iterator[tuple[str, object]]:
    """Dotted keys and values of nested tables."""
    for name, value in table.items():
        key = prefix + name
        # An unknown table is opened too, so that the error can name the nearest key.
        if isinstance(value, dict) and key not in known and (value or _is_table(key, known)):
            yield from _flatten(value, known, key + ".")
        else:
            yield key, value


def _is_table(key: str, known: Mapping[str, Setting]) -> bool:
    return any(each.startswith(key + ".") for each in known)


def _checked(
    where: str, known: Mapping[str, Setting], key: str, value: object, *, is_text: bool
) -> object:
    """The value as the struct holds it. Raises ConfigError that begins with `where`."""
    if key not in known:
        if _is_table(key, known):
            raise ConfigError(f"{where}: wrong value", expected="a table", got=repr(value)[:64])
        raise ConfigError(f"{where}: unknown key", remedy=nearest(key, list(known)))
    type_, got = known[key].type, repr(value)[:64]
    if isinstance(type_, type) and issubclass(type_, Quantity):
        try:
            return type_.parse(value)
        except ConfigError as error:
            message = f"{where}: {error.message}"
            raise ConfigError(
                message, expected=error.expected, got=got, remedy=error.remedy
            ) from error
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{where}: wrong value", expected="a finite number", got=got)
    try:
        # A text of the command line may stand for a number or for true and false.
        return msgspec.convert(value, type_, strict=not is_text)
    except msgspec.ValidationError as error:
        choices = list(getattr(type_, "__members__", {}).values()) or list(
            get_args(type_) if get_origin(type_) is Literal else ()
        )
        names = [str(each) for each in choices]
        bound = str(error).partition(", got")[0].removeprefix("Expected ").replace("`", "")
        for kind, words in KINDS.items():
            bound = re.sub(rf"\b{kind}\b", words, bound)
        expected = f"one of {', '.join(names)}" if names else bound
        remedy = nearest(str(value), names)
        raise ConfigError(
            f"{where}: wrong value", expected=expected, got=got, remedy=remedy
        ) from error


def _built(type_: type[AnyStruct], values: Mapping[str, object], prefix: str) -> AnyStruct:
    hints, fields = get_type_hints(type_), dict[str, object]()
    for name in type_.__struct_fields__:
        if _is_section(hints[name]):
            fields[name] = _built(hints[name], values, f"{prefix}{name}.")
        elif prefix + name in values:
            fields[name] = values[prefix + name]
    return type_(**fields)


def _is_section(hint: object) -> bool:
    return isinstance(hint, type) and issubclass(hint, msgspec.Struct)


@cache
def _field_docs(type_: type[msgspec.Struct]) -> dict[str, str]:
    """Field -> the docstring under it, or "". Read from the source: Python does not keep them."""
    body = ast.parse(inspect.getsource(type_)).body[0]
    assert isinstance(body, ast.ClassDef), type_
    docs = dict.fromkeys(type_.__struct_fields__, "")
    for field, node in pairwise(body.body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                docs[field.target.id] = inspect.cleandoc(str(node.value.value))
    return docs
