"""Safetensors files of users: version 0 to begin with, and the export of the model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from store_cases import LAYOUT, TABLE

from narrows.broker.store import export_model, read_initial
from narrows.proto.errors import ConfigError


def tensors() -> dict[str, torch.Tensor]:
    """The layout's tensors in three dtypes, and one that no layout names."""
    torch.manual_seed(1)
    return {
        "embedding": torch.randn(20, 16),
        "layer/weight": torch.randn(24, 16).to(torch.bfloat16),
        "scale": torch.randn(16).to(torch.float16),
        "cache": torch.arange(5),
    }


def test_a_file_becomes_version_0_and_version_0_the_same_file(tmp_path: Path) -> None:
    begin, end = tmp_path / "begin.safetensors", tmp_path / "end.safetensors"
    save_file(tensors(), begin)
    states = read_initial(begin, LAYOUT, TABLE)
    assert [state.version for state in states] == [0, 0]
    assert all(not state.momentum.any() for state in states)
    assert [state.digests.global_ for state in states] == [s.digests.published for s in states]
    del (expected := tensors())["cache"]
    # Values between those of a dtype are rounded as torch does.
    for factor in (1.0, 1.001):
        export_model(
            end, LAYOUT, TABLE, [state.global_ * np.float32(factor) for state in states], {}
        )
        found = load_file(end)
        assert list(found) == list(expected)
        for name, tensor in expected.items():
            wanted = (tensor.float() * factor).to(tensor.dtype)
            assert found[name].dtype == wanted.dtype and torch.equal(found[name], wanted), name


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("scale", None, "scale of shape.*no such tensor"),
        ("scale", torch.zeros(17), r"scale of shape \[16\].*got \[17\]"),
        ("scale", torch.zeros(16, dtype=torch.float64), "F32 or F16 or BF16.*F64"),
        ("scale", torch.full((16,), torch.nan), "scale.*finite"),
    ],
)
def test_a_file_that_does_not_fit(
    tmp_path: Path, name: str, tensor: torch.Tensor | None, message: str
) -> None:
    content = tensors()
    del content[name]
    if tensor is not None:
        content[name] = tensor
    save_file(content, tmp_path / "begin")
    with pytest.raises(ConfigError, match=message):
        read_initial(tmp_path / "begin", LAYOUT, TABLE)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_initial(tmp_path / "none", LAYOUT, TABLE)
    save_file(tensors(), tmp_path / "short")
    content = (tmp_path / "short").read_bytes()
    for cut in (b"", content[:5], content[:100], content[:-1]):
        (tmp_path / "short").write_bytes(cut)
        with pytest.raises(ConfigError, match="a safetensors file"):
            read_initial(tmp_path / "short", LAYOUT, TABLE)
