"""A small run on a disk: three tensors in two fragments, and the versions that follow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from merging_cases import push_of, state_of

from narrows.broker.merging import merge
from narrows.broker.records import FragmentState, Policy, Round, Version
from narrows.broker.store import Store
from narrows.proto.layout import build_table
from narrows.proto.messages import CodecName, Layout, LayoutEntry

LAYOUT = Layout(
    0,
    (
        LayoutEntry("embedding", (20, 16), "float32", "mean"),
        LayoutEntry("layer/weight", (24, 16), "bfloat16", "rda"),
        LayoutEntry("scale", (16,), "float16", "mean"),
    ),
)
TABLE = build_table(LAYOUT.entries, 2)
CHUNK = 256


def first_states() -> list[FragmentState]:
    """Version 0 of both fragments."""
    random = np.random.default_rng(0)
    return [
        state_of(each, random.standard_normal(each.elements).astype(np.float32)) for each in TABLE
    ]


def next_version(
    state: FragmentState,
    learners: Sequence[str] = ("site-a", "site-b"),
    *,
    codec: CodecName = "int4-zstd",
    push_id: int = 0,
) -> Version:
    """The version after a state, merged from one push of each learner, of 100 tokens in 10 steps.
    The same arguments give the same bytes."""
    fragment, number = TABLE[state.fragment], push_id or state.version + 1
    pushes = []
    for learner in sorted(learners):
        random = np.random.default_rng([number, state.version, *learner.encode()])
        gradient = 0.01 * random.standard_normal(fragment.elements).astype(np.float32)
        push = push_of(fragment, learner, gradient, codec=codec, chunk_elements=CHUNK)
        pushes.append(replace(push, push_id=number, base=state.version))
    policy = Policy(codec=codec, chunk_elements=CHUNK)
    round_ = Round(state.fragment, state.version + 1, tuple(pushes), policy, 2.5, "everybody")
    return merge(fragment, state, round_)


class Run:
    """A store and the states that it made durable, by fragment and version."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder = folder
        self.store = Store(folder, **options)
        self.states: list[list[FragmentState]] = [[each] for each in first_states()]
        self.store.recover(1.0)
        self.store.seed(LAYOUT, first_states())

    def head(self, fragment: int) -> FragmentState:
        return self.states[fragment][-1]

    def round(self, fragment: int, **options: Any) -> Version:
        """Merges and commits the next round of a fragment."""
        version = next_version(self.head(fragment), **options)
        self.commit(version)
        return version

    def commit(self, version: Version) -> None:
        self.store.commit(version)
        self.states[version.state.fragment].append(version.state)

    def rounds(self, count: int) -> None:
        """That many rounds of each fragment, in turn."""
        for _ in range(count):
            for fragment in range(2):
                self.round(fragment)

    def starts_again(self) -> None:
        """Another start finds the newest versions, bit for bit."""
        self.store.close()
        assert heads(self.folder) == facts([self.head(0), self.head(1)])


def recovered_states(store: Store) -> Iterator[FragmentState]:
    """Begins a life and replays every fragment."""
    for state in store.recover(2.0).states:
        for version in store.replay(TABLE[state.fragment], state):
            state = version.state
        yield state


def heads(folder: Path) -> list[tuple[int, str]]:
    """Version and digests of each fragment after a new start on a state directory."""
    with closing(Store(folder)) as store:
        return facts(list(recovered_states(store)))


def facts(states: Sequence[FragmentState]) -> list[tuple[int, str]]:
    """The same of states in memory."""
    return [(state.version, str(state.digests)) for state in states]
