"""Lightning's Trainer in a run: any LightningModule and one callback.

narrows broker --goal-tokens 4e5 --set run.learners_at_start=2 --state-dir runs/lightning
python examples/lightning_fit.py site-a & python examples/lightning_fit.py site-b

It needs `pip install '.[lightning]'`. With a key in NARROWS_KEY the broker's address comes
from the key's file.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from narrows.integrations.lightning import NarrowsCallback
from narrows.learner import NarrowsError

CONTEXT = 64


class Counting(Dataset[Tensor]):
    """Rows that count from a random number; put your data here."""

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> Tensor:
        return (torch.randint(0, 256, (1,)) + torch.arange(CONTEXT)) % 256


class Model(LightningModule):
    """Predicts a number from the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 256))

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        logits = self.net(batch[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-3, betas=(0.9, 0.95))


def train(name: str) -> None:
    # With a key there is no need for an address: the key's file has the broker's.
    broker = None if os.environ.get("NARROWS_KEY") else "tcp://127.0.0.1:7070"
    # A batch is a tensor here; of one with input_ids the tokens would be counted without `tokens`.
    ours = NarrowsCallback(broker=broker, name=name, tokens=lambda batch: batch.numel())
    trainer = Trainer(
        max_epochs=1000,  # Above what the run takes.
        callbacks=[ours], logger=False, enable_checkpointing=False, enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(Model(), DataLoader(Counting(), batch_size=16))
    trainer.save_checkpoint(f"{name}.ckpt")
    print(f"{name}: the run's model is in {name}.ckpt")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: lightning_fit.py NAME")
    try:
        train(sys.argv[1])
    except (NarrowsError, KeyboardInterrupt) as error:
        sys.exit(f"{sys.argv[1]}: {str(error) or 'interrupted'}")
