"""A loop with Accelerate in a run: it prepares, and the loop stays as it is.

narrows broker --goal-tokens 4e5 --set run.learners_at_start=2 --state-dir runs/accelerate
python examples/accelerate_loop.py site-a & python examples/accelerate_loop.py site-b

It needs `pip install '.[learner]' accelerate`. With a key in NARROWS_KEY the broker's address
comes from the key's file.
"""

from __future__ import annotations

import itertools
import logging
import os
import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

from narrows.learner import Learner, NarrowsError

CONTEXT = 64


def train(name: str) -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    rows = [(start + torch.arange(CONTEXT)) % 256 for start in range(256)]  # Put your data here.
    loader = DataLoader(rows, batch_size=16, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    epochs = itertools.chain.from_iterable(itertools.repeat(loader))
    # With a key there is no need for an address: the key's file has the broker's.
    broker = None if os.environ.get("NARROWS_KEY") else "tcp://127.0.0.1:7070"
    with Learner(model, optimizer, broker=broker, name=name) as learner:
        for batch in learner.until_end(epochs):
            with accelerator.accumulate(model):
                logits = model(batch[:, :-1])
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
                accelerator.backward(loss)
                learner.log(tokens=batch[:, 1:].numel(), loss=loss)
                optimizer.step()
                if optimizer.step_was_skipped:  # By the scaler of mixed_precision="fp16".
                    learner.discard()
                optimizer.zero_grad()
    learner.save(f"{name}.safetensors")
    print(f"{name}: the run's model is in {name}.safetensors")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: accelerate_loop.py NAME")
    try:
        train(sys.argv[1])
    except (NarrowsError, KeyboardInterrupt) as error:
        sys.exit(f"{sys.argv[1]}: {str(error) or 'interrupted'}")
