"""The training loop's side of a learner, without an exchange: tokens, losses, and the watch over
the weights."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from model_cases import loss_of, small
from torch import Tensor, nn

from narrows.learner import loop, weights
from narrows.learner.parameters import Parameters
from narrows.learner.weights import WeightWatch
from narrows.proto.errors import ErrorCode, LocalProtocolError


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


@pytest.mark.parametrize("lr", [1e-3, 1.0])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_honest_optimizer_is_not_blamed(kind: Any, lr: float, dtype: torch.dtype) -> None:
    model = small(dtype=dtype)
    watched = Watched(model, kind(model.parameters(), lr=lr))
    for step in range(30):
        watched.step((lambda t: t + 0.02 * torch.randn_like(t)) if step % 3 == 0 else None)
    values = [tensor.detach().clone() for tensor in model.parameters()]
    for step in range(12):  # To adopt what was one step ago makes the next step go where we were.
        past = iter(values)
        values = [tensor.detach().clone() for tensor in model.parameters()]

        def back(_: Tensor, past: Iterator[Tensor] = past) -> Tensor:
            return next(past)

        watched.step(back if step % 3 == 2 else None)


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
