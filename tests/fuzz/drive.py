"""Fuzzes one decoder with atheris: `drive.py TARGET CORPUS_FOLDERS... [libFuzzer flags]`.

`run.py` starts it, one process per decoder, with atheris on its path.
"""

from __future__ import annotations

import importlib
import os
import resource
import sys
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fuzz.corpus import name_of

COMPILED = ("proto.codec.kernels", "broker.merging.merge", "broker.merging.outer")
"""Modules with loops that numba compiles; it cannot compile instrumented ones."""

AGAIN = "NARROWS_FUZZ_AGAIN"
"""Variable with a program that does the same as this one: libFuzzer starts it to merge a corpus."""

MEMORY_BYTES = 1 << 30
"""Memory beyond that after the start which a decoder may ask for."""

STRUCTURED = 0.5
"""Share of the mutations that keep the structure, where the decoder has such."""


def main() -> None:
    name, *arguments = sys.argv[1:]
    atheris: Any = importlib.import_module("atheris")
    excluded = [f"narrows.{module}" for module in COMPILED]
    with atheris.instrument_imports(include=["narrows", "tomllib"], exclude=excluded):
        target = importlib.import_module(f"fuzz.decoders.{name}").TARGET
    for seed in target.seeds():
        target.run(seed)
    limit_memory()

    def mutator(data: bytes, bytes_max: int, seed: int) -> bytes:
        random = Random(seed)
        if target.mutate is not None and random.random() < STRUCTURED:
            changed = target.mutate(data, random)
            if changed is not None and len(changed) <= bytes_max:
                return bytes(changed)
        return bytes(atheris.Mutate(data, bytes_max))

    def run(data: bytes) -> None:
        try:
            target.run(data)
        except BaseException:
            # libFuzzer writes the input too, but not always: the interpreter may end before.
            keep(data)
            raise

    flags = [os.environ.get(AGAIN, sys.argv[0]), f"-max_len={target.bytes_max}", *arguments]
    atheris.Setup(flags, run, custom_mutator=mutator)
    atheris.Fuzz()


def keep(data: bytes) -> None:
    """Writes an input to where libFuzzer would."""
    prefix = next(each for each in sys.argv if each.startswith("-artifact_prefix="))
    Path(prefix.partition("=")[2], f"crash-{name_of(data)}").write_bytes(data)


def limit_memory() -> None:
    """Makes an allocation without measure a MemoryError, which no decoder may raise."""
    used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    limit = used + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


if __name__ == "__main__":
    main()
