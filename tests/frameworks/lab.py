"""What the tests of frameworks train: tiny models made from a config, rows that repeat, and a
second, plain learner in a process of its own, beside the one that the framework drives."""

import os

# Before a framework is imported: nothing is fetched, and nobody reports.
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", WANDB_MODE="disabled")

import logging
import sys
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import peft
import torch
import transformers
from acceptance.kit import Site, equal
from torch import Tensor, nn
from torch.utils.data import Dataset

from narrows.learner import Learner

VOCABULARY: Final = 128
POSITIONS: Final = 32
BATCH: Final = 4
STEP_TOKENS: Final = BATCH * POSITIONS
CYCLE: Final = 64
"""Tokens after which the rows repeat, so that a model can learn them."""


def llama(**options: Any) -> nn.Module:
    """A Llama of 27 k parameters."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, **options,
    )  # fmt: skip
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def tied_llama() -> nn.Module:
    """The same with one matrix for embedding and head."""
    return llama(tie_word_embeddings=True)


def adapted_llama() -> nn.Module:
    """The same, of which LoRA adapters train alone."""
    base = llama()
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model: nn.Module = peft.get_peft_model(base, config)
    return model


def next_token_loss(net: nn.Module, ids: Tensor) -> Tensor:
    """Mean loss of predicting each token from the one before it."""
    logits = net(ids[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


class Toy(nn.Module):
    """A model without a framework, called as a Llama is."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Linear(32, 64), nn.GELU(), nn.Linear(64, VOCABULARY)]
        self.net = nn.Sequential(nn.Embedding(VOCABULARY, 32), *layers)

    def forward(self, input_ids: Tensor, labels: Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=next_token_loss(self.net, input_ids))


class Rows(Dataset[dict[str, Tensor]]):
    """Pieces of one cycle of tokens."""

    def __init__(self, count: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        cycle = torch.randint(3, VOCABULARY, (CYCLE,), generator=torch.Generator().manual_seed(9))
        starts = torch.randint(0, CYCLE, (count, 1), generator=generator)
        self.ids = cycle[(starts + torch.arange(POSITIONS)) % CYCLE]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def train_plainly(folder: Path, broker: str, make_model: Callable[[], nn.Module]) -> None:
    """The loop of README; at the end of the run its model is in second.safetensors."""
    logging.basicConfig(level=logging.INFO, stream=sys.stdout)
    torch.set_num_threads(1)
    model = make_model()
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, betas=(0.9, 0.95))
    ids = torch.split(Rows(512, seed=1).ids, BATCH)
    pace = threading.Event()

    def batches() -> Generator[Tensor]:
        while True:
            yield from ids

    with Learner(model, optimizer, broker=broker, name="second") as learner:
        for batch in learner.until_end(batches()):
            pace.wait(0.01)
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            learner.log(tokens=batch.numel(), loss=loss)
            optimizer.step()
            optimizer.zero_grad()
    learner.save(folder / "second.safetensors")


def begin(
    site: Site, make_model: Callable[[], nn.Module], *settings: str, goal_tokens: float = 30e3
) -> str:
    """Starts a broker and the second learner; returns the broker's address."""
    torch.set_num_threads(1)
    site.broker("run.learners_at_start=2", *settings, goal_tokens=int(goal_tokens))
    site.fork("second", train_plainly, site.folder, site.address, make_model)
    return site.address


def check(site: Site, learner: Learner, tokens: int, merges: int = 10) -> None:
    """The run has ended: both have its final model, ours was merged, and its tokens are these."""
    learner.save(site.folder / "ours.safetensors")
    site.running["second"].ends(0)
    assert equal(site.saved("ours"), site.saved("second"))
    assert site.contributions("ours") >= merges
    assert learner.stats()["logged_tokens"] == tokens > 0
