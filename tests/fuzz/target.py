"""A decoder under fuzz: how it is run, where its inputs begin, what must hold of every input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from hypothesis import strategies as st


@dataclass(frozen=True)
class Target:
    """One decoder. `run` returns for any input; whatever it raises is a finding.

    The errors that a decoder may raise are caught where it is called, and nowhere else: a typed
    error from another place is a finding too.
    """

    name: str
    run: Callable[[bytes], None]
    seeds: Callable[[], Sequence[bytes]]
    """Inputs from the golden files: the corpus that a fuzzer begins with."""
    examples: st.SearchStrategy[bytes]
    """Inputs that are nearly right, with the structure that blind mutation seldom finds."""
    mutate: Callable[[bytes, Random], bytes | None] | None = None
    """A change that keeps the structure, such as another value in a field; None: it has none."""
    bytes_max: int = 4096
    """Longest input that the fuzzer makes."""
