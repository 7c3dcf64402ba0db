"""Every decoder on every input that is kept, and on some hundred made-up ones, without a fuzzer."""

from __future__ import annotations

import subprocess
import sys

import pytest
from fuzz.corpus import CORPUS, NAMES, examples, kept, load

CORPUS_BYTES_MAX = 1_000_000


@pytest.mark.parametrize("name", NAMES)
def test_inputs_that_are_kept(name: str) -> None:
    target = load(name)
    for seed in target.seeds():
        target.run(seed)
    for path in kept(name):
        target.run(path.read_bytes())


@pytest.mark.parametrize("name", NAMES)
def test_inputs_that_are_nearly_right(name: str) -> None:
    target = load(name)
    found = examples(name, 100)
    assert len(found) > 30
    for data in found:
        target.run(data)


def test_the_corpus_is_small_and_belongs_to_decoders() -> None:
    files = [path for path in CORPUS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < CORPUS_BYTES_MAX
    assert {path.parent.name for path in files} <= set(NAMES)


@pytest.mark.parametrize("code", ["view = guard.end(9)", "guard.holding(b'x' * 9)[8]"])
def test_guarded_memory_is_usable_up_to_its_end(code: str) -> None:
    assert _exit_code(code) == 0


@pytest.mark.parametrize("place", [0, 4095])
def test_a_byte_behind_guarded_memory_ends_the_process(place: int) -> None:
    code = f"import ctypes; ctypes.string_at(guard.address + guard.size_bytes + {place}, 1)"
    assert _exit_code(code) < 0


def _exit_code(code: str) -> int:
    start = f"import sys; sys.path.insert(0, {str(CORPUS.parents[1])!r})\n"
    made = "from fuzz.guarded import Guarded; guard = Guarded(9)\n"
    return subprocess.run([sys.executable, "-c", start + made + code], check=False).returncode
