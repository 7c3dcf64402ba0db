"""A torch training loop against a live broker: what users of the library write."""

from __future__ import annotations

import threading
from collections.abc import Generator
from pathlib import Path

import pytest
import torch
from chaos.end_of_run import metadata
from running import HANG_S, broker_config, live_broker
from safetensors.torch import load_file
from torch import Tensor, nn

from narrows.broker.process.service import Service
from narrows.learner import Learner

ROWS, WIDTH, BATCH = 32, 16, 64

torch.set_num_threads(1)


class Tied(nn.Module):
    """Embedding and head share one weight; a hidden layer in bfloat16; a buffer stays at home."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH)
        self.hidden = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)
        self.head = nn.Linear(WIDTH, ROWS, bias=False)
        self.head.weight = self.table.weight
        self.scale = nn.Buffer(torch.ones(1))

    def forward(self, tokens: Tensor) -> Tensor:
        inner: Tensor = self.hidden(self.table(tokens).bfloat16())
        return torch.as_tensor(self.head(torch.tanh(inner).float() * self.scale))


@pytest.fixture
def service(tmp_path: Path) -> Generator[Service]:
    config = broker_config(
        tmp_path,
        run__goal_tokens=BATCH * 400,
        run__learners_at_start=2,
        fragments__sync_period_steps=10,
    )
    with live_broker(config) as service:
        yield service


def batches(seed: int) -> Generator[Tensor]:
    """Every token is followed by the next one in the table."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randint(0, ROWS, (BATCH,), generator=generator)


def compiled(model: nn.Module) -> nn.Module:
    """A compiled model. Compiling changes only names for us, and every backend changes those."""
    module = torch.compile(model, backend="eager")
    assert isinstance(module, nn.Module)
    return module


def train(service: Service, name: str, *, compile_it: bool, folder: Path) -> list[float]:
    """Trains until the goal with two optimizers; saves the model as NAME.safetensors."""
    torch.manual_seed(len(name))
    model = Tied()
    called = compiled(model) if compile_it else model
    optimizers = [
        torch.optim.SGD(model.hidden.parameters(), lr=0.1),
        torch.optim.AdamW(model.table.parameters(), lr=0.02),
    ]
    losses: list[float] = []
    pace = threading.Event()
    with Learner(called, optimizers, broker=service.wires.address, name=name) as learner:
        for tokens in learner.until_end(batches(len(name))):
            loss = nn.functional.cross_entropy(called(tokens), (tokens + 1) % ROWS)
            loss.backward()  # type: ignore[no-untyped-call]
            learner.log(tokens=tokens.numel(), loss=loss)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            if len(losses) == 1:
                learner.save(folder / f"{name}-checkpoint.safetensors")
            pace.wait(0.005)  # Nothing else would let the others keep up on one core.
    learner.save(folder / f"{name}.safetensors")
    with torch.no_grad():
        model.hidden.bias[0] += 1
    learner.save(folder / f"{name}-changed.safetensors")
    return losses


def test_tied_and_half_precision_weights_two_optimizers_and_compile(
    service: Service, tmp_path: Path
) -> None:
    # torch imports its compiler at the first use, which two threads must not do at once.
    compiled(Tied())(next(batches(0)))
    losses: dict[str, list[float]] = {}
    errors: list[BaseException] = []

    def work(name: str, compile_it: bool) -> None:
        try:
            losses[name] = train(service, name, compile_it=compile_it, folder=tmp_path)
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=work, args=item) for item in (("plain", False), ("compiled", True))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
        assert not thread.is_alive(), "a learner hangs"
    assert not errors, errors
    for values in losses.values():
        assert sum(values[-10:]) < 0.7 * sum(values[:10])
    assert [entry.name for entry in service.syncer.state.layout] == [
        "table.weight",
        "hidden.weight",
        "hidden.bias",
    ]
    states: list[dict[str, Tensor]] = [load_file(tmp_path / f"{n}.safetensors") for n in losses]
    for state in states:
        fresh = Tied()
        fresh.load_state_dict(state, strict=True)
        assert fresh.head.weight is fresh.table.weight
        assert fresh.hidden.weight.dtype == torch.bfloat16
    for name in states[0]:
        assert torch.equal(states[0][name], states[1][name]), name
    for name in losses:
        final = metadata(tmp_path / f"{name}.safetensors")
        assert final["narrows.final"] == "true"
        assert final["narrows.versions"] == str(list(service.syncer.state.versions))
        assert final["narrows.run"] == service.syncer.state.run_id
        assert final["narrows.goal_tokens"] == str(BATCH * 400)
        for other in ("checkpoint", "changed"):
            assert metadata(tmp_path / f"{name}-{other}.safetensors")["narrows.final"] == "false"
