"""Version 0 from a safetensors file, for runs that do not begin with a learner's parameters.

The file is read as bytes: safetensors' own arrays for numpy cannot hold bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import safetensors
from safetensors import SafetensorError, safe_open

from narrows.broker.merging import FragmentState, version_zero
from narrows.proto.codec import F32, widened
from narrows.proto.errors import ConfigError
from narrows.proto.fragments import Fragment
from narrows.proto.messages import LayoutEntry

_deserialize: Callable[[bytes], Any] = getattr(safetensors, "deserialize")  # noqa: B009


class _Tensor(TypedDict):
    dtype: str
    shape: list[int]
    data: bytes


def check_initial(path: Path) -> None:
    """Raises ConfigError unless this is a readable safetensors file; reads its header only."""
    try:
        with safe_open(path, framework="numpy"):
            pass
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, error) from error


def read_initial(
    path: Path, layout: Sequence[LayoutEntry], table: Sequence[Fragment]
) -> list[FragmentState]:
    """Version 0 from float32, float16 or bfloat16 tensors with the layout's names.

    Raises ConfigError if the file is damaged, or a tensor is missing, has another shape or dtype,
    or is not finite. Tensors that the layout does not name are skipped.
    """
    try:
        content: Any = _deserialize(path.read_bytes())
        tensors: dict[str, _Tensor] = dict(content)
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, error) from error
    flat = [_values(path, entry, tensors.get(entry.name)) for entry in layout]
    return [
        version_zero(
            np.concatenate([flat[p.tensor][p.start : p.start + p.count] for p in fragment.pieces])
        )
        for fragment in table
    ]


def _values(path: Path, entry: LayoutEntry, tensor: _Tensor | None) -> F32:
    """The float32 elements (n,) of one tensor, row by row."""
    # A scalar travels as one element; the file may keep it with no dimension.
    shape = None if tensor is None else tuple(tensor["shape"]) or (1,)
    if tensor is None or shape != entry.shape:
        raise ConfigError(
            f"{path} does not fit the model",
            expected=f"{entry.name} of shape {list(entry.shape)}",
            got="nothing" if shape is None else f"shape {list(shape)}",
        )
    match tensor["dtype"]:
        case "F32":
            values = np.frombuffer(tensor["data"], "<f4").astype(np.float32)
        case "F16":
            values = np.frombuffer(tensor["data"], "<f2").astype(np.float32)
        case "BF16":
            values = widened(np.frombuffer(tensor["data"], "<u2").astype(np.uint16))
        case other:
            raise ConfigError(f"{path}: {entry.name}", expected="F32, F16 or BF16", got=other)
    if not np.isfinite(values).all():
        raise ConfigError(f"{path}: {entry.name} is not finite")
    return values


def _unreadable(path: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"{path} cannot be read",
        expected="a safetensors file",
        got=str(error),
        remedy="check broker.init, or leave it out: the first learner's parameters begin the run",
    )
