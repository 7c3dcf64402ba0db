"""TOML files of a broker, values of its flags, and the texts with units and addresses in both.

The first byte of an input chooses: 0 a file, 1 a value for one key, from 2 on the parsers.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from fuzz.target import Target
from hypothesis import strategies as st

from narrows.broker.config import BrokerConfig, load_config
from narrows.broker.shared_settings import settings
from narrows.proto import config as settings_of_files
from narrows.proto.address import parse_address, parse_listen
from narrows.proto.config import Section, described, override, read_table
from narrows.proto.errors import ConfigError
from narrows.proto.units import PARSERS, written

KEYS = [key for key, _, _ in described(BrokerConfig)]
KINDS = tuple(PARSERS)
fields_of = settings_of_files._fields
_folder = tempfile.TemporaryDirectory(prefix="narrows-fuzz-")
FILE = Path(_folder.name) / "broker.toml"


def run(data: bytes) -> None:
    kind, rest = data[0] if data else 0, data[1:]
    if kind == 0:
        file(rest)
    elif kind == 1:
        flag(rest)
    else:
        text(kind, rest.decode("utf-8", "surrogateescape"))


def file(content: bytes) -> None:
    FILE.write_bytes(content)
    try:
        config = load_config(FILE, {})
    except ConfigError as error:
        assert str(error)
        return
    check(config)


def flag(content: bytes) -> None:
    """The number of a key, then a value: as TOML, and as a text."""
    key = KEYS[content[0] % len(KEYS)] if content else KEYS[0]
    value = content[1:].decode("utf-8", "replace")
    FILE.write_text(f"x = {value}\n", encoding="utf-8")
    for is_toml in (True, False):
        try:
            given = read_table(FILE).get("x") if is_toml else value
            config = override(BrokerConfig(), {key: given}, source="flags")
        except ConfigError:
            continue
        check(config)


def check(config: BrokerConfig) -> None:
    """An accepted configuration can be used, and be written and read again."""
    assert settings(config).fragment_count == config.fragments.count
    assert override(config, written_again(config)) == config


def written_again(section: Section) -> dict[str, object]:
    """The values of all settings as a file has them."""
    found: dict[str, object] = {}
    for name, (_, notes) in fields_of(type(section)).items():
        value = getattr(section, name)
        unit = next((note for note in notes if isinstance(note, str)), "")
        if isinstance(value, Section):
            found[name] = written_again(value)
        else:
            found[name] = written(unit, value) if unit else value
    return found


def text(kind: int, content: str) -> None:
    """One of the parsers of texts; what it accepts is written as it reads it."""
    if kind % 6 < len(KINDS):
        name = KINDS[kind % 6]
        try:
            value = PARSERS[name](content)
        except ConfigError:
            return
        assert PARSERS[name](written(name, value)) == value
        return
    parse = parse_address if kind % 6 == 4 else parse_listen
    try:
        address = parse(content)
    except ConfigError:
        return
    assert parse(str(address)) == address


FILES = (
    "",
    '[broker]\nlisten = "tcp://127.0.0.1:7070"\nbeat = "1s"\nstate_dir = "runs/b"\n',
    '[run]\nmode = "diloco"\ngoal_tokens = "12e9"\n[fragments]\ncount = 1\n',
    'merge.quorum = 2\nouter.lr = 0.7\n[wan]\nup = "2Gbit/s"\nstreams = 8\n',
    '[liveness]\nlate = "5s"\nlost = "30s"\nforget = "1h"\n[codec]\npush = "auto"\n',
    "a = [1, 1.5, 0x1f, 1979-05-27T07:32:00Z, {b = 'c'}]\n[[d]]\ne = '''f'''\n",
)
TEXTS = ("1.5s", "64MiB", "2Gbit/s", "12e9", "tcp://[::1]:7070", "tcp://*:0", "1e99T")


def seeds() -> list[bytes]:
    values = ("1", "1e3", '"1s"', '"2Gbit/s"', "true", '"auto"', "[1]", "0.5")
    return [
        *(b"\0" + content.encode() for content in FILES),
        *(bytes((1, i)) + values[i % len(values)].encode() for i in range(len(KEYS))),
        *(bytes((2 + i % 6,)) + content.encode() for i in range(6) for content in TEXTS),
    ]


_values = st.one_of(
    st.integers().map(str), st.floats().map(repr), st.text(max_size=12).map(repr),
    st.sampled_from(("true", "[]", "{}", '"1s"', "07:32:00", "1979-05-27", "1" * 400)),
)  # fmt: skip
_lines = st.tuples(st.sampled_from(KEYS), _values).map(" = ".join)
EXAMPLES = st.lists(_lines, max_size=4).map(lambda lines: b"\0" + "\n".join(lines).encode())

TARGET = Target("configuration", run, seeds, EXAMPLES)
