"""The manifest of a checkpoint: the longest one is read back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
from checkpoint_cases import newest, prepared, snapshot

from narrows.broker.merging import PushEvidence, Watch
from narrows.broker.storage import manifest
from narrows.broker.storage.checkpoint import StateDir
from narrows.broker.storage.fragment_file import ARRAYS, NORMS, FragmentEntry, RoundEntry
from narrows.broker.storage.manifest import MergedPush
from narrows.proto.limits import (
    ELEMENTS_MAX,
    FRAGMENTS_MAX,
    LAYOUT_PART_BYTES_MAX,
    LAYOUT_PARTS_MAX,
    NAME_CHARACTERS_MAX,
    TENSORS_MAX,
    TOKENS_MAX,
    VERSION_MAX,
)
from narrows.proto.messages import LayoutEntry


def test_no_manifest_is_longer_than_what_is_read() -> None:
    """The longest value of each part that a manifest has often, with the comma behind it."""
    name, process, most = "n" * NAME_CHARACTERS_MAX, "f" * 32, VERSION_MAX

    def bytes_of(value: object) -> int:
        return len(msgspec.json.encode(value)) + 1

    push = MergedPush(name, process, FRAGMENTS_MAX, most, TOKENS_MAX)
    assert bytes_of(push) <= manifest.PUSH_BYTES_MAX
    assert bytes_of(RoundEntry(most, ((name, process),))) <= manifest.ROW_BYTES_MAX
    digests: dict[str, str] = {each: "f" * 16 for each in (*ARRAYS, NORMS)}
    fragment = FragmentEntry(most, ELEMENTS_MAX, digests, TENSORS_MAX)
    assert bytes_of(fragment) + len('"history":[],') <= manifest.FRAGMENT_BYTES_MAX
    evidence = [PushEvidence(each, True, -0.12345678901234567) for each in (name, "o" * 64, "p")]
    watch = Watch()
    for _ in range(50):
        watch = watch.after(evidence)
    assert bytes_of(watch.names[0]) <= manifest.WATCHED_BYTES_MAX
    assert bytes_of(watch.cosines) < 1 << 16
    entry = LayoutEntry("\0" * 512, (ELEMENTS_MAX,) * 8, "float32", "mean")
    in_a_part = len(msgspec.msgpack.encode(entry))
    assert bytes_of(entry) * LAYOUT_PART_BYTES_MAX < (
        in_a_part * manifest.LAYOUT_BYTES_MAX // LAYOUT_PARTS_MAX
    )


def test_a_manifest_of_many_learners_and_fragments_is_read_back(tmp_path: Path) -> None:
    pushes = tuple(
        MergedPush("n" * 60 + f"{i % 1000:04d}", "f" * 32, i // 1000, 1, 1) for i in range(450_000)
    )
    content = replace(snapshot(2), merged_pushes=pushes)
    with StateDir.open(prepared(tmp_path)) as state:
        state.save(content)
        found = state.load()
    assert found is not None and found.merged_pushes == pushes
    assert (newest(tmp_path) / "manifest.json").stat().st_size > 64 << 20
