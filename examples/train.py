"""The smallest training loop that takes part in a run: any module, any optimizer, one address.

narrows broker --goal-tokens 2e6 --set run.learners_at_start=2 --state-dir runs/example
python examples/train.py site-a & python examples/train.py site-b

With a key in NARROWS_KEY the broker's address comes from the key's file. After a kill type the same
command again: the parameters come from the run, and NAME.pt has the rest, which is the optimizer's
state and the place in the data.
"""

from __future__ import annotations

import itertools
import logging
import os
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from narrows.learner import Learner, NarrowsError

BATCH = 16
CONTEXT = 64
SAVED_EVERY = 100
"""Steps between two savings. After a kill as many batches, at most, are trained on again."""


def batches(name: str, first: int) -> Iterator[torch.Tensor]:
    """Random bytes, other ones for each name; put your loader here. It goes on at batch `first`, so
    that another life of this learner does not begin with the same batches again."""
    for index in itertools.count(first):
        generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {index}".encode()))
        yield torch.randint(0, 256, (BATCH, CONTEXT + 1), generator=generator)


def load(path: Path, optimizer: torch.optim.Optimizer) -> int:
    """Loads what an earlier life has saved; returns the number of the next batch."""
    if not path.exists():
        return 0
    saved = torch.load(path)
    optimizer.load_state_dict(saved["optimizer"])
    return int(saved["batches"])


def save(path: Path, optimizer: torch.optim.Optimizer, count: int) -> None:
    """Saves the optimizer's state and the number of batches that it has seen."""
    unfinished = path.with_suffix(".new")
    torch.save({"optimizer": optimizer.state_dict(), "batches": count}, unfinished)
    os.replace(unfinished, path)  # A kill in the middle leaves the older file whole.


def train(name: str) -> None:
    model = nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    # With a key there is no need for an address: the key's file has the broker's.
    broker = None if os.environ.get("NARROWS_KEY") else "tcp://127.0.0.1:7070"
    saved = Path(f"{name}.pt")
    first = load(saved, optimizer)  # Before the block: with its state no optimizer warms up.
    with Learner(model, optimizer, broker=broker, name=name) as learner:
        for step, batch in enumerate(learner.until_end(batches(name, first)), start=first):
            logits = model(batch[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
            learner.log(tokens=batch[:, 1:].numel(), loss=loss)
            optimizer.step()
            optimizer.zero_grad()
            if step % SAVED_EVERY == 0:
                print(f"{name}: step {step}, loss {loss.item():.3f}, run {learner.progress:.0%}")
                save(saved, optimizer, step + 1)
    learner.save(f"{name}.safetensors")
    saved.unlink(missing_ok=True)  # The next run begins anew.
    print(f"{name}: the run's model is in {name}.safetensors")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: train.py NAME")
    try:
        train(sys.argv[1])
    except (NarrowsError, KeyboardInterrupt) as error:
        sys.exit(f"{sys.argv[1]}: {str(error) or 'interrupted'}")
