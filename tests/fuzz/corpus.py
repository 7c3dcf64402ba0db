"""The decoders under fuzz by name, and the inputs that are kept for each."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Iterator
from pathlib import Path

from fuzz.target import Target
from hypothesis import HealthCheck, Phase, given, settings

SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)
CORPUS = Path(__file__).with_name("corpus")
NAMES = tuple(sorted(path.stem for path in Path(__file__).with_name("decoders").glob("*.py")))


def load(name: str) -> Target:
    """The decoder of that name."""
    target: Target = importlib.import_module(f"fuzz.decoders.{name}").TARGET
    assert target.name == name, f"{target.name} in {name}.py"
    return target


def kept(name: str) -> Iterator[Path]:
    """The files of a decoder's corpus. `crash-` begins those that once failed."""
    folder = CORPUS / name
    return iter(sorted(folder.iterdir()) if folder.is_dir() else [])


def name_of(data: bytes) -> str:
    """A file name that tells one input from another."""
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()[:16]


def examples(name: str, count: int) -> list[bytes]:
    """Inputs of the decoder's structure; the same ones each time."""
    found: list[bytes] = []

    @settings(
        max_examples=count, deadline=None, database=None, derandomize=True,
        phases=[Phase.generate], suppress_health_check=SLOW,
    )  # fmt: skip
    @given(load(name).examples)
    def collect(data: bytes) -> None:
        found.append(data)

    collect()
    return found
