"""Whole runs with brokers of their own: weights that others swap in, optimizers of all kinds."""

import itertools
import threading
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from threading import BrokenBarrierError
from typing import Any

import pytest
import torch
from run_cases import STEP, Loop, broker, tiny
from torch import Tensor
from torch.optim import swa_utils

from narrows.bench.kit.processes import WAIT_S
from narrows.learner import Learner

pytestmark = pytest.mark.real


@pytest.mark.parametrize("goal", [0, 1000])
@pytest.mark.parametrize("decay", [None, 0.9], ids=["SWA", "EMA"])
def test_averaged_weights_that_are_swapped_in_before_the_block_is_left_are_not_pushed(
    decay: float | None, goal: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They are larger by 1 than what is trained: so far the run's model must not move."""
    with broker(tmp_path, run__goal_tokens=goal) as run:
        loop = Loop(run.address, "site-a")
        larger = tiny()
        with torch.no_grad():
            for tensor in larger.parameters():
                tensor.add_(1.0)
        ema: Any = swa_utils.get_ema_multi_avg_fn
        averaging = None if decay is None else ema(decay)
        averaged = swa_utils.AveragedModel(loop.model, multi_avg_fn=averaging)
        averaged.update_parameters(larger)
        with loop.learner as learner:
            parts = loop.exchange.link.host.session.parts
            loop.train_on(lambda: not goal and sum(part.steps for part in parts))
            loop.model.load_state_dict(averaged.module.state_dict())
        ended = loop if goal else Loop(run.address, "site-b", tiny(1))
        if not goal:
            swapped_in = averaged.module.state_dict()
            left = loop.model.state_dict()
            assert all(left[name].equal(tensor) for name, tensor in swapped_in.items())
            with ended.learner:
                pass  # It has the run's model.
    pairs = zip(ended.model.parameters(), tiny().parameters(), strict=True)
    assert max((now - begun).mean().item() for now, begun in pairs) < 0.1
    (line,) = [line for line in caplog.messages if "changed the parameters" in line]
    assert "are not pushed" in line and "Leave the block first" in line
    assert learner.stats()["lost_tokens"] > 0 or goal


COMPILES_S = 4 * WAIT_S
"""Longest wait for the first compiled step: it loads the compiler."""


class Life:
    """A learner that trains by optimizers of one kind, from the constructor to the final model."""

    KINDS = ("plain", "fused", "muon", "muon-last", "lbfgs", "scaler", "compiled")

    def __init__(self, kind: str, address: str) -> None:
        self.model = tiny()
        self._kind = kind
        self._optimizers = self._made()
        self._scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=kind == "scaler")
        self.learner = Learner(self.model, self._optimizers, broker=address, name=kind)
        self.tokens = self.skipped = self._batches = 0
        """`tokens` is an independent count of what the steps have learned from."""

    def _made(self) -> list[Any]:
        """The optimizers, in the order of their steps."""
        if self._kind == "lbfgs":
            return [torch.optim.LBFGS(self.model.parameters(), lr=1e-2, max_iter=2)]
        if "muon" not in self._kind:
            is_fused = self._kind == "fused"
            return [torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=is_fused)]
        matrices = [each for each in self.model.parameters() if each.dim() == 2]
        vectors = [each for each in self.model.parameters() if each.dim() != 2]
        both = [torch.optim.Muon(matrices, lr=1e-3), torch.optim.AdamW(vectors, lr=1e-3)]
        return both if self._kind == "muon" else both[::-1]

    def train(self, all_have_stepped: threading.Barrier) -> None:
        """The loop of the documentation. All wait for the first step of each: to compile one takes
        longer than a whole run of the others."""
        closure = [self._loss] if self._kind == "lbfgs" else []
        with self.learner as learner:
            if self._kind == "compiled":
                compiled = torch.compile(self._optimizers[0].step, backend="eager")
                self._optimizers[0].step = compiled
            for index in learner.until_end(itertools.count()):
                learner.log(tokens=8, loss=self._loss())
                scale = self._scaler.get_scale()
                for each in self._optimizers:
                    self._scaler.step(each, *closure)
                self._scaler.update()
                if self._scaler.get_scale() < scale:
                    learner.discard()
                    self.skipped += 1
                else:
                    self.tokens += 8
                if index == 0:
                    all_have_stepped.wait(COMPILES_S)
                STEP.wait(0.002)

    def _loss(self) -> Tensor:
        """The loss of a batch, and its gradients. Where a scaler is on, each fifth overflows."""
        self._batches += 1
        self.model.zero_grad()
        loss: Tensor = self.model(torch.randn(8, 32)).square().mean()
        if self._scaler.is_enabled() and self._batches % 5 == 0:
            loss = loss * torch.inf
        self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        return loss


@pytest.mark.timeout(200)
@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")  # The compiler's own.
def test_optimizers_of_every_kind_train_one_model_with_exact_tokens(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL", "torch.__trace")  # Megabytes of what the compiler does.
    count = len(Life.KINDS)
    settings = {"run__learners_at_start": count, "run__goal_tokens": 3200}
    with broker(tmp_path, **settings) as run, ThreadPoolExecutor(count) as pool:
        lives = [Life(kind, run.address) for kind in Life.KINDS]
        barrier = threading.Barrier(count)
        ends = [pool.submit(life.train, barrier) for life in lives]
        wait(ends, return_when=FIRST_EXCEPTION)
        barrier.abort()  # Where one has failed, the others wait in vain.
        errors = [each.exception() for each in ends]
        assert [each for each in errors if not isinstance(each, BrokenBarrierError)] == [
            None
        ] * count
        run.join()
    final = lives[0].model.state_dict()
    for life, kind in zip(lives, Life.KINDS, strict=True):
        stats = life.learner.stats()
        assert stats["logged_tokens"] == life.tokens >= stats["merged_tokens"] > 0, kind
        assert all(final[name].equal(each) for name, each in life.model.state_dict().items()), kind
        assert (life.skipped > 0) is (kind == "scaler")
