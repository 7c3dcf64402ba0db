"""Damage to a state directory is reported or harmless; `bit_flips.py` tries every bit."""

from __future__ import annotations

from pathlib import Path

from chaos.bit_flips import damage


def test_no_damage_is_silent(tmp_path: Path) -> None:
    counts = damage(tmp_path, stride=397)
    kinds = {name.partition(": ")[2] for name in counts}
    assert {"harmless", "detected: refused", "last rounds gone, warned"} <= kinds
    assert not any("SILENT" in name for name in counts), counts
    assert counts.total() > 200
