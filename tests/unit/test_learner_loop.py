"""The training loop's side of a learner, without an exchange: tokens, losses, the watch over the
weights, and torch modules as the exchange sees them: layout, reading, writing, saving; the rule of
an adoption, snapshots and their codes, in host memory and as on a GPU."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from narrows.learner import loop, weights
from narrows.learner import parameters as parameters_module
from narrows.learner.gpu import TorchIsland
from narrows.learner.parameters import Parameters
from narrows.learner.weights import WeightWatch
from narrows.proto.codec import F32, decode_chunk, values_of
from narrows.proto.errors import ConfigError, ErrorCode, LocalProtocolError
from narrows.proto.layout import Fragment, build_table
from narrows.proto.messages import CodecName, RunSettings
from narrows.proto.ports import Adoption, CodedPush, Copy

torch.set_num_threads(1)

VOCABULARY, WIDTH = 11, 6


class Small(nn.Module):
    """Embedding, hidden layer, norm, head (tied on request), a scalar and two buffers."""

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


def loss_of(model: nn.Module) -> Tensor:
    """Loss of one full batch of VOCABULARY tokens."""
    tokens = torch.arange(VOCABULARY)
    return nn.functional.cross_entropy(model(tokens).float(), tokens.flip(0))


def compiled(module: nn.Module) -> nn.Module:
    """As torch.compile wraps it, without the minutes that code takes."""
    result: Any = torch.compile(module, backend="eager")
    assert isinstance(result, nn.Module)
    return result


# Tokens, losses, optimizers.


def test_gradient_accumulation_is_one_step_with_the_mean_loss_of_its_tokens() -> None:
    log = loop.StepLog()
    log.add(1, 4.0)
    log.add(3, torch.tensor(8.0, requires_grad=True))
    assert log.take() == (4, 7.0)
    log.add(5, 1.0)
    log.discard()
    assert log.take() == (0, 7.0), "nothing new was learned"


@pytest.mark.parametrize(
    ("tokens", "loss", "word"),
    [
        (0, None, "positive"), (torch.tensor(3), None, "batch.numel()"),
        (3, torch.zeros(2), "loss.mean()"),
    ],
)  # fmt: skip
def test_what_cannot_be_logged_names_the_remedy(tokens: Any, loss: Any, word: str) -> None:
    with pytest.raises(LocalProtocolError, match=word) as caught:
        loop.StepLog().add(tokens, loss)
    assert caught.value.code is ErrorCode.MISUSE


class OnDevice(Tensor):
    """Acts like a tensor elsewhere: any look at its value raises."""

    is_cpu = False

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        assert func not in (Tensor.item, Tensor.__float__, Tensor.__bool__, Tensor.cpu)
        base: Any = super()
        result = base.__torch_function__(func, types, args, kwargs or {})
        if func is Tensor.to:
            assert kwargs == {"non_blocking": True}
            return result.clone().as_subclass(Tensor)
        return result


def test_a_loss_on_a_device_is_never_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    arrived = [False, True, True]
    event = SimpleNamespace(query=lambda: arrived.pop(0), record=lambda stream: None)
    monkeypatch.setattr(torch, "Event", lambda device: event)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: None)
    log, seen = loop.StepLog(), []
    for value in (1.0, 2.0, 3.0, 4.0):
        log.add(3, torch.tensor(value).as_subclass(OnDevice))
        log.add(1, torch.tensor(value + 4.0).as_subclass(OnDevice))
        seen.append(log.take()[1])
    assert seen == [None, None, 2.0, 4.0] and not arrived


def test_a_logged_loss_keeps_no_graph() -> None:
    log, source = loop.StepLog(), torch.tensor(1.0, requires_grad=True)
    leaf = weakref.ref(source)
    log.add(2, (source * 1.0).as_subclass(OnDevice))
    del source
    gc.collect()
    assert leaf() is None


class Accelerated(torch.optim.Optimizer):
    """Accelerate's wrapper: an Optimizer by its type, whose constructor never ran."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups


def test_optimizers_in_lists_and_wrappers() -> None:
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    a, b = (torch.optim.SGD(part.parameters(), lr=0.1) for part in model)
    assert loop.bare_optimizers([a, b]) == [a, b]
    assert loop.bare_optimizers(SimpleNamespace(optimizer=a)) == [a]
    assert loop.bare_optimizers(Accelerated(a)) == [a], "nothing can be hooked to the wrapper"
    assert loop.bare_optimizers(SimpleNamespace(optimizers=[a, SimpleNamespace(optimizer=b)])) == [
        a, b,
    ]  # fmt: skip
    for wrong in ([], None, model, [None]):
        with pytest.raises(LocalProtocolError, match=r"torch\.optim\.Optimizer"):
            loop.bare_optimizers(wrong)


def test_the_length_of_the_ramp() -> None:
    parameters = list(nn.Linear(2, 2).parameters())
    adam = torch.optim.AdamW(parameters, betas=(0.9, 0.99))
    momentum = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    plain = torch.optim.SGD(parameters, lr=0.1)
    assert loop.ramp_steps([plain]) == 0
    assert loop.ramp_steps([momentum]) == loop.RAMP_STEPS_MIN
    assert loop.ramp_steps([plain, adam]) == 100
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    adam.step()
    assert loop.ramp_steps([adam]) == 0, "it has its state"


# The watch over the weights.


class Watched:
    """A model, its optimizer, and the watch, in the order of the Learner's hooks."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        self.model = model
        self.optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.watch = WeightWatch(Parameters(model), [self.optimizer])
        self.watch.start()

    def step(self, adopt: Callable[[Tensor], Tensor] | None = None) -> None:
        self.optimizer.zero_grad()
        loss_of(self.model).backward()  # type: ignore[no-untyped-call]
        self.watch.before_step()
        self.optimizer.step()
        self.watch.stepped()
        if adopt is not None:
            self.watch.adopted()
            with torch.no_grad():
                for tensor in self.model.parameters():
                    tensor.copy_(adopt(tensor))
        self.watch.boundary_over()


class MasterSGD(torch.optim.SGD):
    """SGD on float32 copies of its own, which it writes over the parameters at each step."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=1e-3)
        self.masters = [p.detach().float().clone() for p in model.parameters()]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for master, parameter in zip(self.masters, self.param_groups[0]["params"], strict=True):
            master -= 1e-3 * parameter.grad.float()
            parameter.copy_(master)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_optimizer_with_master_weights_is_named(dtype: torch.dtype) -> None:
    model = small(dtype=dtype)
    watched = Watched(model, MasterSGD(model))
    with pytest.raises(LocalProtocolError, match=r"master weights.*torch\.autocast"):
        for step in range(30):
            watched.step((lambda tensor: tensor * 0.9) if step % 3 == 2 else None)
    model = small()
    one = Watched(model, MasterSGD(model))
    for step in range(30):
        one.step((lambda tensor: tensor * 0.9) if step == 9 else None)


@pytest.mark.parametrize("lr", [1e-3, 0.1])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_honest_optimizer_is_not_blamed(kind: Any, lr: float, dtype: torch.dtype) -> None:
    model = small(dtype=dtype)
    watched = Watched(model, kind(model.parameters(), lr=lr))
    for step in range(30):
        watched.step((lambda t: t + 0.02 * torch.randn_like(t)) if step % 3 == 0 else None)
    assert all(tensor.isfinite().all() for tensor in model.parameters())


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_step_that_leads_back_by_chance_is_not_blamed(kind: Any) -> None:
    """To adopt what was one step ago makes the next step go where we were."""
    model = small()
    watched = Watched(model, kind(model.parameters(), lr=1e-2))
    for step in range(12):
        past = iter([tensor.detach().clone() for tensor in model.parameters()])

        def back(_: Tensor, past: Iterator[Tensor] = past) -> Tensor:
            return next(past)

        watched.step(back if step % 3 == 2 else None)
    assert watched.watch._kept == 0, "none of these adoptions is long enough to be judged"


def test_the_elements_that_are_watched_are_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each one costs a few kernels on a GPU, and time of the training loop everywhere."""
    watched, found = Watched(small()), list[Tensor]()
    watched.step()
    monkeypatch.setattr(weights, "_elements", found.append)
    watched.step()
    assert not found


def test_averaged_weights_that_are_left_in_are_noticed(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched(small())
    own = [tensor.detach().clone() for tensor in watched.model.parameters()]
    watched.step()

    def swap_in(values: list[Tensor]) -> None:
        with torch.no_grad():
            for tensor, value in zip(watched.model.parameters(), values, strict=True):
                tensor.copy_(value)

    trained = [tensor.detach().clone() for tensor in watched.model.parameters()]
    swap_in(own)
    swap_in(trained)
    watched.step()
    assert not caplog.records, "swapped in and back"
    for _ in range(2):
        swap_in(own)
        watched.step()
    (line,) = caplog.messages
    assert "swap them back" in line
    caplog.clear()
    model = small()
    moved = Watched(model)
    moved.step()
    model.head.weight.data = torch.zeros(model.head.weight.shape)
    moved.step()
    assert len(caplog.records) == 1, "other memory is another value, too"


def test_buffers_that_change_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    model = small()
    watched = Watched(model)
    model.cache.fill_(9)  # Not persistent.
    watched.step()
    assert not caplog.records
    model.offset.fill_(9)
    for _ in range(2):
        watched.watch.look_at_buffers()
    (line,) = caplog.messages
    assert "do not travel" in line and "offset" in line


def test_parameters_that_train_and_do_not_travel_are_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = small()
    model.hidden.requires_grad_(False)
    watched = Watched(model)
    watched.step()
    model.hidden.requires_grad_(True)
    with pytest.raises(LocalProtocolError, match=r"'hidden\.weight', 'hidden\.bias'"):
        watched.step()
    late = WeightWatch(Parameters(small()), [watched.optimizer])
    with pytest.raises(LocalProtocolError, match="no parameter of this model"):
        late.start()
    outside = nn.Parameter(torch.ones(3))
    whole = small()
    Watched(whole, torch.optim.SGD([*whole.parameters(), outside], lr=0.1)).step()
    (line,) = caplog.messages
    assert "shape (3,) outside of the model" in line


# Parameters.


def noise(fragment: Fragment, seed: int = 0) -> F32:
    return np.random.default_rng(seed).standard_normal(fragment.elements, np.float32)


def read(parameters: Parameters, fragment: Fragment) -> F32:
    out = np.full(fragment.elements, np.nan, np.float32)
    parameters.read(fragment, out)
    return out


def rules(parameters: Parameters) -> dict[str, str]:
    return {entry.name: entry.rule for entry in parameters.layout.entries}


def test_tied_weights_travel_once_and_wrappers_leave_no_trace() -> None:
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
    twins, inside = small(tied=False), small()
    twins.head.weight = nn.Parameter(twins.table.weight.data)
    inside.set_submodule("hidden", compiled(inside.hidden))
    wrapped = nn.DataParallel(small())
    for model in (twins, inside, compiled(small()), wrapped, compiled(wrapped)):
        assert Parameters(model).layout == parameters.layout
    other = nn.ModuleDict({"module": nn.Linear(2, 2), "other": nn.Linear(2, 2)})
    assert Parameters(other).layout.entries[0].name == "module.weight"


def test_merge_rules() -> None:
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
    model = small()
    model.hidden.requires_grad_(False)
    model.norm.bias.requires_grad_(False)
    layout = Parameters(model).layout
    assert [entry.name for entry in layout.entries] == ["gain", "table.weight", "norm.weight"]
    hasher, state = xxhash.xxh3_64(), model.state_dict()
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


@pytest.mark.parametrize("make", [small, strided])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_are_written_in_place_rounded_and_where_the_layout_says(
    make: Callable[[], nn.Module], dtype: torch.dtype
) -> None:
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


class Lonely(nn.Module):
    """A module with one parameter."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.only = nn.Parameter(value)


def transposed_twins() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 4, bias=False))
    encoder, decoder = list(model.parameters())
    decoder.data = encoder.data.t()
    return model


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (transposed_twins, "share memory in different shapes"),
        (lambda: nn.Linear(2, 2, device="meta"), "meta device"),
        (lambda: nn.Linear(2, 2, dtype=torch.float64), "float64"),
        (lambda: Lonely(torch.eye(3).to_sparse()), "sparse"),
        (lambda: Lonely(torch.ones(0, 3)), "no elements"),
        (lambda: nn.LazyLinear(3), "forward pass"),
        (lambda: nn.Linear(2, 2).requires_grad_(False), "no trainable parameter"),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_models_that_cannot_be_exchanged_are_refused_with_a_remedy(
    make: Callable[[], nn.Module], word: str
) -> None:
    with pytest.raises(LocalProtocolError, match=word) as caught:
        Parameters(make())
    assert caught.value.code is ErrorCode.MISUSE and caught.value.remedy


def test_separate_parts_of_one_memory_are_fine() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    memory = torch.zeros(8, 4)
    for index, linear in enumerate(model):
        linear.weight = nn.Parameter(memory[4 * index : 4 * index + 4])
    assert list(rules(Parameters(model))) == ["0.weight", "1.weight"]


def test_saved_state_loads_strictly(tmp_path: Path) -> None:
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


def test_saving_copies_only_what_shares_memory_or_lies_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest models of a machine are saved, too."""
    saved: dict[str, Tensor] = {}
    monkeypatch.setattr(
        parameters_module,
        "save_file",
        lambda tensors, path, metadata: (saved.update(tensors), save_file(tensors, path)),
    )
    model = nn.ModuleDict({"small": small(), "strided": strided()})
    Parameters(model).save(tmp_path / "model.safetensors", {})
    state = model.state_dict()
    moved = {name for name, value in saved.items() if value.data_ptr() != state[name].data_ptr()}
    assert moved == {"small.head.weight", "strided.conv.weight", "strided.linear.weight"}


def test_buffers_whose_sign_torch_has_not_written_yet_are_saved_as_they_read(
    tmp_path: Path,
) -> None:
    model, waves = nn.Linear(2, 2), torch.complex(torch.ones(3), torch.arange(3.0))
    model.register_buffer("conjugated", waves.conj())
    model.register_buffer("negated", waves.conj().imag.view(3))
    Parameters(model).save(tmp_path / "model.safetensors", {})
    saved = load_file(tmp_path / "model.safetensors")
    assert saved["conjugated"].imag.tolist() == saved["negated"].tolist() == [0.0, -1.0, -2.0]


def test_a_state_that_safetensors_cannot_hold_leaves_nothing_behind(tmp_path: Path) -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"a": 1}

    with pytest.raises(LocalProtocolError, match="_extra_state"):
        Parameters(Extra(2, 2)).save(tmp_path / "model.safetensors", {})
    assert list(tmp_path.iterdir()) == []


SETTINGS = RunSettings(chunk_elements=512)
CPU, GPU = torch.device("cpu"), torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""Where the GPU's path runs: on a CPU the same torch expressions make the same bits."""


class Model(torch.nn.Module):
    """Three tensors in any precision."""

    def __init__(
        self,
        dtype: torch.dtype = torch.float32,
        *,
        transposed: bool = False,
        device: torch.device = CPU,
    ) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(30, 70, dtype=dtype))
        self.b = torch.nn.Parameter(torch.zeros(33, dtype=dtype))
        v = torch.zeros(111, 9, dtype=dtype).T if transposed else torch.zeros(9, 111, dtype=dtype)
        self.v = torch.nn.Parameter(v)
        self.to(device)


(FRAGMENT,) = build_table(Parameters(Model()).layout.entries, 1)


def filled(island: TorchIsland, values: F32) -> Copy:
    copy = island.copy(FRAGMENT, values)
    island.adopt(FRAGMENT, Adoption(copy, copy, None, 0.0, False))
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
    twin, worked = old.values.astype(np.float64), np.zeros(size)
    push: CodedPush | None = None
    merges = 0
    for _ in range(40):
        match rng.integers(4 if push is None else 3):
            case 0:
                step = (0.1 * rng.standard_normal(size)).astype(np.float32)
                parameters.write(FRAGMENT, island.read(FRAGMENT) + step)
                twin, worked = np.add(twin, step), worked + step
            case 1 | 2:
                moved = old.values + 0.05 * rng.standard_normal(size).astype(np.float32)
                new, merged = island.copy(FRAGMENT, moved), bool(push) and rng.random() < 0.5
                island.adopt(FRAGMENT, Adoption(old, new, push, keep, merged))
                mine = coded(push).astype(np.float64)
                kept = keep * (twin - old.values + mine)
                twin = new.values + kept - (0.0 if merged else mine)
                worked += mine if merged else 0.0
                old, push, merges = new, None if merged else push, merges + merged
            case _:
                push = island.snapshot(FRAGMENT, old, 0, SETTINGS)()
        params = island.read(FRAGMENT)
        np.testing.assert_allclose(params, twin, rtol=1e-5, atol=2e-6)
        if keep == 1.0:
            np.testing.assert_allclose(params - old.values, worked, rtol=1e-4, atol=1e-5)
    assert merges > 1


def test_a_copy_that_is_taken_outright_has_the_published_bits() -> None:
    island, rng = TorchIsland(Parameters(Model())), np.random.default_rng(0)
    values = rng.standard_normal(FRAGMENT.elements).astype(np.float32)
    old = filled(island, np.full_like(values, np.nan))
    island.adopt(FRAGMENT, Adoption(old, island.copy(FRAGMENT, values), None, 0.0, False))
    assert island.read(FRAGMENT).tobytes() == values.tobytes()


def test_parameters_that_are_not_finite_are_not_pushed_from_a_gpu() -> None:
    model = Model(device=GPU)
    island = TorchIsland(Parameters(model), on_device=True)
    old = filled(island, np.zeros(FRAGMENT.elements, np.float32))
    with torch.no_grad():
        model.v[2, 3] = float("nan")
    with pytest.raises(LocalProtocolError) as caught:
        island.snapshot(FRAGMENT, old, 0, SETTINGS)()
    assert caught.value.code is ErrorCode.NOT_FINITE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("on_device", [False, True])
def test_the_rounding_of_parameters_does_not_travel(dtype: torch.dtype, on_device: bool) -> None:
    model = Model(dtype, device=GPU if on_device else CPU)
    island, rng = TorchIsland(Parameters(model), on_device=on_device), np.random.default_rng(1)
    old = filled(island, rng.standard_normal(FRAGMENT.elements).astype(np.float32))
    new = island.copy(FRAGMENT, rng.standard_normal(FRAGMENT.elements).astype(np.float32))
    island.adopt(FRAGMENT, Adoption(old, new, None, 0.5, False))
    push = island.snapshot(FRAGMENT, new, 1, SETTINGS)()
    assert not coded(push).any()
    with torch.no_grad():
        model.w.add_(1.0)
    push = island.snapshot(FRAGMENT, new, 1, SETTINGS)()
    moved = np.flatnonzero(coded(push))
    assert moved.size and moved.max() < 30 * 70


@pytest.mark.parametrize("codec", ["int4-zstd", "int8-zstd", "f32-blosc2"])
@pytest.mark.parametrize("transposed", [False, True])
def test_the_gpu_path_has_the_bits_of_the_cpu(codec: CodecName, transposed: bool) -> None:
    """Payloads, and parameters after adoptions, bit for bit; without a GPU on its twin."""
    rng, settings = np.random.default_rng(2), replace(SETTINGS, push_codec=codec)
    start = rng.standard_normal(FRAGMENT.elements).astype(np.float32)
    work = 1e-3 * rng.standard_normal(FRAGMENT.elements).astype(np.float32)
    work[: 30 * 70] = 0.0  # A spike among zeros: the samples miss it.
    work[1234] = 7.0
    results = []
    for on_device in (False, True):
        device = GPU if on_device else CPU
        parameters = Parameters(Model(transposed=transposed, device=device))
        island = TorchIsland(parameters, on_device=on_device)
        old = filled(island, start)
        parameters.write(FRAGMENT, start + work)
        push = island.snapshot(FRAGMENT, old, 0, settings)()
        bits = [chunk.payload for chunk in push.chunks]
        for merged in (False, True):
            new = island.copy(FRAGMENT, old.values * np.float32(1.01))
            island.adopt(FRAGMENT, Adoption(old, new, push, 0.5, merged))
            bits.append(island.read(FRAGMENT).tobytes())
            old = new
        results.append(bits)
        assert coded(push)[1234] != 0.0
        for index, chunk in enumerate(push.chunks):  # What travels is what was kept.
            there = decode_chunk(FRAGMENT, codec, 512, index, chunk.payload)
            assert there.codes.tobytes() == chunk.decoded.codes.tobytes()
    assert results[0] == results[1]
