"""Checkpoints, epochs, the lock and the export: what is written is what comes back."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_cases import (
    LAYOUT,
    RUN,
    failing,
    generations,
    loaded,
    prepared,
    same,
    snapshot,
)
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_torch

from narrows.broker.storage.checkpoint import StateDir, StateError
from narrows.broker.storage.export import export_tensors
from narrows.proto.errors import ConfigError, ErrorCode
from narrows.proto.fragments import build_table
from narrows.proto.frames import digest
from narrows.proto.messages import DtypeName, LayoutEntry

# What is written is what comes back.


def test_a_snapshot_comes_back_bit_for_bit(tmp_path: Path) -> None:
    before = snapshot(7)
    before.fragments[0].global_[:3] = np.array([-0.0, np.nan, 1e-45], np.float32)
    with StateDir.open(tmp_path / "deep" / "state") as state:
        state.begin_epoch(RUN, "config")
        assert state.load() is None
        assert state.save(before) == 1
        assert same(state.load(), before) and state.warnings == []
    after, warnings = loaded(tmp_path / "deep" / "state")
    assert same(after, before) and warnings == []
    assert after is not None and after.fragments[0].global_.flags.writeable


def test_fragments_are_safetensors_files_and_the_manifest_is_json(tmp_path: Path) -> None:
    path = prepared(tmp_path, 3)
    tensors = load_file(path / "checkpoint-00000001" / "fragment-00001.safetensors")
    part = snapshot(3).fragments[1]
    assert sorted(tensors) == ["global", "momentum", "norms", "published"]
    assert np.array_equal(tensors["momentum"], part.momentum)
    assert np.array_equal(tensors["norms"], np.concatenate([e.norms for e in part.history.rounds]))
    manifest = json.loads((path / "checkpoint-00000001" / "manifest.json").read_text())
    assert [each["version"] for each in manifest["fragments"]] == [3, 4]
    assert manifest["fragments"][1]["digests"]["published"] == f"{part.digest:016x}"


def test_two_generations_are_kept(tmp_path: Path) -> None:
    path = prepared(tmp_path, 1, 2, 3, 4)
    assert generations(path) == ["checkpoint-00000003", "checkpoint-00000004"]
    assert same(loaded(path)[0], snapshot(4))


def test_files_are_for_their_owner_only(tmp_path: Path) -> None:
    path = prepared(tmp_path / "state", 1)
    for each in [path, *path.rglob("*")]:
        assert stat.S_IMODE(each.stat().st_mode) & 0o077 == 0, each


def test_a_snapshot_that_changed_in_memory_is_not_written(tmp_path: Path) -> None:
    path = prepared(tmp_path, 1)
    broken = snapshot(2)
    broken.fragments[1].published[0] += 1
    with StateDir.open(path) as state, pytest.raises(StateError, match="fragment 1 in memory"):
        state.save(broken)
    assert same(loaded(path)[0], snapshot(1))


# Epochs.


def test_every_start_raises_the_life_and_keeps_the_run(tmp_path: Path) -> None:
    for life in (1, 2, 3):
        with StateDir.open(tmp_path) as state:
            assert state.begin_epoch(f"new-{life}", f"config-{life}").epoch == (1, life)
            record = state.run
        assert record is not None
        assert (record.run_id, record.config_digest) == ("new-1", f"config-{life}")


def test_a_new_directory_has_no_run(tmp_path: Path) -> None:
    with StateDir.open(tmp_path) as state:
        assert state.run is None and state.load() is None and state.warnings == []


@pytest.mark.parametrize("name", ["run.json", "run.copy.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_one_damaged_record_never_lowers_the_epoch(name: str, damage: str, tmp_path: Path) -> None:
    path = prepared(tmp_path, 1)
    file, data = path / name, (path / name).read_bytes()
    if damage == "remove":
        file.unlink()
    else:
        # The life: {"format":1,"run_id":"...","epoch":[1,1],...}
        spot = data.index(b"[1,1]") + 3
        file.write_bytes(data[:spot] + (b"0" + data[spot + 1 :] if damage == "flip" else b""))
    with StateDir.open(path) as state:
        assert state.begin_epoch("other", "config").epoch == (1, 2)
        assert [name in warning for warning in state.warnings] == [True] * (damage != "remove")
        assert same(state.load(), snapshot(1))


def test_the_newer_one_of_two_records_counts(tmp_path: Path) -> None:
    path = prepared(tmp_path)
    older = (path / "run.json").read_bytes()
    with StateDir.open(path) as state:
        state.begin_epoch(RUN, "config")
    # As after a stop between the two renames.
    (path / "run.json").write_bytes(older)
    with StateDir.open(path) as state:
        assert state.begin_epoch(RUN, "config").epoch == (1, 3)


def test_without_any_record_nothing_is_guessed(tmp_path: Path) -> None:
    path = prepared(tmp_path, 1)
    for name in ("run.json", "run.copy.json"):
        (path / name).unlink()
    with StateDir.open(path) as state, pytest.raises(StateError) as caught:
        state.begin_epoch("other", "config")
    assert caught.value.code == ErrorCode.STATE_DAMAGED and caught.value.remedy


def seal_as_of_another_version(file: Path) -> None:
    """A file as a later Narrows might write it: another format with a field that is not known
    here."""
    fields: dict[str, object] = json.loads(file.read_text())
    fields |= {"format": 3, "added": [1, 2]}
    text = json.dumps({**fields, "digest": ""}, separators=(",", ":"))
    fields["digest"] = f"{digest(text.encode()):016x}"
    file.write_text(json.dumps(fields, separators=(",", ":")))


@pytest.mark.parametrize("name", ["run.json", "run.copy.json", "checkpoint-00000002/manifest.json"])
def test_a_format_of_the_future_is_refused_by_name(name: str, tmp_path: Path) -> None:
    """It is no damage: neither a copy nor an older checkpoint may take its place."""
    path = prepared(tmp_path, 1, 2)
    seal_as_of_another_version(path / name)
    with StateDir.open(path) as state, pytest.raises(StateError) as caught:
        state.load()
    assert name.split("/")[-1] in caught.value.message
    assert (caught.value.expected, caught.value.got) == ("format 1 or 2", "format 3")
    assert "the version of Narrows that wrote it" in caught.value.remedy


def test_a_checkpoint_of_format_1_goes_on_from_its_clock(tmp_path: Path) -> None:
    path = prepared(tmp_path, 1, 2)
    file = path / "checkpoint-00000002" / "manifest.json"
    fields: dict[str, object] = json.loads(file.read_text())
    fields.pop("token_parts", None)  # Only format 2 has it, and leaves a 0 out.
    text = json.dumps({**fields, "format": 1, "digest": ""}, separators=(",", ":"))
    fields |= {"format": 1, "digest": f"{digest(text.encode()):016x}"}
    file.write_text(json.dumps(fields, separators=(",", ":")))
    with StateDir.open(path) as state:
        assert same(state.load(), snapshot(2))
        assert not state.warnings


def test_a_flipped_format_is_damage(tmp_path: Path) -> None:
    path = prepared(tmp_path, 1, 2)
    file = path / "checkpoint-00000002" / "manifest.json"
    file.write_text(file.read_text().replace('"format":2', '"format":3'))
    with StateDir.open(path) as state:
        assert same(state.load(), snapshot(1))
        assert "does not match its digest" in state.warnings[0]


# Locking.


def test_two_brokers_cannot_use_one_directory(tmp_path: Path) -> None:
    with StateDir.open(tmp_path):
        code = (
            "import sys, pathlib; from narrows.broker.storage.checkpoint "
            "import StateDir, StateError\n"
            "try: StateDir.open(pathlib.Path(sys.argv[1]))\n"
            "except StateError as error: print(error)"
        )
        command = [sys.executable, "-c", code, str(tmp_path)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
        assert result.stdout.startswith("state_locked: ")
        assert f"process {os.getpid()}" in result.stdout
        with pytest.raises(StateError) as caught:
            StateDir.open(tmp_path)
        assert caught.value.code == ErrorCode.STATE_LOCKED and caught.value.remedy
    StateDir.open(tmp_path).close()


def test_a_place_that_cannot_be_a_directory_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used as state directory"):
        StateDir.open(tmp_path / "file")
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "lock").symlink_to(tmp_path / "file")
    with pytest.raises(ConfigError, match="cannot be used as state directory"):
        StateDir.open(tmp_path / "state")


# Export.


@pytest.mark.parametrize("fragment_count", [1, 2, 5])
def test_export_has_names_shapes_and_the_global_values(fragment_count: int, tmp_path: Path) -> None:
    taken = snapshot(3, fragment_count=fragment_count)
    export_tensors(taken, tmp_path / "model.safetensors")
    tensors = load_file(tmp_path / "model.safetensors")
    assert {name: each.shape for name, each in tensors.items()} == {
        entry.name: entry.shape for entry in LAYOUT
    }
    table = build_table(LAYOUT, fragment_count)
    for part, state in zip(table, taken.fragments, strict=True):
        for piece in part.pieces:
            flat = tensors[LAYOUT[piece.tensor].name].reshape(-1)
            values = state.global_[piece.offset : piece.offset + piece.count]
            assert np.array_equal(flat[piece.start : piece.start + piece.count], values)
    assert [each.name for each in tmp_path.iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_export_rounds_to_the_dtype_of_the_layout(dtype: DtypeName, tmp_path: Path) -> None:
    layout = (LayoutEntry("w", (40, 3), dtype, "rda"),)
    taken = snapshot(1, layout=layout, fragment_count=1)
    export_tensors(taken, tmp_path / "m.safetensors")
    tensor = load_torch(tmp_path / "m.safetensors")["w"]
    exact = torch.tensor(taken.fragments[0].global_).reshape(40, 3)
    assert torch.equal(tensor, exact.to(getattr(torch, dtype)))


def test_a_failed_export_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "model.safetensors"
    export_tensors(snapshot(1), target)
    before = target.read_bytes()
    failing("fsync", 0, OSError(errno.ENOSPC, "disk full"), monkeypatch)
    with pytest.raises(OSError, match="disk full"):
        export_tensors(snapshot(2), target)
    assert target.read_bytes() == before
    monkeypatch.undo()
    export_tensors(snapshot(2), target)
    assert target.read_bytes() != before
