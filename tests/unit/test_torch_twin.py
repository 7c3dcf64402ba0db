"""Pushes encoded with torch, on the CPU and on a GPU if there is one, have the kernels' bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from narrows.broker.config import load_config
from narrows.broker.shared_settings import settings
from narrows.learner.module.gpu import DeviceParameters, DeviceSnapshot, parameters_of
from narrows.learner.module.parameters import ModuleParameters
from narrows.learner.transport.push import PushWork, Residuals, encode_push
from narrows.proto.codec import F32
from narrows.proto.codec.codecs import codec_names
from narrows.proto.codec.transfer import EncodedChunk
from narrows.proto.errors import LocalProtocolError
from narrows.proto.fragments import Fragment, build_table
from narrows.proto.messages import DtypeName

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
SETTINGS = settings(load_config(None, {"codec.chunk_elements": 1000}))


class Module(nn.Module):
    """Large, small and single tensors; one that stays as it is."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        for name, shape in (
            ("large", (300, 70)),
            ("small", (7, 3)),
            ("one", (1,)),
            ("bias", (50,)),
        ):
            values = torch.randn(shape, generator=generator).to(dtype)
            setattr(self, name, nn.Parameter(values))


def adopted(parameters: ModuleParameters, seed: int) -> tuple[Fragment, F32]:
    """The only fragment, and the values that the parameters have adopted."""
    part = build_table(parameters.layout, 1)[0]
    values = np.random.default_rng(seed).standard_normal(part.elements).astype(np.float32)
    parameters.adopt(part, values)
    return part, values


def trained(module: nn.Module) -> None:
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name != "bias":
                step = 0.01 * torch.randn(parameter.shape, generator=generator) ** 3
                parameter.add_(step.to(parameter.device, parameter.dtype))


def pushed(work: PushWork, parameters: ModuleParameters) -> tuple[list[EncodedChunk], F32]:
    chunks: list[EncodedChunk] = []
    encode_push(work, SETTINGS, parameters.layout, chunks.append)
    next_residual = work.next_residual
    assert next_residual is not None
    return chunks, next_residual if isinstance(
        next_residual, np.ndarray
    ) else next_residual.cpu().numpy()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("codec", codec_names())
def test_payloads_and_remainders_have_the_same_bits(
    codec: str, dtype: DtypeName, device: str
) -> None:
    on_host = ModuleParameters(Module(getattr(torch, dtype)))
    there = parameters_of(Module(getattr(torch, dtype)).to(device), None, True)
    assert isinstance(there, DeviceParameters)
    residuals, their_residuals = Residuals(True), Residuals(True)
    for push in range(1, 4):
        part, base = adopted(on_host, push)
        adopted(there, push)
        trained(on_host.module)
        trained(there.module)
        local = np.empty(part.elements, np.float32)
        on_host.snapshot(part, local)
        ours = PushWork(push, part, 0, base, local, residuals.of(0), codec, 0.3)
        snapshot = there.capture(part)
        theirs = PushWork(push, part, 0, base, snapshot, their_residuals.of(0), codec, 0.3)
        chunks, next_residual = pushed(ours, on_host)
        their_chunks, their_unsent = pushed(theirs, there)
        assert len(chunks) > 20 and chunks == their_chunks
        assert next_residual.tobytes() == their_unsent.tobytes()
        residuals.settle(ours, merged=True)
        their_residuals.settle(theirs, merged=True)
    assert codec == "raw32" or codec == "f32-blosc2" or residuals.of(0) is not None


@pytest.mark.parametrize("device", DEVICES)
def test_blocks_end_where_chunks_do(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    there = DeviceParameters(Module(torch.float32).to(device))
    part, base = adopted(there, 1)
    trained(there.module)
    snapshot = there.capture(part)
    whole, next_residual = pushed(
        PushWork(1, part, 0, base, snapshot, None, "int4-zstd", 0.5), there
    )
    monkeypatch.setattr("narrows.learner.module.gpu.BLOCK_ELEMENTS", 2500)
    parts, their = pushed(PushWork(1, part, 0, base, snapshot, None, "int4-zstd", 0.5), there)
    assert whole == parts and next_residual.tobytes() == their.tobytes()


@pytest.mark.parametrize("device", DEVICES)
def test_what_diverged_is_not_sent(device: str) -> None:
    there = DeviceParameters(Module(torch.float32).to(device))
    part, base = adopted(there, 1)
    with torch.no_grad():
        next(there.module.parameters())[0, 0] = torch.nan
    work = PushWork(1, part, 0, base, there.capture(part), None, "int4-zstd", 0.5)
    with pytest.raises(LocalProtocolError, match="not finite"):
        pushed(work, there)


def test_a_model_on_the_host_is_encoded_by_the_kernels() -> None:
    assert type(parameters_of(Module(torch.float32), None, None)) is ModuleParameters


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_model_on_a_gpu_is_encoded_there_unless_told_otherwise() -> None:
    module = Module(torch.float32).cuda()
    assert isinstance(parameters_of(module, None, None), DeviceParameters)
    assert type(parameters_of(module, None, False)) is ModuleParameters


def test_a_snapshot_is_a_copy() -> None:
    there = DeviceParameters(Module(torch.float32))
    part, _ = adopted(there, 1)
    snapshot: DeviceSnapshot = there.capture(part)
    before = snapshot.local.clone()
    trained(there.module)
    assert torch.equal(before, snapshot.local)
    assert torch.equal(before, snapshot.base)
