"""The head of a safetensors file, and the bytes of its arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

import msgspec
import numpy as np

from narrows.proto.codec import F32
from narrows.proto.messages import DtypeName

DTYPES: Final[Mapping[DtypeName, tuple[str, int]]] = {
    "float32": ("F32", 4), "bfloat16": ("BF16", 2), "float16": ("F16", 2),
}  # fmt: skip
"""Name in safetensors, and bytes per element, of each dtype."""

NO_METADATA: Final[Mapping[str, str]] = MappingProxyType({})


def safetensors_header(
    tensors: Sequence[tuple[str, DtypeName, tuple[int, ...]]],
    metadata: Mapping[str, str] = NO_METADATA,
) -> bytes:
    """Length and JSON of a safetensors file whose data follow in this order without gaps."""
    header: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    end = 0
    for name, dtype, shape in tensors:
        code, item_bytes = DTYPES[dtype]
        start, end = end, end + math.prod(shape) * item_bytes
        header[name] = {"dtype": code, "shape": shape, "data_offsets": (start, end)}
    text = msgspec.json.encode(header)
    # Blanks after the JSON align the data, as the format asks for.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def bytes_of(array: F32) -> memoryview:
    """The bytes of an array."""
    return np.ascontiguousarray(array).data.cast("B")
