"""The quantiser in torch gives the bits of the kernels, on the CPU and on a GPU if there is one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from narrows.proto import kernels
from narrows.proto.codecs import piece_scales
from narrows.proto.kernels import F32, read_only

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
BOUNDS = np.array([0, 1000, 1001, 5000, 70_000], np.int64)


def in_torch(
    base: F32, local: F32, residual: F32, scales: F32, limit: int, device: str
) -> tuple[NDArray[np.int8], F32]:
    """What the kernel does, with whole tensors: one rounding per operation."""

    def tensor(array: F32) -> Tensor:
        return torch.from_numpy(array).to(device)  # pyright: ignore[reportUnknownMemberType]

    spread = tensor(np.repeat(scales, np.diff(BOUNDS)))
    value = (tensor(base) - tensor(local)) + tensor(residual)
    inverse = torch.where(spread > 0, 1 / spread, torch.zeros_like(spread))
    codes = (value * inverse).clamp(-limit, limit).round()
    rest = value - codes * spread
    return codes.to(torch.int8).cpu().numpy(), rest.cpu().numpy()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("limit", "rho"), [(7, 0.5), (7, 1.0), (127, 0.05)])
def test_codes_and_remainder_have_the_same_bits(limit: int, rho: float, device: str) -> None:
    rng = np.random.default_rng(limit)
    count = int(BOUNDS[-1])
    base, local, residual = (rng.standard_t(3, count).astype(np.float32) for _ in range(3))
    local[1000] = base[1000] + residual[1000]  # A piece that is almost, or exactly, zero.
    scales = piece_scales(base, BOUNDS, rho, subtrahend=local, addend=residual)
    codes, rest = np.empty(count, np.int8), np.empty(count, np.float32)
    values = read_only(base), read_only(local), read_only(residual)
    spans = read_only(BOUNDS), read_only(scales)
    kernels.quantise_difference(*values, *spans, np.float32(limit), codes, rest)
    their_codes, their_rest = in_torch(base, local, residual, scales, limit, device)
    np.testing.assert_array_equal(codes, their_codes)
    assert rest.tobytes() == their_rest.tobytes()
    assert np.abs(codes).max() == limit
