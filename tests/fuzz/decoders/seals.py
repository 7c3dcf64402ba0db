"""A sealed state directory under seal files that somebody has made, and files of seal keys.

The first byte of an input chooses the file that the rest replaces: 0 the key's, 1 the seal file at
the top, 2 that of a checkpoint. From 4 on a seal file gets a seal that fits, which nobody without
the key can make.
"""

from __future__ import annotations

import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from random import Random

import msgspec
from any_messages import any_of, mutated
from fuzz.target import Target
from fuzz.tree import altered_json
from hypothesis import strategies as st

from narrows.broker.storage.history import opened_run, seal_run
from narrows.broker.storage.seal import SealKey, read_seal_key
from narrows.broker.storage.sealed import SealFile
from narrows.proto.errors import ConfigError, NarrowsError

GOLDEN = Path(__file__).parents[2] / "golden/state-format-1"
SECRET = bytes(range(32)).hex()
KEY = SealKey(bytes.fromhex(SECRET))
FITTING = 4
FILES = "seal.key", "state/seal.json", "state/checkpoint-00000002/seal.json"
_folder = tempfile.TemporaryDirectory(prefix="narrows-fuzz-")
FOLDER = Path(_folder.name)
STATE = FOLDER / "state"


def run(data: bytes) -> None:
    if not data:
        return
    kind, content = data[0] % FITTING % len(FILES), data[1:]
    if kind == 0:
        key_file(content)
        return
    if data[0] >= FITTING:
        content = with_fitting_seal(content)
    fresh()
    (FOLDER / FILES[kind]).write_bytes(content)
    try:
        with opened_run(STATE, KEY) as (state_dir, journal):
            assert journal is not None and journal.newest > 0
            assert state_dir.load() is not None
            list(journal.records(journal.first))
    except NarrowsError:
        return
    # Nobody makes a seal that fits: without one only what was written is taken.
    assert data[0] >= FITTING or decoded(content) == decoded(_stored[FILES[kind]])


def key_file(content: bytes) -> None:
    """No file but one with the digits of a key is one, and no error quotes them."""
    path = FOLDER / FILES[0]
    path.write_bytes(content)
    path.chmod(0o600)
    try:
        found = read_seal_key(path, STATE)
    except ConfigError as error:
        assert SECRET not in str(error)
        return
    digits = content.decode("ascii").strip()
    assert found == SealKey(bytes.fromhex(digits)) and digits not in repr(found)


def fresh() -> None:
    """Puts the seal files of the stored state back."""
    for name, content in _stored.items():
        (FOLDER / name).write_bytes(content)


def decoded(content: bytes) -> SealFile:
    return msgspec.json.decode(content, type=SealFile)


def with_fitting_seal(content: bytes) -> bytes:
    """The same seal file with a seal of the key, if it is a seal file at all."""
    with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        empty = msgspec.structs.replace(decoded(content), seal="")
        seal = KEY.seal("seals", [msgspec.json.encode(empty)]).hex()
        return msgspec.json.encode(msgspec.structs.replace(empty, seal=seal))
    return content


def _sealed_state() -> dict[str, bytes]:
    shutil.copytree(GOLDEN, STATE)
    seal_run(STATE, KEY)
    return {name: (FOLDER / name).read_bytes() for name in FILES[1:]}


_stored = _sealed_state()


def seeds() -> list[bytes]:
    keys = [f"{SECRET}\n".encode(), SECRET.encode(), SECRET.upper().encode(), b""]
    seals = [bytes((kind,)) + _stored[FILES[kind]] for kind in (1, 2)]
    return [*(b"\0" + key for key in keys), *seals, *(bytes((s[0] + 4,)) + s[1:] for s in seals)]


def mutate(data: bytes, random: Random) -> bytes | None:
    changed = altered_json(data[1:], random) if data and data[0] % FITTING else None
    return None if changed is None else data[:1] + changed


EXAMPLES = st.one_of(
    mutated(st.sampled_from(seeds())),
    any_of(SealFile).map(lambda each: b"\5" + msgspec.json.encode(each)),
    any_of(SealFile).map(lambda each: b"\6" + msgspec.json.encode(each)),
)

TARGET = Target("seals", run, seeds, EXAMPLES, mutate)
