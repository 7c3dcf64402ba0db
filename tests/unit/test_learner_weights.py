"""The watch over the weights: optimizers, averages and buffers that the exchange would miss."""

from collections.abc import Callable, Container, Iterator
from typing import Any

import pytest
import torch
from model_cases import loss_of, small
from torch import Tensor, nn

from narrows.learner import weights
from narrows.learner.parameters import Parameters
from narrows.learner.weights import WeightWatch
from narrows.proto.errors import LocalProtocolError


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
            self.watch.adopting()
            with torch.no_grad():
                for tensor in self.model.parameters():
                    tensor.copy_(adopt(tensor))
        self.watch.boundary_over()

    def train(self, adopt: Callable[[Tensor], Tensor], at: Container[int]) -> None:
        """Makes 30 steps, and adopts after those with these numbers."""
        for number in range(30):
            self.step(adopt if number in at else None)


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
    """Holds `WeightWatch.stepped`."""
    model = small(dtype=dtype)
    watched = Watched(model, MasterSGD(model))
    with pytest.raises(LocalProtocolError, match=r"master weights.*torch\.autocast"):
        watched.train(lambda tensor: tensor * 0.9, at=range(2, 30, 3))
    model = small()
    Watched(model, MasterSGD(model)).train(lambda tensor: tensor * 0.9, at=[9])


@pytest.mark.parametrize("lr", [1e-3, 0.1])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_honest_optimizer_is_not_blamed(kind: Any, lr: float, dtype: torch.dtype) -> None:
    """Holds `WeightWatch.stepped`."""
    model = small(dtype=dtype)
    watched = Watched(model, kind(model.parameters(), lr=lr))
    watched.train(lambda tensor: tensor + 0.02 * torch.randn_like(tensor), at=range(0, 30, 3))
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


def test_a_rate_that_rises_makes_coincidences_that_are_not_blamed() -> None:
    """The step that was measured at first is a hundredth of those that lead back by chance."""
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    watched = Watched(model, optimizer)
    watched.step()
    watched.step(lambda tensor: tensor)
    optimizer.param_groups[0]["lr"] = 1e-2
    for step in range(14):
        past = iter([tensor.detach().clone() for tensor in model.parameters()])

        def moved(tensor: Tensor, past: Iterator[Tensor] = past, step: int = step) -> Tensor:
            return tensor + 0.1 if step % 5 == 4 else next(past)

        watched.step(moved)
    assert watched.watch._undone >= 2, "some of these adoptions were undone, one after the other"


def test_the_elements_that_are_watched_are_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each one costs a few kernels on a GPU, and time of the training loop everywhere."""
    watched = Watched(small())
    found: list[Tensor] = []
    watched.step()
    monkeypatch.setattr(weights, "_elements", found.append)
    watched.step()
    assert not found


def test_averaged_weights_that_are_left_in_are_noticed(caplog: pytest.LogCaptureFixture) -> None:
    """Holds `WeightWatch.before_step`."""
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
    model.gain.data.fill_(torch.nan)
    moved.step()
    assert not moved.watch.changed(), "nobody but the optimizer has spoilt them"


def test_a_loop_that_clips_its_weights_after_each_step_leaves_its_own() -> None:
    """Holds `WeightWatch.is_foreign`."""
    clipped = Watched(small())
    swapped = Watched(small())

    def scale(watched: Watched) -> None:
        with torch.no_grad():
            for tensor in watched.model.parameters():
                tensor.mul_(0.9)

    for step in range(12):
        clipped.step()
        swapped.step()
        if step % 3 < 2:  # At times there is nothing to clip.
            scale(clipped)
        if step in (5, 11):
            scale(swapped)
    clipped.step()
    scale(clipped)
    assert clipped.watch.changed() and not clipped.watch.is_foreign()
    assert swapped.watch.is_foreign()


def test_buffers_that_change_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """Holds `WeightWatch.look_at_buffers`."""
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
    """Holds `WeightWatch.start`."""
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


def test_samples_of_a_model_that_was_elsewhere_are_forgotten(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Holds `WeightWatch.before_step`: a device cannot compare with what is on another one."""
    model = small()
    watched = Watched(model)
    watched.step()
    watched.step()
    watch = watched.watch
    assert watch._after is not None and watch._step is not None
    for name in ("_after", "_step"):
        setattr(watch, name, getattr(watch, name).to("meta"))
    model.head.weight.data = model.head.weight.detach().clone()
    watched.step()
    watched.step(lambda tensor: tensor + 0.1)
    assert not watch.changed() and not caplog.records
