"""Trainer of transformers in a run: a small Llama, made from a config, that learns to count.

narrows broker --goal-tokens 4e5 --set run.learners_at_start=2 --state-dir runs/trainer
python examples/hf_trainer.py site-a & python examples/hf_trainer.py site-b

It needs `pip install '.[transformers]'`. With a key in NARROWS_KEY the broker's address comes
from the key's file.
"""

from __future__ import annotations

import logging
import os
import sys

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from narrows.integrations.transformers import joined
from narrows.learner import NarrowsError

CONTEXT = 64


class Counting(Dataset[dict[str, Tensor]]):
    """Rows that count from a random number; put your data here."""

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = (torch.randint(0, 256, (1,)) + torch.arange(CONTEXT)) % 256
        return {"input_ids": ids, "labels": ids}


def train(name: str) -> None:
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=CONTEXT,
    )  # fmt: skip
    arguments = TrainingArguments(
        output_dir=f"{name}-trainer", max_steps=5000,  # Above what the run takes.
        per_device_train_batch_size=16, learning_rate=3e-3, lr_scheduler_type="cosine",
        warmup_steps=0.05, logging_steps=20, save_strategy="no", report_to=[],
    )  # fmt: skip
    trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=Counting())
    # With a key there is no need for an address: the key's file has the broker's.
    broker = None if os.environ.get("NARROWS_KEY") else "tcp://127.0.0.1:7070"
    with joined(trainer, broker=broker, name=name):
        trainer.train()
    trainer.save_model(name)
    print(f"{name}: the run's model is in the folder {name}")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: hf_trainer.py NAME")
    try:
        train(sys.argv[1])
    except (NarrowsError, KeyboardInterrupt) as error:
        sys.exit(f"{sys.argv[1]}: {str(error) or 'interrupted'}")
