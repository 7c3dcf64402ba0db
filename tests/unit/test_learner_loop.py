"""Tokens and losses that a user's loop logs, and the optimizers that it trains with."""

import gc
import weakref
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace
from typing import Any, ClassVar, Self

import pytest
import torch
from torch import Tensor, nn

from narrows.learner import loop
from narrows.proto.errors import ErrorCode, LocalProtocolError


def test_gradient_accumulation_is_one_step_with_the_mean_loss_of_its_tokens() -> None:
    """Holds `StepLog.take`."""
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
    """Holds `StepLog.add`."""
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
    """Holds `StepLog.take`."""
    arrived = [False, True, True]
    event = SimpleNamespace(query=lambda: arrived.pop(0), record=lambda stream: None)
    monkeypatch.setattr(torch, "Event", lambda device: event)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: None)
    log = loop.StepLog()
    seen = []
    for value in (1.0, 2.0, 3.0, 4.0):
        log.add(3, torch.tensor(value).as_subclass(OnDevice))
        log.add(1, torch.tensor(value + 4.0).as_subclass(OnDevice))
        seen.append(log.take()[1])
    assert seen == [None, None, 2.0, 4.0] and not arrived


def test_a_logged_loss_keeps_no_graph() -> None:
    """Holds `StepLog.add`."""
    log = loop.StepLog()
    source = torch.tensor(1.0, requires_grad=True)
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


class Container(torch.optim.Optimizer):
    """torchtitan's container: an Optimizer whose constructor ran, and that never has a state."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = list(optimizers)
        groups = [group for each in optimizers for group in each.param_groups]
        super().__init__([tensor for group in groups for tensor in group["params"]], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for optimizer in self.optimizers:
            optimizer.step()


def test_a_container_is_not_taken_for_the_optimizers_that_it_holds() -> None:
    """Holds `bare_optimizers`: by the container's own empty state each restart would warm up."""
    layer = nn.Linear(2, 2)

    def contained() -> Container:
        return Container(torch.optim.AdamW(layer.parameters(), betas=(0.9, 0.95)))

    container = contained()
    assert loop.bare_optimizers(container) == container.optimizers
    assert loop.ramp_steps(loop.bare_optimizers(container)) == 20
    layer(torch.ones(2)).sum().backward()
    container.step()
    loaded = contained()
    loaded.optimizers[0].load_state_dict(container.optimizers[0].state_dict())
    assert loop.ramp_steps(loop.bare_optimizers(loaded)) == 0


def test_optimizers_in_lists_and_wrappers() -> None:
    """Holds `bare_optimizers`."""
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    a, b = (torch.optim.SGD(part.parameters(), lr=0.1) for part in model)
    assert loop.bare_optimizers([a, b]) == [a, b]
    assert loop.bare_optimizers(SimpleNamespace(optimizer=a)) == [a]
    assert loop.bare_optimizers(Accelerated(a)) == [a], "nothing can be hooked to the wrapper"
    nested = SimpleNamespace(optimizers=[a, SimpleNamespace(optimizer=b)])
    assert loop.bare_optimizers(nested) == [a, b]
    for wrong in ([], None, model, [None]):
        with pytest.raises(LocalProtocolError, match=r"torch\.optim\.Optimizer"):
            loop.bare_optimizers(wrong)


def test_the_length_of_the_ramp() -> None:
    """Holds `ramp_steps`."""
    parameters = list(nn.Linear(2, 2).parameters())
    adam = torch.optim.AdamW(parameters, betas=(0.9, 0.999))
    momentum = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    plain = torch.optim.SGD(parameters, lr=0.1)
    assert loop.ramp_steps([plain]) == 0
    assert loop.ramp_steps([momentum]) == 20
    assert loop.ramp_steps([plain, adam]) == 20, "whatever its beta2"
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    adam.step()
    assert loop.ramp_steps([adam]) == 0, "it has its state"


class Killed(Exception):
    """Ends a life of the example."""


class DoomedLearner:
    """Stands in for a Learner whose process is killed after `STEPS` steps."""

    STEPS = 20
    rows: ClassVar[list[bytes]] = []
    """The rows that all lives have trained on."""
    began_warm: ClassVar[list[bool]] = []
    """Whether the optimizer of each life had its state at the beginning of the block."""
    progress = 0.0

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> None:
        self.began_warm.append(bool(optimizer.state))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def until_end(self, loader: Iterator[Tensor]) -> Iterator[Tensor]:
        for batch in islice(loader, self.STEPS):
            self.rows.extend(row.numpy().tobytes() for row in batch)
            yield batch
        raise Killed

    def log(self, tokens: int, loss: Tensor) -> None:
        pass


def test_a_life_of_the_example_goes_on_in_the_data_where_the_one_before_was_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    example = run_path(str(Path(__file__).parents[2] / "examples" / "train.py"))
    train = example["train"]
    saved_every = 4
    monkeypatch.setitem(train.__globals__, "Learner", DoomedLearner)
    monkeypatch.setitem(train.__globals__, "SAVED_EVERY", saved_every)
    for _ in range(3):
        with pytest.raises(Killed):
            train("site-a")
    rows = DoomedLearner.rows
    assert len(rows) == 3 * DoomedLearner.STEPS * example["BATCH"]
    repeats = len(rows) - len(set(rows))
    assert repeats <= 2 * (saved_every - 1) * example["BATCH"], "without: two lives of three"
    assert DoomedLearner.began_warm == [False, True, True]


class Twice(torch.optim.SGD):
    """An optimizer whose step calls that of its base class, and may raise."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        if closure is not None:
            closure()


def test_a_hook_runs_once_a_step_though_torch_runs_it_for_each_class() -> None:
    """Holds `once_a_step`; a step that raises does not disturb the next."""
    parameters = [torch.zeros(1, requires_grad=True)]
    torch.optim.SGD(parameters)
    optimizer = Twice(parameters, lr=1.0)
    calls: list[str] = []
    bare: list[str] = []
    optimizer.register_step_pre_hook(loop.once_a_step(optimizer, lambda: calls.append("before")))
    optimizer.register_step_post_hook(loop.once_a_step(optimizer, lambda: calls.append("after")))
    optimizer.register_step_post_hook(lambda *_: bare.append("after"))
    optimizer.step()
    assert bare == ["after", "after"], "torch has mended this: once_a_step can go"
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    optimizer.step()
    assert calls == ["before", "after", "before", "before", "after"]
