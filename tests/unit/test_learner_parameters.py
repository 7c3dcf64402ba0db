"""Modules as the exchange sees them: layout, reading, writing, saving."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import ReferenceType, ref

import numpy as np
import pytest
import torch
import xxhash
from model_cases import Small, compiled, small
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from narrows.learner import parameters as parameters_module
from narrows.learner.parameters import Parameters, check_same_model
from narrows.proto.codec import F32
from narrows.proto.errors import ConfigError, ErrorCode, LocalProtocolError
from narrows.proto.layout import Fragment, build_table


def noise(fragment: Fragment, seed: int = 0) -> F32:
    return np.random.default_rng(seed).standard_normal(fragment.elements, np.float32)


def read(parameters: Parameters, fragment: Fragment) -> F32:
    out = np.full(fragment.elements, np.nan, np.float32)
    parameters.read(fragment, out)
    return out


def rules(parameters: Parameters) -> dict[str, str]:
    return {entry.name: entry.rule for entry in parameters.layout.entries}


def test_tied_weights_travel_once_and_wrappers_leave_no_trace() -> None:
    """Holds `unwrapped`."""
    parameters = Parameters(small())
    assert [(e.name, e.shape, e.rule) for e in parameters.layout.entries] == [
        ("gain", (1,), "mean"),
        ("table.weight", (11, 6), "mean"),
        ("hidden.weight", (6, 6), "rda"),
        ("hidden.bias", (6,), "mean"),
        ("norm.weight", (6,), "mean"),
        ("norm.bias", (6,), "mean"),
    ]
    assert parameters.layout.frozen_digest == 0
    twins = small(tied=False)
    inside = small()
    twins.head.weight = nn.Parameter(twins.table.weight.data)
    inside.set_submodule("hidden", compiled(inside.hidden))
    wrapped = nn.DataParallel(small())
    for model in (twins, inside, compiled(small()), wrapped, compiled(wrapped)):
        assert Parameters(model).layout == parameters.layout
    other = nn.ModuleDict({"module": nn.Linear(2, 2), "other": nn.Linear(2, 2)})
    assert Parameters(other).layout.entries[0].name == "module.weight"


def test_merge_rules() -> None:
    """Holds `Parameters`."""
    assert rules(Parameters(small(tied=False)))["head.weight"] == "mean"
    wide = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    assert rules(Parameters(wide))["1.weight"] == "rda", "as wide as the vocabulary, and no head"
    chosen = {"*": "rda", "hidden.*": "mean", "head.weight": "mean", "hidden.b*": "rda"}
    assert rules(Parameters(small(), chosen)) == {
        "gain": "rda", "table.weight": "mean", "hidden.weight": "mean",
        "hidden.bias": "rda", "norm.weight": "rda", "norm.bias": "rda",
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"hiden.*expected.*hidden\."):
        Parameters(small(), {"hiden.*": "mean"})
    with pytest.raises(ConfigError, match="rda, got 'median'"):
        Parameters(small(), {"*": "median"})


def test_frozen_parameters_stay_and_are_digested() -> None:
    """Holds `frozen_digest`."""
    model = small()
    model.hidden.requires_grad_(False)
    model.norm.bias.requires_grad_(False)
    layout = Parameters(model).layout
    assert [entry.name for entry in layout.entries] == ["gain", "table.weight", "norm.weight"]
    hasher = xxhash.xxh3_64()
    state = model.state_dict()
    for name in ("hidden.bias", "hidden.weight", "norm.bias"):
        hasher.update(name.encode() + b"\0" + state[name].numpy().tobytes())
    assert layout.frozen_digest == hasher.intdigest()
    model.extra = nn.Parameter(torch.tensor(3, dtype=torch.int8), requires_grad=False)
    assert Parameters(model).layout.frozen_digest != layout.frozen_digest


def strided() -> nn.Module:
    """A model of which two tensors are not contiguous."""
    model = nn.ModuleDict({"conv": nn.Conv2d(4, 6, 3), "linear": nn.Linear(5, 4)})
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model["linear"].register_parameter("weight", nn.Parameter(torch.randn(5, 4).t()))
    return model


def test_arrays_are_made_once_and_anew_where_the_parameters_have_other_memory() -> None:
    """Holds `Parameters.arrays`."""
    model = small()
    parameters = Parameters(model)
    (fragment,) = build_table(parameters.layout.entries, 1)
    arrays = parameters.arrays(fragment)
    assert arrays is not None and parameters.arrays(fragment) is arrays
    model.to(torch.float64).to(torch.float32)
    moved = parameters.arrays(fragment)
    assert moved is not None
    for array in moved:
        array[:] = 7.0
    assert (read(parameters, fragment) == 7.0).all(), "they share the memory that is in use"
    model.to(torch.bfloat16)
    assert parameters.arrays(fragment) is None
    of_strided = Parameters(strided())
    (fragment,) = build_table(of_strided.layout.entries, 1)
    assert of_strided.arrays(fragment) is None


@pytest.mark.parametrize("make", [small, strided])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_are_written_in_place_rounded_and_where_the_layout_says(
    make: Callable[[], nn.Module], dtype: torch.dtype
) -> None:
    """Holds `Parameters.write`."""
    model = make().to(dtype)
    parameters = Parameters(model)
    model.to(torch.float64).to(dtype)  # Other memory.
    pointers = [tensor.data_ptr() for tensor in model.parameters()]
    table = build_table(parameters.layout.entries, 3)
    for fragment in table:
        values = noise(fragment, fragment.index)
        values.flags.writeable = False
        parameters.write(fragment, values)
    assert [tensor.data_ptr() for tensor in model.parameters()] == pointers
    state = model.state_dict()
    for fragment in table:
        rounded = torch.tensor(noise(fragment, fragment.index)).to(dtype).float().numpy()
        assert read(parameters, fragment).tobytes() == rounded.tobytes()
        for piece in fragment.pieces:
            flat = state[parameters.layout.entries[piece.tensor].name].float().reshape(-1).numpy()
            part = rounded[piece.offset : piece.offset + piece.count]
            assert (part == flat[piece.start : piece.start + piece.count]).all()


def transposed_twins() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 4, bias=False))
    encoder, decoder = list(model.parameters())
    decoder.data = encoder.data.t()
    return model


def fsdp1() -> nn.Module:
    """As FSDP1 looks like; the real one wants a group of processes and, in part, a GPU."""
    wrapper = type("FullyShardedDataParallel", (nn.Module,), {})()
    wrapper.add_module("_fsdp_wrapped_module", small())
    return nn.Sequential(wrapper)


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (transposed_twins, "share memory in different shapes"),
        (lambda: nn.Linear(2, 2, device="meta"), "meta device"),
        (lambda: nn.Linear(2, 2, dtype=torch.float64), "float64"),
        (lambda: nn.ParameterList([torch.eye(3).to_sparse()]), "sparse"),
        (lambda: nn.ParameterList([torch.ones(0, 3)]), "no elements"),
        (lambda: nn.LazyLinear(3), "forward pass"),
        (fsdp1, r"FSDP1.*fully_shard"),
        (lambda: nn.Linear(2, 2).requires_grad_(False), "no trainable parameter"),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_models_that_cannot_be_exchanged_are_refused_with_a_remedy(
    make: Callable[[], nn.Module], word: str
) -> None:
    """Holds `Parameters`."""
    with pytest.raises(LocalProtocolError, match=word) as caught:
        Parameters(make())
    assert caught.value.code is ErrorCode.MISUSE and caught.value.remedy


def test_ranks_with_other_parameters_are_named() -> None:
    """Holds `check_same_model`."""
    check_same_model(["7", "7", "7"])
    with pytest.raises(LocalProtocolError, match=r"ranks 1, 3 .*[Pp]ipeline.*fully_shard"):
        check_same_model(["7", "8", "7", "9"])


def test_separate_parts_of_one_memory_are_fine() -> None:
    """Holds `Parameters`."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    memory = torch.zeros(8, 4)
    for index, linear in enumerate(model):
        linear.weight = nn.Parameter(memory[4 * index : 4 * index + 4])
    assert list(rules(Parameters(model))) == ["0.weight", "1.weight"]


def test_saved_state_loads_strictly(tmp_path: Path) -> None:
    """Holds `Parameters.save`."""
    model = small()
    model.set_submodule("hidden", compiled(model.hidden))
    parameters = Parameters(nn.DataParallel(model))
    model.offset.fill_(7)
    target = tmp_path / "new" / "model.safetensors"
    for _ in range(2):
        parameters.save(target, {"format": "pt"})
    assert [path.name for path in target.parent.iterdir()] == ["model.safetensors"]
    fresh = Small()
    fresh.load_state_dict(load_file(target), strict=True)
    for name, value in parameters.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], value)


def test_a_saved_file_is_what_the_library_reads(tmp_path: Path) -> None:
    """Holds `write_state`."""
    model = nn.ModuleDict({"small": small(), "strided": strided()})
    for dtype in (torch.bool, torch.int64, torch.float64, torch.float16, torch.complex64):
        model.register_buffer(str(dtype).replace(".", "_"), torch.arange(3).to(dtype))
    model.register_buffer("nothing", torch.empty(0, 3, dtype=torch.uint8))
    target = tmp_path / "model.safetensors"
    Parameters(model).save(target, {"narrows.final": "true"})
    state = model.state_dict()
    loaded = load_file(target)
    assert loaded.keys() == state.keys()
    for name, value in state.items():
        assert loaded[name].dtype == value.dtype and loaded[name].shape == value.shape
        assert loaded[name].numpy().tobytes() == value.contiguous().numpy().tobytes(), name
    with safe_open(target, "pt") as file:
        assert file.metadata() == {"narrows.final": "true"}


def test_one_tensor_at_a_time_is_made_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest models of a machine are saved, too. Holds `write_state`."""
    alive: list[ReferenceType[Tensor]] = []

    def made_whole(tensor: Tensor) -> Tensor:
        assert not any(each() is not None for each in alive), "an earlier one is kept"
        made = tensor.detach().clone()
        alive.append(ref(made))
        return made

    parameters = Parameters(small())
    monkeypatch.setattr(parameters_module, "whole", made_whole)
    parameters.save(tmp_path / "model.safetensors", {})
    assert len(alive) == len(parameters.state_dict())


def test_a_rank_gives_its_part_of_every_tensor_whatever_happens_to_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the others would wait for ever. Holds `Parameters.save`."""
    parameters = Parameters(small())
    asked: list[Tensor] = []

    def made_whole(tensor: Tensor) -> Tensor:
        asked.append(tensor)
        return tensor.detach()

    monkeypatch.setattr(parameters_module, "whole", made_whole)
    count = len(parameters.state_dict())
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        parameters.save(tmp_path / "file" / "model.safetensors", {})
    assert len(asked) == count
    parameters.save(tmp_path / "other", {}, writes=False)
    assert len(asked) == 2 * count and not (tmp_path / "other").exists()


def test_buffers_whose_sign_torch_has_not_written_yet_are_saved_as_they_read(
    tmp_path: Path,
) -> None:
    """Holds `Parameters.save`."""
    model = nn.Linear(2, 2)
    waves = torch.complex(torch.ones(3), torch.arange(3.0))
    model.register_buffer("conjugated", waves.conj())
    model.register_buffer("negated", waves.conj().imag.view(3))
    Parameters(model).save(tmp_path / "model.safetensors", {})
    saved = load_file(tmp_path / "model.safetensors")
    assert saved["conjugated"].imag.tolist() == saved["negated"].tolist() == [0.0, -1.0, -2.0]


def test_a_state_that_safetensors_cannot_hold_leaves_nothing_behind(tmp_path: Path) -> None:
    """Holds `Parameters.save`."""

    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"a": 1}

    with pytest.raises(LocalProtocolError, match="_extra_state"):
        Parameters(Extra(2, 2)).save(tmp_path / "model.safetensors", {})
    assert list(tmp_path.iterdir()) == []
