"""Lightning's Trainer takes part in a run with one callback, whichever package it comes from."""

import logging
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import pytorch_lightning
import torch
from cli_cases import Narrows
from frameworks import lab
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import MixedPrecision
from run_cases import broker
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from narrows.bench.kit.processes import wait_until
from narrows.integrations.lightning import NarrowsCallback
from narrows.learner import LocalProtocolError

pytestmark = [
    pytest.mark.real,
    pytest.mark.filterwarnings("ignore"),  # Lightning has hints about the machine.
]

PACKAGES = {"lightning": lightning.pytorch, "pytorch_lightning": pytorch_lightning}


def module(package: Any = lightning.pytorch, *, manual: bool = False) -> Any:
    """A LightningModule whose parameters are those of lab.Toy."""

    class Module(package.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = lab.Toy().net
            self.automatic_optimization = not manual

        def training_step(self, batch: dict[str, Tensor], index: int) -> Any:
            loss = lab.next_token_loss(self.net, batch["input_ids"])
            if manual:
                for optimizer in self.optimizers():
                    optimizer.zero_grad()
                self.manual_backward(loss)
                for optimizer in self.optimizers():
                    optimizer.step()
            return loss

        def validation_step(self, batch: dict[str, Tensor], index: int) -> None:
            self.log("val_loss", lab.next_token_loss(self.net, batch["input_ids"]))

        def configure_optimizers(self) -> Any:
            if manual:
                halves = [self.net[:1].parameters(), self.net[1:].parameters()]
            else:
                halves = [self.parameters()]
            return [torch.optim.AdamW(each, lr=1e-3, betas=(0.9, 0.95)) for each in halves]

    return Module()


class Count(Callback):
    """Counts the positions of the batches by itself."""

    def __init__(self) -> None:
        self.tokens = 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *given: Any) -> None:
        self.tokens += given[1]["input_ids"].numel()


def trainer(folder: Path, *given: Any, package: Any = lightning.pytorch, **options: Any) -> Any:
    """A Trainer that ends at 50 epochs of 1,000 steps if nothing ends it before."""
    own = {
        "accelerator": "cpu", "devices": 1, "max_epochs": 50, "log_every_n_steps": 10,
        "logger": package.loggers.CSVLogger(folder, name="", version=""),
        "enable_progress_bar": False, "enable_model_summary": False,
        "enable_checkpointing": False, **options,
    }  # fmt: skip
    return package.Trainer(callbacks=[*given], **own)


def loader(rows: int = 4000) -> DataLoader[dict[str, Tensor]]:
    return DataLoader(lab.Rows(rows), batch_size=lab.BATCH)


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("accumulation", [1, 4])
def test_it_trains_in_a_run_with_one_callback(
    tmp_path: Path, package: str, accumulation: int
) -> None:
    count = Count()
    with lab.run(tmp_path, lab.Toy, 60e3) as run:
        ours = NarrowsCallback(broker=run.address, name="ours")
        training = trainer(
            tmp_path, count, ours, package=PACKAGES[package], accumulate_grad_batches=accumulation
        )
        training.fit(module(PACKAGES[package]), loader())
        run.check(ours.learner, count.tokens)
    assert 0 < training.callback_metrics["narrows/progress"] <= 1
    assert "narrows/merged_tokens" in (tmp_path / "metrics.csv").read_text()


def test_a_loop_of_its_own_with_two_optimizers_takes_part(tmp_path: Path) -> None:
    count = Count()
    with lab.run(tmp_path, lab.Toy, 60e3) as run:
        ours = NarrowsCallback(broker=run.address, name="ours")
        trainer(tmp_path, ours, count).fit(module(manual=True), loader())
        run.check(ours.learner, count.tokens)


def test_validation_is_a_pause_and_an_exception_leaves_nothing_behind(
    narrows: Narrows, tmp_path: Path
) -> None:
    seen: list[str] = []

    class Look(Callback):
        def look(self, state: str) -> None:
            wait_until(lambda: lab.state_of(narrows, run.address) == state, state)
            seen.append(state)

        def on_validation_batch_start(self, trainer: Any, *_: Any) -> None:
            if not trainer.sanity_checking:
                self.look("paused evaluating")

        def on_train_batch_end(
            self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int
        ) -> None:
            if index == 20:
                self.look("training")
                assert lab.learner_threads()
                raise RuntimeError("batch 20")

    with broker(tmp_path) as run:
        ours = NarrowsCallback(broker=run.address, name="ours")
        training = trainer(tmp_path, Look(), ours, val_check_interval=10, limit_val_batches=1)
        with pytest.raises(RuntimeError, match="batch 20"):
            training.fit(module(), loader(), loader(8))
        assert not lab.learner_threads()
        wait_until(
            lambda: lab.state_of(narrows, run.address).startswith("left"), "the broker to hear"
        )
        again = trainer(tmp_path, ours, max_steps=5)
        again.fit(module(), loader())
        assert ours.learner.stats()["steps"] == 5
    assert seen == ["paused evaluating"] * 2 + ["training"]


@pytest.mark.parametrize("other", ["swa", "ema", "early stop"])
def test_callbacks_that_end_or_average_leave_the_run_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, other: str
) -> None:
    """Averaged weights come in once the run is left, though their callback is listed first."""
    callback = {
        "swa": lambda: callbacks.StochasticWeightAveraging(swa_lrs=1e-3, swa_epoch_start=1),
        "ema": lambda: callbacks.EMAWeightAveraging(decay=0.9),
        "early stop": lambda: callbacks.EarlyStopping("val_loss", min_delta=99.0, patience=1),
    }[other]()
    saved: list[dict[str, Tensor]] = []

    class Keep(Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            saved.append({name: each.clone() for name, each in pl_module.state_dict().items()})

    with broker(tmp_path, run__goal_tokens=10**6) as run, caplog.at_level(logging.WARNING):
        ours = NarrowsCallback(broker=run.address, name="ours")
        model = module()
        training = trainer(tmp_path, Keep(), callback, ours, max_epochs=4)
        training.fit(model, loader(80), loader(8))
    averaged = other != "early stop"
    assert (
        any(not each.equal(saved[0][name]) for name, each in model.state_dict().items()) == averaged
    )
    assert "of the run's goal" in caplog.text
    assert "something else than the optimizer" not in caplog.text
    # Not one of its tokens is lost, and none is counted twice.
    assert run.events("merged")[-1]["run_tokens"] == training.global_step * lab.STEP_TOKENS


def test_a_checkpoint_brings_the_optimizers_state(tmp_path: Path) -> None:
    with broker(tmp_path) as run:
        first = NarrowsCallback(broker=run.address, name="ours")
        training = trainer(tmp_path, first, max_steps=40)
        training.fit(module(), loader())
        training.save_checkpoint(tmp_path / "last.ckpt")
        scales: list[float] = []

        class Note(Callback):
            def on_train_batch_start(self, *_: Any) -> None:
                scales.append(second.learner.lr_scale)

        second = NarrowsCallback(broker=run.address, name="ours")
        again = trainer(tmp_path, second, Note(), max_steps=60)
        again.fit(module(), loader(), ckpt_path=tmp_path / "last.ckpt")
        assert len(scales) == 20 and min(scales) == 1.0
        assert second.learner.stats()["lost_tokens"] == 0


def test_a_step_that_a_scaler_skips_is_not_counted(tmp_path: Path) -> None:
    precision = MixedPrecision("16-mixed", "cpu", scaler=lab.overflowing_scaler())
    with lab.run(tmp_path, lab.Toy, 60e3) as run:
        ours = NarrowsCallback(broker=run.address, name="ours")
        training = trainer(tmp_path, ours, plugins=[precision])
        training.fit(module(), loader())
        steps = ours.learner.stats()["steps"]
        assert 0 < steps < training.global_step
        run.check(ours.learner, steps * lab.STEP_TOKENS)


def test_what_cannot_be_counted_is_told_with_its_remedy(tmp_path: Path) -> None:
    with broker(tmp_path) as run, pytest.raises(LocalProtocolError, match=r"list.* tokens="):
        ours = NarrowsCallback(broker=run.address, name="ours")
        rows = DataLoader(TensorDataset(lab.Rows(8).ids))
        trainer(tmp_path, ours).fit(module(), rows)
