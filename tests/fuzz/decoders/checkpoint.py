"""A state directory without its journal: run.json, manifest and fragments, opened as at a start.

The first byte of an input chooses the file that the rest replaces. With 4 in it, the file's digest
is made to fit first, as somebody who changes a file on purpose would do. With 8 in it, the state is
one of format 2, whose fragments have norms.
"""

from __future__ import annotations

import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import msgspec
from any_messages import any_of
from checkpoint_cases import prepared
from fuzz.target import Target
from fuzz.tree import altered_json
from hypothesis import strategies as st

from narrows.broker.storage.checkpoint import StateDir
from narrows.broker.storage.history import config_of, model_digest, opened_run, read_manifest
from narrows.broker.storage.manifest import Manifest, RunRecord, Sealed, sealed
from narrows.broker.storage.replay import recover
from narrows.proto.errors import NarrowsError
from narrows.proto.frames import digest

STATE = Path(__file__).parents[2] / "golden/state-format-1"
NEWEST = "checkpoint-00000002"
FILES = "run.json", f"{NEWEST}/manifest.json", f"{NEWEST}/fragment-00000.safetensors"
SEALED, WITH_NORMS = 4, 8
_folder = tempfile.TemporaryDirectory(prefix="narrows-fuzz-")
FOLDERS = Path(_folder.name, "format-1"), Path(_folder.name, "format-2")


def run(data: bytes) -> None:
    if not data:
        return
    kind, content = data[0] % SEALED % len(FILES), data[1:]
    if data[0] & SEALED and kind < 2:
        content = resealed(content, RunRecord) if kind == 0 else resealed(content, Manifest)
    base = int(bool(data[0] & WITH_NORMS))
    folder = FOLDERS[base]
    for name in FILES:
        (folder / name).write_bytes(_stored[base][name])
    (folder / FILES[kind]).write_bytes(content)
    started(folder)
    with suppress(NarrowsError):
        read_manifest(folder)


def _states() -> list[dict[str, bytes]]:
    """Makes a state of each format, with one checkpoint and one run.json; its files."""
    shutil.copytree(STATE, FOLDERS[0])
    prepared(FOLDERS[1], 1, 3)
    for folder in FOLDERS:
        shutil.rmtree(folder / "journal", ignore_errors=True)
        shutil.rmtree(folder / "checkpoint-00000001")
        (folder / "run.copy.json").unlink()
    return [{name: (folder / name).read_bytes() for name in FILES} for folder in FOLDERS]


def started(folder: Path) -> None:
    """Does with it what a start of the broker does, and the commands that only read."""
    try:
        with opened_run(folder) as (state_dir, journal):
            assert journal is None
            loaded(state_dir)
    except NarrowsError:
        return


def loaded(state_dir: StateDir) -> None:
    snapshot = state_dir.load()
    assert snapshot is not None and state_dir.journal_needed_from() >= 1
    history = recover(config_of(snapshot), snapshot, None)
    assert len(model_digest(history.model)) == 32


def resealed(content: bytes, kind: type[Sealed]) -> bytes:
    """The same JSON with a digest that fits, if it is JSON at all."""
    with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return msgspec.json.encode(sealed(msgspec.json.decode(content, type=kind)))
    with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError):
        fields = msgspec.json.decode(content, type=dict[str, Any])
        seal = digest(msgspec.json.encode(fields | {"digest": ""}))
        return msgspec.json.encode(fields | {"digest": f"{seal:016x}"})
    return content


_stored = _states()


def seeds() -> list[bytes]:
    found = list[bytes]()
    for flags, files in zip((0, WITH_NORMS), _stored, strict=True):
        found += [bytes([flags + kind]) + files[name] for kind, name in enumerate(FILES)]
        found += [bytes([flags + SEALED + kind]) + files[FILES[kind]] for kind in range(2)]
    return found


def mutate(data: bytes, random: Random) -> bytes | None:
    changed = altered_json(data[1:], random) if data and data[0] % SEALED < 2 else None
    return None if changed is None else data[:1] + changed


EXAMPLES = st.one_of(
    any_of(RunRecord).map(lambda each: b"\4" + msgspec.json.encode(each)),
    any_of(Manifest).map(lambda each: b"\5" + msgspec.json.encode(each)),
    any_of(Manifest).map(lambda each: b"\x0d" + msgspec.json.encode(each)),
)

TARGET = Target("checkpoint", run, seeds, EXAMPLES, mutate)
