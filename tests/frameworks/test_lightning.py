"""Lightning's Trainer takes part in a run with one callback, whichever package it comes from."""

from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import pytorch_lightning
import torch
from frameworks import lab
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader

from narrows.integrations.lightning import NarrowsCallback

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


def trainer(folder: Path, *callbacks: Any, package: Any = lightning.pytorch, **options: Any) -> Any:
    """A Trainer that ends at 50 epochs of 1,000 steps if nothing ends it before."""
    own = {
        "accelerator": "cpu", "devices": 1, "max_epochs": 50, "log_every_n_steps": 10,
        "logger": package.loggers.CSVLogger(folder, name="", version=""),
        "enable_progress_bar": False, "enable_model_summary": False,
        "enable_checkpointing": False, **options,
    }  # fmt: skip
    return package.Trainer(callbacks=[*callbacks], **own)


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
