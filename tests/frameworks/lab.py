"""The tests of frameworks train these: tiny models made from a config, rows that repeat, and a
second, plain learner in a thread, beside the one that the framework drives."""

import os

# Before a framework is imported: nothing is fetched, and nobody reports.
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", WANDB_MODE="disabled")

import itertools
import json
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import peft
import torch
import transformers
from cli_cases import Narrows
from run_cases import Broker, broker
from torch import Tensor, nn
from torch.utils.data import Dataset

from narrows.bench.kit.processes import WAIT_S
from narrows.learner import Learner

VOCABULARY: Final = 128
POSITIONS: Final = 32
BATCH: Final = 4
STEP_TOKENS: Final = BATCH * POSITIONS
CYCLE: Final = 64
"""Tokens after which the rows repeat, so that a model can learn them."""
ROW_S: Final = 0.002
"""A row takes so long to read: steps of a real model leave time for the exchange."""
PACE: Final = threading.Event()
"""Never set."""


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
        PACE.wait(ROW_S)
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def state_of(narrows: Narrows, address: str, name: str = "ours") -> str:
    """The state of a learner, as `narrows status` says it."""
    assert narrows.run("status", address, "--json") == 0
    printed = narrows.out[narrows.out.index("{\n") :]  # Trainer has printed before it.
    learner = json.loads(printed)["learners"][name]
    return " ".join(filter(None, [learner["state"], learner["reason"]]))


def learner_threads() -> list[str]:
    """Threads of learners in this process."""
    names = [each.name for each in threading.enumerate()]
    return [name for name in names if name.startswith("narrows-learner")]


def overflowing_scaler() -> torch.amp.GradScaler:
    """A scaler that skips the first steps."""
    return torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-4)


@dataclass
class Run:
    """A run of two learners: `ours`, which a framework drives, and `second`."""

    broker: Broker
    second: Future[Learner]

    @property
    def address(self) -> str:
        return self.broker.address

    def contributions(self, name: str) -> int:
        """Merged pushes of a learner."""
        merges = self.broker.events("merged")
        return sum(merge["contributors"].count(name) for merge in merges)

    def check(self, ours: Learner, tokens: int, merges: int = 10) -> None:
        """The run has ended: both have its final model bit for bit, at least so many pushes of ours
        were merged, and it has logged so many tokens."""
        models = [ours.state_dict(), self.second.result(timeout=WAIT_S).state_dict()]
        assert models[0].keys() == models[1].keys()
        assert all(tensor.equal(models[1][name]) for name, tensor in models[0].items())
        assert ours.health == "final"
        assert self.contributions("ours") >= merges
        assert ours.stats()["logged_tokens"] == tokens > 0


@contextmanager
def run(
    folder: Path, make_model: Callable[[], nn.Module], goal_tokens: float, **settings: Any
) -> Generator[Run]:
    """A broker, and the second learner with the loop of README, which ends with the block."""
    torch.set_num_threads(1)
    settings = {"run__learners_at_start": 2, "run__goal_tokens": int(goal_tokens), **settings}
    model = make_model()
    is_over = threading.Event()

    def train_plainly(address: str) -> Learner:
        trained = [each for each in model.parameters() if each.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-3, betas=(0.9, 0.95))
        ids = itertools.cycle(torch.split(Rows(512, seed=1).ids, BATCH))
        with Learner(
            model, optimizer, broker=address, name="second", leave_timeout_s=5.0
        ) as learner:
            for batch in learner.until_end(ids):
                if is_over.wait(0.01):
                    break
                loss = model(input_ids=batch, labels=batch).loss
                loss.backward()
                learner.log(tokens=batch.numel(), loss=loss)
                optimizer.step()
                optimizer.zero_grad()
        return learner

    with broker(folder, **settings) as made, ThreadPoolExecutor(1) as thread:
        second = thread.submit(train_plainly, made.address)
        try:
            yield Run(made, second)
        finally:
            is_over.set()
