"""Layout, snapshot, adoption and final state of torch modules."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from safetensors.torch import load_file
from torch import Tensor, nn

from narrows.learner.module.parameters import ModuleParameters
from narrows.proto.codec import F32
from narrows.proto.errors import ConfigError, ErrorCode, LocalProtocolError
from narrows.proto.fragments import Fragment, build_table
from narrows.proto.messages import DtypeName

torch.set_num_threads(1)


VOCABULARY = 11
WIDTH = 6


class Small(nn.Module):
    """Embedding, hidden layers, norm, head (tied on request), a scalar and two buffers."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.gain = nn.Parameter(torch.tensor(2.0))
        self.offset = nn.Buffer(torch.ones(WIDTH))
        self.cache = nn.Buffer(torch.zeros(3), persistent=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.norm(torch.tanh(self.hidden(self.table(tokens)))) + self.offset
        return torch.as_tensor(self.head(hidden) * self.gain)


def small(*, tied: bool = True, dtype: torch.dtype = torch.float32) -> Small:
    torch.manual_seed(5)
    return Small(tied=tied).to(dtype)


def test_weights_tied_through_a_transpose_are_refused() -> None:
    """Adopting one would change what the other has learned."""
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 4, bias=False))
    encoder, decoder = list(model.parameters())
    decoder.data = encoder.data.t()
    with pytest.raises(LocalProtocolError, match="share memory in different shapes"):
        ModuleParameters(model)


def test_separate_parts_of_one_memory_are_fine() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    memory = torch.zeros(8, 4)
    for index, linear in enumerate(model):
        linear.weight = nn.Parameter(memory[4 * index : 4 * index + 4])
    assert [entry.name for entry in ModuleParameters(model).layout] == ["0.weight", "1.weight"]


def sample_loss(model: nn.Module) -> Tensor:
    tokens = torch.arange(VOCABULARY)
    return nn.functional.cross_entropy(model(tokens).float(), tokens.flip(0))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    sample_loss(model).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def compiled(module: nn.Module) -> nn.Module:
    result: Any = torch.compile(module, backend="eager")
    assert isinstance(result, nn.Module)
    return result


def rules(parameters: ModuleParameters) -> dict[str, str]:
    return {entry.name: entry.rule for entry in parameters.layout}


def read(parameters: ModuleParameters, fragment: Fragment) -> F32:
    out = np.full(fragment.elements, np.nan, np.float32)
    parameters.snapshot(fragment, out)
    return out


def noise(fragment: Fragment, seed: int = 0) -> F32:
    return np.random.default_rng(seed).standard_normal(fragment.elements, np.float32)


def test_layout_of_a_small_model() -> None:
    parameters = ModuleParameters(small())
    assert [(e.name, e.shape, e.rule) for e in parameters.layout] == [
        ("gain", (1,), "mean"),
        ("table.weight", (VOCABULARY, WIDTH), "mean"),
        ("hidden.weight", (WIDTH, WIDTH), "rda"),
        ("hidden.bias", (WIDTH,), "mean"),
        ("norm.weight", (WIDTH,), "mean"),
        ("norm.bias", (WIDTH,), "mean"),
    ]
    assert ("table.weight", "head.weight") in parameters.names
    assert parameters.frozen_digest == 0


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(torch.float32, "float32"), (torch.bfloat16, "bfloat16"), (torch.float16, "float16")],
)
def test_dtype_names(dtype: torch.dtype, name: DtypeName) -> None:
    assert {e.dtype for e in ModuleParameters(small(dtype=dtype)).layout} == {name}


def test_two_parameters_on_one_memory_are_one_tensor() -> None:
    model = small(tied=False)
    model.head.weight = nn.Parameter(model.table.weight.data)
    assert ModuleParameters(model).layout == ModuleParameters(small()).layout


def test_untied_head_is_averaged() -> None:
    assert rules(ModuleParameters(small(tied=False)))["head.weight"] == "mean"


def test_a_hidden_layer_as_wide_as_the_vocabulary_is_no_head() -> None:
    model = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    assert rules(ModuleParameters(model)) == {
        "0.weight": "mean", "1.weight": "rda", "1.bias": "mean",
        "2.weight": "mean", "2.bias": "mean",
    }  # fmt: skip


def test_wrappers_leave_no_trace_in_names() -> None:
    expected = ModuleParameters(small()).layout
    inside = small()
    inside.set_submodule("hidden", compiled(inside.hidden))
    wrapped = nn.DataParallel(small())
    for model in (inside, compiled(small()), wrapped, compiled(wrapped)):
        assert ModuleParameters(model).layout == expected


def test_a_module_called_module_next_to_others_keeps_its_name() -> None:
    model = nn.ModuleDict({"module": nn.Linear(2, 2), "other": nn.Linear(2, 2)})
    assert ModuleParameters(model).layout[0].name == "module.weight"


def test_frozen_parameters_stay_and_are_digested() -> None:
    model = small()
    model.hidden.requires_grad_(False)
    model.norm.bias.requires_grad_(False)
    parameters = ModuleParameters(model)
    assert list(rules(parameters)) == ["gain", "table.weight", "norm.weight"]
    hasher = xxhash.xxh3_64()
    state = model.state_dict()
    for name in ("hidden.bias", "hidden.weight", "norm.bias"):
        hasher.update(name.encode() + b"\0" + state[name].numpy().tobytes())
    assert parameters.frozen_digest == hasher.intdigest()
    with torch.no_grad():
        model.hidden.bias[0] += 1
    assert ModuleParameters(model).frozen_digest != parameters.frozen_digest


def test_frozen_digest_takes_any_dtype() -> None:
    def frozen(value: Tensor) -> int:
        model = small()
        model.extra = nn.Parameter(value, requires_grad=False)
        return ModuleParameters(model).frozen_digest

    values = [
        torch.zeros(0), torch.tensor(3), torch.ones(2, 2, dtype=torch.bfloat16).t(),
        torch.tensor([True]), torch.tensor([1j]), torch.arange(4, dtype=torch.int8),
    ]  # fmt: skip
    assert len({frozen(value) for value in values}) == len(values)


def test_merge_laws_of_the_user_win_and_the_last_match_counts() -> None:
    parameters = ModuleParameters(
        small(), {"*": "rda", "hidden.*": "mean", "head.weight": "mean", "hidden.b*": "rda"}
    )
    assert rules(parameters) == {
        "gain": "rda", "table.weight": "mean", "hidden.weight": "mean",
        "hidden.bias": "rda", "norm.weight": "rda", "norm.bias": "rda",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("merge_rules", "words"),
    [({"hiden.*": "mean"}, ["'hiden.*'", "hidden."]), ({"*": "median"}, ["'median'", "rda"])],
)
def test_merge_rules_that_cannot_be_meant(merge_rules: dict[str, str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        ModuleParameters(small(), merge_rules)
    assert all(word in str(caught.value) for word in words)


def strided() -> nn.Module:
    """A model of which two tensors are not contiguous."""
    model = nn.ModuleDict({"conv": nn.Conv2d(4, 6, 3), "linear": nn.Linear(5, 4)})
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model["linear"].register_parameter("weight", nn.Parameter(torch.randn(5, 4).t()))
    assert sum(not p.is_contiguous() for p in model.parameters()) == 2
    return model


@pytest.mark.parametrize("make", [small, strided])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fragment_count", [1, 3])
def test_adopted_values_are_read_back_rounded(
    make: Callable[[], nn.Module], dtype: torch.dtype, fragment_count: int
) -> None:
    model = make().to(dtype)
    parameters = ModuleParameters(model)
    table = build_table(parameters.layout, fragment_count)
    for fragment in table:
        parameters.adopt(fragment, noise(fragment, fragment.index))
    for fragment in table:
        rounded = torch.tensor(noise(fragment, fragment.index)).to(dtype).float().numpy()
        assert read(parameters, fragment).tobytes() == rounded.tobytes()


def assert_in_place(model: nn.Module, parameters: ModuleParameters, fragment: Fragment) -> None:
    """Asserts that a snapshot reads the model's values, each element where the layout says."""
    values = read(parameters, fragment)
    state = model.state_dict()
    for piece in fragment.pieces:
        flat = state[parameters.layout[piece.tensor].name].reshape(-1).numpy()
        part = values[piece.offset : piece.offset + piece.count]
        assert (part == flat[piece.start : piece.start + piece.count]).all()


@pytest.mark.parametrize("make", [small, strided])
def test_elements_are_where_the_layout_says(make: Callable[[], nn.Module]) -> None:
    model = make()
    parameters = ModuleParameters(model)
    for fragment in build_table(parameters.layout, 3):
        assert_in_place(model, parameters, fragment)


def test_adoption_leaves_memory_gradients_and_optimizer_state_alone() -> None:
    model = small()
    optimizer = torch.optim.AdamW(model.parameters())
    train_step(model, optimizer)
    pointers = [p.data_ptr() for p in model.parameters()]
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    state = copy.deepcopy(optimizer.state_dict())
    parameters = ModuleParameters(model)
    (fragment,) = build_table(parameters.layout, 1)
    parameters.adopt(fragment, noise(fragment))
    assert [p.data_ptr() for p in model.parameters()] == pointers
    assert all(p.requires_grad and p.is_leaf for p in model.parameters())
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert parameter.grad is not None and torch.equal(parameter.grad, gradient)
    torch.testing.assert_close(optimizer.state_dict(), state, rtol=0, atol=0)
    assert len(gradients) == len(parameters.layout)
    train_step(model, optimizer)


def test_compiled_module_computes_with_adopted_values() -> None:
    plain = small()
    fast = compiled(plain)
    before = sample_loss(fast).item()
    parameters = ModuleParameters(fast)
    (fragment,) = build_table(parameters.layout, 1)
    parameters.adopt(fragment, noise(fragment))
    assert sample_loss(fast).item() == sample_loss(plain).item() != before


def test_read_only_values_can_be_adopted() -> None:
    parameters = ModuleParameters(small())
    (fragment,) = build_table(parameters.layout, 1)
    values = noise(fragment)
    values.flags.writeable = False
    parameters.adopt(fragment, values)
    assert (read(parameters, fragment) == values).all()


def test_parameters_are_found_after_the_model_got_other_memory() -> None:
    model = small()
    parameters = ModuleParameters(model)
    (fragment,) = build_table(parameters.layout, 1)
    model.to(torch.float64).to(torch.float32)
    parameters.adopt(fragment, noise(fragment))
    assert (read(parameters, fragment) == noise(fragment)).all()
    assert_in_place(model, parameters, fragment)


class Lonely(nn.Module):
    """A module with one parameter."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.only = nn.Parameter(value)


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: nn.Linear(2, 2, device="meta"), "meta device"),
        (lambda: Lonely(torch.eye(3).to_sparse()), "sparse"),
        (lambda: Lonely(torch.ones(3, dtype=torch.complex64)), "complex64"),
        (lambda: nn.Linear(2, 2, dtype=torch.float64), "float64"),
        (lambda: Lonely(torch.ones(0, 3)), "no elements"),
        (lambda: nn.LazyLinear(3), "forward pass"),
        (lambda: nn.ReLU(), "no trainable parameter"),
        (lambda: nn.Linear(2, 2).requires_grad_(False), "no trainable parameter"),
        (lambda: nn.ParameterList([nn.Parameter(torch.arange(3), False)]), "no trainable"),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_models_that_cannot_be_exchanged(make: Callable[[], nn.Module], word: str) -> None:
    with pytest.raises(LocalProtocolError, match=word) as caught:
        ModuleParameters(make())
    assert caught.value.code == ErrorCode.MISUSE
    assert caught.value.remedy


@pytest.fixture
def fake_ranks() -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("fake_ranks")
def test_sharded_parameters_are_refused() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    sharded = distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (2,)), [Shard(0)])
    with pytest.raises(LocalProtocolError, match="'only' is a DTensor"):
        ModuleParameters(Lonely(sharded))


def test_saved_state_loads_strictly(tmp_path: Path) -> None:
    model = small()
    model.set_submodule("hidden", compiled(model.hidden))
    model.table.weight.requires_grad_(False)
    parameters = ModuleParameters(nn.DataParallel(model))
    (fragment,) = build_table(parameters.layout, 1)
    parameters.adopt(fragment, noise(fragment))
    model.offset.fill_(7)
    target = tmp_path / "new" / "model.safetensors"
    for _ in range(2):
        parameters.save(target)
    assert [path.name for path in target.parent.iterdir()] == ["model.safetensors"]
    loaded: dict[str, Tensor] = load_file(target)
    assert set(loaded) == set(Small().state_dict())
    fresh = Small()
    fresh.load_state_dict(loaded, strict=True)
    for name, value in parameters.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], value)
    assert fresh.head.weight is fresh.table.weight


def test_state_that_safetensors_cannot_hold_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"a": 1}

    parameters = ModuleParameters(Extra(2, 2))
    with pytest.raises(LocalProtocolError, match="_extra_state"):
        parameters.save(tmp_path / "model.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_changed_buffers_are_named() -> None:
    norm, written, replaced = nn.BatchNorm1d(3), small(), small()
    model = nn.ModuleList([norm, written, replaced])
    parameters = ModuleParameters(model)
    assert parameters.changed_buffers() == []
    norm(torch.randn(4, 3))
    written.offset.mul_(1.0)
    written.cache.add_(1)
    replaced.offset = nn.Buffer(torch.zeros(WIDTH))
    assert parameters.changed_buffers() == [
        "0.running_mean", "0.running_var", "1.offset", "2.offset",
    ]  # fmt: skip


class MasterSGD(torch.optim.SGD):
    """SGD on float32 copies that it writes over the model's parameters at each step."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        self.models = list(model.parameters())
        self.masters = [p.detach().float().clone().requires_grad_() for p in self.models]
        super().__init__(self.masters, lr=lr)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for master, parameter in zip(self.masters, self.models, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
        super().step(closure)
        with torch.no_grad():
            for master, parameter in zip(self.masters, self.models, strict=True):
                parameter.copy_(master)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, adopted: Callable[[F32, int], F32]
) -> None:
    """30 full-batch steps; at every third boundary each fragment adopts `adopted(values, step)`."""
    parameters = ModuleParameters(model)
    table = build_table(parameters.layout, 2)
    for step in range(30):
        train_step(model, optimizer)
        parameters.check_adopted()
        for fragment in table if step % 3 == 0 else ():
            parameters.adopt(fragment, adopted(read(parameters, fragment), step))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_master_weights_are_found(dtype: torch.dtype) -> None:
    model = small(dtype=dtype)
    with pytest.raises(LocalProtocolError, match="master weights") as caught:
        train(model, MasterSGD(model, lr=1e-3), lambda values, _: values * np.float32(0.9))
    assert caught.value.code == ErrorCode.MISUSE
    assert "torch.autocast" in caught.value.remedy


def test_one_undone_adoption_is_no_proof() -> None:
    model = small()
    train(
        model,
        MasterSGD(model, lr=1e-3),
        lambda values, step: values * np.float32(0.9 if step == 9 else 1.0),
    )


@pytest.mark.parametrize("lr", [1e-3, 1.0])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_honest_optimizers_are_not_blamed(
    kind: type[torch.optim.SGD | torch.optim.AdamW], lr: float, dtype: torch.dtype
) -> None:
    model = small(dtype=dtype)
    generator = np.random.default_rng(1)

    def moved(values: F32, _: int) -> F32:
        return np.add(values, generator.normal(0, 0.02, values.size), dtype=np.float32)

    train(model, kind(model.parameters(), lr=lr), moved)


def test_an_adoption_one_step_long_is_not_taken_for_undone() -> None:
    """Adopting what was one step ago, on one batch, makes the next step go just where we were."""
    model = small()
    parameters = ModuleParameters(model)
    (fragment,) = build_table(parameters.layout, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    distances: list[tuple[float, float]] = []
    for _ in range(6):
        old = read(parameters, fragment)
        for _ in range(4):
            before = read(parameters, fragment)
            train_step(model, optimizer)
            parameters.check_adopted()
            old = before
        there = read(parameters, fragment)
        parameters.adopt(fragment, old)
        train_step(model, optimizer)
        parameters.check_adopted()
        back = read(parameters, fragment)
        distances.append((float(abs(back - there).max()), float(abs(back - old).max())))
    assert all(to_there * 100 < to_old for to_there, to_old in distances)
