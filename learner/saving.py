"""Writes a model as a safetensors file, one tensor after the other.

The library's own `save_file` wants all tensors in host memory at once. Of a model that is sharded
over many ranks, or that lives on a GPU, one is enough here. The format is a length of 8 bytes, a
header in JSON, and the tensors' bytes; source: github.com/huggingface/safetensors, README, Format.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save
from torch import Tensor

LENGTH_BYTES: Final = 8
"""Bytes of the header's length, which begins the file. The header is padded to a multiple of it, so
that the tensors are aligned."""


def file_order(state: Mapping[str, Tensor]) -> list[str]:
    """The names in the order of the file: that of the library, wide elements first."""
    return sorted(state, key=lambda name: (-state[name].element_size(), name))


def write_state(
    path: Path, state: Mapping[str, Tensor], tensors: Iterable[Tensor], metadata: Mapping[str, str]
) -> None:
    """Writes a file of `tensors`, which come whole and in `file_order(state)`.

    `state` has their names, shapes and dtypes. Missing folders are made. An older file is replaced
    only by a complete one. Raises OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with unfinished.open("wb") as file:
            header = header_of(state, metadata)
            file.write(len(header).to_bytes(LENGTH_BYTES, "little"))
            file.write(header)
            for tensor in tensors:
                file.write(_bytes(tensor))
                del tensor  # Else it would be kept while the next one is made whole.
        # A crash while the file is written leaves the older one whole.
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def header_of(state: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """The file's header: where each tensor lies behind it."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    start = 0
    for name in file_order(state):
        tensor = state[name]
        end = start + tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": _dtype_name(tensor.dtype),
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % LENGTH_BYTES)


def _bytes(tensor: Tensor) -> memoryview:
    """The elements as they lie in the file."""
    # Conjugated and negated views are resolved: their bytes lack the sign else.
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().data


def _dtype_name(dtype: torch.dtype) -> str:
    """The format's name of a dtype, as the library writes it for a tensor without elements."""
    example = save({"empty": torch.empty(0, dtype=dtype)})
    length = int.from_bytes(example[:LENGTH_BYTES], "little")
    name: str = json.loads(example[LENGTH_BYTES:][:length])["empty"]["dtype"]
    return name
