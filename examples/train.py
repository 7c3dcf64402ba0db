"""The smallest training loop that takes part in a run: any module, any optimizer, one address.

narrows broker --goal-tokens 2e6 --set run.learners_at_start=2 --state-dir runs/example
python examples/train.py site-a & python examples/train.py site-b

With a key in NARROWS_KEY the broker's address comes from the key's file.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator

import torch
from torch import nn

from narrows.learner import Learner, NarrowsError

BATCH = 16
CONTEXT = 64


def batches() -> Iterator[torch.Tensor]:
    """Random bytes; put your loader here."""
    while True:
        yield torch.randint(0, 256, (BATCH, CONTEXT + 1))


def train(name: str) -> None:
    model = nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    # With a key there is no need for an address: the key's file has the broker's.
    broker = None if os.environ.get("NARROWS_KEY") else "tcp://127.0.0.1:7070"
    with Learner(model, optimizer, broker=broker, name=name) as learner:
        for step, batch in enumerate(learner.until_end(batches())):
            logits = model(batch[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
            learner.log(tokens=batch[:, 1:].numel(), loss=loss)
            optimizer.step()
            optimizer.zero_grad()
            if step % 100 == 0:
                print(f"{name}: step {step}, loss {loss.item():.3f}, run {learner.progress:.0%}")
    learner.save(f"{name}.safetensors")
    print(f"{name}: the run's model is in {name}.safetensors")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: train.py NAME")
    try:
        train(sys.argv[1])
    except (NarrowsError, KeyboardInterrupt) as error:
        sys.exit(f"{sys.argv[1]}: {error or 'interrupted'}")
