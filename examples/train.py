"""The smallest training loop that takes part in a run: any module, any optimizer, one address.

narrows broker --goal-tokens 2e6
python examples/train.py site-a & python examples/train.py site-b
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from torch import nn

from narrows.learner import Learner

BATCH, CONTEXT = 16, 64


def batches() -> Iterator[torch.Tensor]:
    """Random bytes; put your loader here."""
    while True:
        yield torch.randint(0, 256, (BATCH, CONTEXT + 1))


torch.set_num_threads(1)
model = nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 256))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

with Learner(model, optimizer, broker="tcp://127.0.0.1:7070", name=sys.argv[1]) as learner:
    for batch in learner.until_end(batches()):
        logits = model(batch[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        learner.log(tokens=batch[:, 1:].numel(), loss=loss)
        optimizer.step()
        optimizer.zero_grad()
learner.save("model.safetensors")
