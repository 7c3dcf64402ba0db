"""Encoding beside training: the stream of each operation, on a GPU that only keeps clocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fake_gpu import FakeGpu
from torch import Tensor, nn

from narrows.broker.config import load_config
from narrows.broker.shared_settings import settings
from narrows.learner.module.gpu import DeviceParameters, DeviceSnapshot, parameters_of
from narrows.learner.module.parameters import ModuleParameters
from narrows.learner.transport.push import PushWork, Residual, Residuals, encode_push
from narrows.proto.codec import F32
from narrows.proto.codec.transfer import EncodedChunk
from narrows.proto.fragments import Fragment, build_table

SETTINGS = settings(load_config(None, {"codec.chunk_elements": 700}))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    monkeypatch.setattr("narrows.learner.module.gpu._streams", {})
    monkeypatch.setattr("narrows.learner.module.gpu.BLOCK_ELEMENTS", 1400)
    return FakeGpu(monkeypatch)


def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = {"large": (60, 50), "small": (7, 3), "bias": (50,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def module_of(tensors: dict[str, Tensor]) -> nn.Module:
    module = nn.Module()
    for name, tensor in tensors.items():
        module.register_parameter(name, nn.Parameter(tensor))
    return module


def train(module: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            step = 0.01 * torch.randn(parameter.shape, generator=generator)
            parameter.add_(step.to(parameter.device))


class Pushes:
    """One push after the other, each with what the one before left next_residual."""

    def __init__(self, parameters: ModuleParameters, codec: str) -> None:
        self.parameters, self.codec = parameters, codec
        self.residuals = Residuals(True)
        self.part: Fragment = build_table(parameters.layout, 1)[0]

    def push(self, number: int) -> tuple[list[EncodedChunk], float, Residual]:
        base = np.random.default_rng(number).standard_normal(self.part.elements).astype(np.float32)
        self.parameters.adopt(self.part, base)
        train(self.parameters.module, number)
        if isinstance(self.parameters, DeviceParameters):
            local: DeviceSnapshot | F32 = self.parameters.capture(self.part)
        else:
            local = np.empty(self.part.elements, np.float32)
            self.parameters.snapshot(self.part, local)
        train(self.parameters.module, -number)  # Training goes on while it is encoded.
        residual = self.residuals.of(0)
        work = PushWork(number, self.part, 0, base, local, residual, self.codec, 0.3)
        encode_push(work, SETTINGS, self.parameters.layout, work.chunks.append)
        error = 0.0 if self.codec == "f32-blosc2" else work.error_ratio()
        self.residuals.settle(work, merged=True)
        assert work.next_residual is not None
        return work.chunks, error, work.next_residual


@pytest.mark.parametrize("codec", ["int4-zstd", "int8-zstd", "f32-blosc2"])
def test_encoding_races_with_nothing(codec: str, gpu: FakeGpu) -> None:
    with gpu:
        module = module_of({name: gpu.put(values) for name, values in weights().items()})
        there = Pushes(parameters_of(module, None, None), codec)
        assert isinstance(there.parameters, DeviceParameters)
        pushed = [there.push(number) for number in (1, 2, 3)]
    assert [*dict.fromkeys(gpu.races)] == []
    here = Pushes(ModuleParameters(module_of(weights())), codec)
    for number, (chunks, error, next_residual) in zip((1, 2, 3), pushed, strict=True):
        expected, expected_error, expected_unsent = here.push(number)
        assert isinstance(next_residual, Tensor) and isinstance(expected_unsent, np.ndarray)
        assert chunks == expected and len(chunks) > 3
        assert error == expected_error
        assert next_residual.as_subclass(Tensor).numpy().tobytes() == expected_unsent.tobytes()
