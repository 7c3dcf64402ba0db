"""Snapshots, prepared state directories and failing system calls for tests of checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from narrows.broker.merging.evidence import PushEvidence
from narrows.broker.merging.history import NormHistory
from narrows.broker.merging.model import FragmentState
from narrows.broker.merging.watch import Watch
from narrows.broker.storage.checkpoint import CheckpointContent, StateDir, StateError
from narrows.proto.codec import F32
from narrows.proto.errors import ConfigError
from narrows.proto.fragments import build_table
from narrows.proto.frames import digest
from narrows.proto.messages import LayoutEntry, Phase

LAYOUT = (
    LayoutEntry("table", (6, 5), "float32", "mean"),
    LayoutEntry("hidden", (5, 3), "float32", "rda"),
    LayoutEntry("bias", (), "float32", "mean"),
)
RUN = "0123456789abcdef"


def fragment_state(version: int, values: F32, pieces: int) -> FragmentState:
    published = values + np.float32(version)
    return FragmentState(
        version, digest(published.data.cast("B")), values, values * np.float32(0.5), published,
        history_of(version, pieces),
    )  # fmt: skip


def history_of(version: int, pieces: int) -> NormHistory:
    """A history whose every norm tells its version, its row and its piece; none at version 0."""
    history = NormHistory()
    for each in range(max(1, version - 3), version + 1):
        processes = [(f"l{i}", f"{i:032x}") for i in range(1 + each % 3)]
        norms = np.arange(len(processes) * pieces, dtype=np.float32).reshape(-1, pieces)
        history = history.after(each, processes, norms + np.float32(100 * each))
    return history


def snapshot(
    version: int, *, layout: tuple[LayoutEntry, ...] = LAYOUT, fragment_count: int = 2
) -> CheckpointContent:
    """A snapshot whose every array tells its version."""
    rng = np.random.default_rng(version)
    return CheckpointContent(
        run_id=RUN,
        epoch=(1, 1),
        layout=layout,
        frozen_digest=2**64 - 1 - version,
        fragment_count=fragment_count,
        run_tokens=1000 * version,
        phase=Phase.RUNNING,
        fragments=tuple(
            fragment_state(
                version + part.index,
                rng.normal(size=part.elements).astype(np.float32),
                len(part.pieces),
            )
            for part in build_table(layout, fragment_count)
        ),
        token_parts=version % fragment_count,
        watch=Watch().after([PushEvidence("l0", version % 2 == 0, version / 7)]),
    )


def same(one: CheckpointContent | None, other: CheckpointContent) -> bool:
    """Equality of everything, arrays bit by bit."""

    def content(each: CheckpointContent) -> list[object]:
        rest = [each.run_id, each.epoch, each.layout, each.frozen_digest, each.fragment_count]
        arrays = [
            (part.version, part.digest, *map(bytes, (part.global_, part.momentum, part.published)))
            for part in each.fragments
        ]
        norms = [
            [(entry.version, entry.processes, bytes(entry.norms)) for entry in part.history.rounds]
            for part in each.fragments
        ]
        return [*rest, each.run_tokens, each.token_parts, each.phase, arrays, norms, each.watch]

    return one is not None and content(one) == content(other)


def prepared(path: Path, *versions: int) -> Path:
    """A state directory with one epoch and these checkpoints."""
    with StateDir.open(path) as state:
        state.begin_epoch(RUN, "config")
        for version in versions:
            state.save(snapshot(version))
    return path


def loaded(path: Path) -> tuple[CheckpointContent | None, list[str]]:
    with StateDir.open(path) as state:
        return state.load(), state.warnings


def generations(path: Path) -> list[str]:
    return sorted(each.name for each in path.glob("checkpoint-*"))


def newest(path: Path) -> Path:
    return path / generations(path)[-1]


# Failures of the system.


class Killed(BaseException):
    """The process is gone: no handler may see it and tidy up."""


CALLS = ("fsync", "rename", "write", "open", "mkdir", "close", "readv")
REAL = {name: getattr(os, name) for name in CALLS}


def failing(
    call: str, at: int, error: BaseException, patch: pytest.MonkeyPatch
) -> Callable[[], bool]:
    """Makes the `at`-th call of os.`call` raise, before it has done anything."""
    real, count = getattr(os, call), 0

    def fake(*arguments: object, **named: object) -> object:
        nonlocal count
        count += 1
        if count == at + 1:
            if call == "close":
                real(*arguments, **named)
            raise error
        return real(*arguments, **named)

    patch.setattr(os, call, fake)
    return lambda: count > at


def each_failure(work: Callable[[], None], call: str, error: BaseException) -> int:
    """Runs `work` again and again, failing one call later every time, until none fails."""
    for at in range(1000):
        with pytest.MonkeyPatch.context() as patch:
            happened = failing(call, at, error, patch)
            try:
                work()
            except (OSError, StateError, ConfigError, Killed):
                assert happened()
        if not happened():
            return at
    raise AssertionError("there is no end to it")
