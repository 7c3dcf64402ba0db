"""The rule of an adoption, snapshots and their codes, in host memory and as on a GPU."""

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from narrows.learner.gpu import TorchIsland
from narrows.learner.parameters import Parameters
from narrows.proto.codec import CODECS, F32, decode_chunk, values_of
from narrows.proto.errors import ErrorCode, LocalProtocolError
from narrows.proto.layout import build_table
from narrows.proto.messages import CodecName, RunSettings
from narrows.proto.ports import Adoption, CodedPush, Copy

SETTINGS = RunSettings(chunk_elements=512)

GPU = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""Where the GPU's path runs: on a CPU the same torch expressions make the same bits."""
DEVICE = {False: torch.device("cpu"), True: GPU}
"""The place of a model, by whether its island is `on_device`."""


class Model(torch.nn.Module):
    """Three tensors in any precision."""

    def __init__(
        self,
        dtype: torch.dtype = torch.float32,
        *,
        transposed: bool = False,
        device: torch.device = DEVICE[False],
    ) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(30, 70, dtype=dtype))
        self.b = torch.nn.Parameter(torch.zeros(33, dtype=dtype))
        v = torch.zeros(9, 111, dtype=dtype)
        self.v = torch.nn.Parameter(v.T.contiguous().T if transposed else v)
        self.to(device)


(FRAGMENT,) = build_table(Parameters(Model()).layout.entries, 1)


def adopt(island: TorchIsland, rule: Adoption) -> None:
    island.adopt(FRAGMENT, island.prepare(FRAGMENT, rule))


def filled(island: TorchIsland, values: F32) -> Copy:
    copy = island.copy(FRAGMENT, values)
    adopt(island, Adoption(copy, copy, None, 0.0, False))
    return copy


def coded(push: CodedPush | None) -> F32:
    if push is None:
        return np.zeros(FRAGMENT.elements, np.float32)
    return values_of(FRAGMENT, [chunk.decoded for chunk in push.chunks])


@pytest.mark.parametrize("keep", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("seed", range(5))
def test_the_rule_equals_its_plain_twin_and_loses_nothing(keep: float, seed: int) -> None:
    """Any sequence of steps, pushes and adoptions; with keep 1 all own work is in the parameters or
    in a version that holds its push. An outer gradient is work with the other sign."""
    rng = np.random.default_rng(seed)
    parameters = Parameters(Model())
    island = TorchIsland(parameters)
    size = FRAGMENT.elements
    old = filled(island, rng.standard_normal(size).astype(np.float32))
    twin = old.values.astype(np.float64)
    worked = np.zeros(size)
    push: CodedPush | None = None
    merges = 0
    for _ in range(40):
        match rng.integers(4 if push is None else 3):
            case 0:
                step = (0.1 * rng.standard_normal(size)).astype(np.float32)
                parameters.write(FRAGMENT, island.read(FRAGMENT) + step)
                twin = twin + step
                worked = worked + step
            case 1 | 2:
                moved = old.values + 0.05 * rng.standard_normal(size).astype(np.float32)
                new = island.copy(FRAGMENT, moved)
                merged = push is not None and rng.random() < 0.5
                adopt(island, Adoption(old, new, push, keep, merged))
                mine = coded(push).astype(np.float64)
                twin = new.values + keep * (twin - old.values + mine) - mine
                if merged:
                    twin = twin + mine
                    worked = worked + mine
                    push = None
                    merges += 1
                old = new
            case _:
                push = island.snapshot(FRAGMENT, old, 0, SETTINGS)(map)
        params = island.read(FRAGMENT)
        np.testing.assert_allclose(params, twin, rtol=1e-5, atol=2e-6)
        if keep == 1.0:
            np.testing.assert_allclose(params - old.values, worked, rtol=1e-4, atol=1e-5)
    assert merges > 1


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adoption_that_keeps_nothing_has_the_prepared_bits(
    dtype: torch.dtype, on_device: bool
) -> None:
    """Without a push to subtract that is the new copy itself, and nothing is computed."""
    island = TorchIsland(Parameters(Model(dtype, device=DEVICE[on_device])), on_device=on_device)
    rng = np.random.default_rng(0)
    values = rng.standard_normal(FRAGMENT.elements).astype(np.float32)
    old = filled(island, np.full_like(values, np.nan))
    new = island.copy(FRAGMENT, values)
    prepared = island.prepare(FRAGMENT, Adoption(old, new, None, 0.0, False))
    assert prepared.out is new.rounded
    island.adopt(FRAGMENT, prepared)
    rounded = torch.from_numpy(values).to(dtype).to(torch.float32)
    assert island.read(FRAGMENT).tobytes() == rounded.numpy().tobytes()


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.5, 1.0])
def test_two_parts_of_the_rule_differ_from_one_by_the_last_bit_of_float32(keep: float) -> None:
    """Holds `TorchIsland.prepare`, `TorchIsland.adopt`."""
    rng = np.random.default_rng(3)
    for merged in (False, True):
        parameters = Parameters(Model())
        island = TorchIsland(parameters)
        start = rng.standard_normal(FRAGMENT.elements).astype(np.float32)
        old = filled(island, start)
        parameters.write(FRAGMENT, start + np.float32(1e-3) * start[::-1])
        push = island.snapshot(FRAGMENT, old, 0, SETTINGS)(map)
        before = island.read(FRAGMENT)
        new = island.copy(FRAGMENT, start * np.float32(1.01))
        adopt(island, Adoption(old, new, push, keep, merged))
        mine = coded(push)
        params = new.values + np.float32(keep) * (before - old.values + mine)
        params -= np.float32(0.0) if merged else mine
        largest = np.abs([new.values, old.values, before, mine]).max(axis=0)
        assert (np.abs(island.read(FRAGMENT) - params) <= np.spacing(largest)).all()


def test_parameters_that_are_not_finite_are_not_pushed_from_a_gpu() -> None:
    """Holds `encode_on_device`."""
    model = Model(device=GPU)
    island = TorchIsland(Parameters(model), on_device=True)
    old = filled(island, np.zeros(FRAGMENT.elements, np.float32))
    with torch.no_grad():
        model.v[2, 3] = float("nan")
    with pytest.raises(LocalProtocolError) as caught:
        island.snapshot(FRAGMENT, old, 0, SETTINGS)(map)
    assert caught.value.code is ErrorCode.NOT_FINITE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("on_device", [False, True])
def test_the_rounding_of_parameters_does_not_travel(dtype: torch.dtype, on_device: bool) -> None:
    """Holds `TorchIsland.snapshot`."""
    model = Model(dtype, device=DEVICE[on_device])
    island = TorchIsland(Parameters(model), on_device=on_device)
    rng = np.random.default_rng(1)
    old = filled(island, rng.standard_normal(FRAGMENT.elements).astype(np.float32))
    new = island.copy(FRAGMENT, rng.standard_normal(FRAGMENT.elements).astype(np.float32))
    adopt(island, Adoption(old, new, None, 0.5, False))
    push = island.snapshot(FRAGMENT, new, 1, SETTINGS)(map)
    assert not coded(push).any()
    with torch.no_grad():
        model.w.add_(1.0)
    push = island.snapshot(FRAGMENT, new, 1, SETTINGS)(map)
    moved = np.flatnonzero(coded(push))
    assert moved.size and moved.max() < 30 * 70


@pytest.mark.parametrize("moves_at", range(5))
@pytest.mark.parametrize("to_device", [False, True])
def test_a_model_that_moves_to_another_device_has_the_bits_of_one_that_stays(
    to_device: bool, moves_at: int
) -> None:
    """Holds `TorchIsland.snapshot`, `TorchIsland.prepare`, `TorchIsland.adopt`."""
    rng = np.random.default_rng(4)
    start = rng.standard_normal(FRAGMENT.elements).astype(np.float32)
    work = 1e-3 * rng.standard_normal(FRAGMENT.elements).astype(np.float32)
    results: list[bytes] = []
    for moves in (False, True):
        model = Model(device=DEVICE[not to_device])
        parameters = Parameters(model)
        island = TorchIsland(parameters, on_device=not to_device)
        old = filled(island, start)
        parameters.write(FRAGMENT, start + work)
        for stage in range(5):
            if moves and stage == moves_at:
                model.to(DEVICE[to_device])
                island._on_device = to_device
            match stage:
                case 0:
                    push = island.snapshot(FRAGMENT, old, 0, SETTINGS)(map)
                case 1:
                    new = island.copy(FRAGMENT, start * np.float32(1.01))
                case 2:
                    prepared = island.prepare(FRAGMENT, Adoption(old, new, push, 0.5, False))
                case 3:
                    island.adopt(FRAGMENT, prepared)
                case 4:
                    newer = island.copy(FRAGMENT, start * np.float32(1.02))
                    adopt(island, Adoption(new, newer, push, 0.5, True))
        results.append(island.read(FRAGMENT).tobytes())
    assert results[0] == results[1]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("transposed", [False, True])
def test_the_gpu_path_has_the_bits_of_the_cpu(codec: CodecName, transposed: bool) -> None:
    """Payloads, and parameters after adoptions, bit for bit; without a GPU on its twin."""
    rng = np.random.default_rng(2)
    settings = replace(SETTINGS, push_codec=codec)
    start = rng.standard_normal(FRAGMENT.elements).astype(np.float32)
    work = 1e-3 * rng.standard_normal(FRAGMENT.elements).astype(np.float32)
    work[: 30 * 70] = 0.0  # A spike among zeros: the samples miss it.
    work[1234] = 7.0
    results = []
    for on_device in (False, True):
        parameters = Parameters(Model(transposed=transposed, device=DEVICE[on_device]))
        island = TorchIsland(parameters, on_device=on_device)
        old = filled(island, start)
        parameters.write(FRAGMENT, start + work)
        push = island.snapshot(FRAGMENT, old, 0, settings)(map)
        bits = [chunk.payload for chunk in push.chunks]
        for merged in (False, True):
            new = island.copy(FRAGMENT, old.values * np.float32(1.01))
            adopt(island, Adoption(old, new, push, 0.5, merged))
            bits.append(island.read(FRAGMENT).tobytes())
            old = new
        results.append(bits)
        assert coded(push)[1234] != 0.0
        for index, chunk in enumerate(push.chunks):  # What travels is what was kept.
            there = decode_chunk(FRAGMENT, codec, 512, index, chunk.payload)
            assert there.content.tobytes() == chunk.decoded.content.tobytes()
    assert results[0] == results[1]
