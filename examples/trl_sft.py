"""SFTTrainer of TRL with LoRA in a run: only the adapters are trained, and only they travel.

narrows broker --goal-tokens 2e5 --set run.learners_at_start=2 --state-dir runs/sft
python examples/trl_sft.py site-a & python examples/trl_sft.py site-b

It needs `pip install '.[transformers]' datasets peft trl`. With a key in NARROWS_KEY the
broker's address comes from the key's file.
"""

from __future__ import annotations

import logging
import os
import random
import sys

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from narrows.integrations.transformers import joined
from narrows.learner import NarrowsError

WORDS = [f"w{number}" for number in range(250)]


def tokenizer() -> PreTrainedTokenizerFast:
    """A token for each word; put your model's tokenizer here."""
    special = ["<pad>", "<s>", "</s>"]
    numbers = {word: number for number, word in enumerate([*special, *WORDS])}
    whole = Tokenizer(models.WordLevel(numbers, unk_token="<s>"))
    whole.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=whole, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def texts() -> Dataset:
    """Sentences that count; put your data here."""
    starts = [random.randrange(200) for _ in range(2000)]
    return Dataset.from_list([{"text": " ".join(WORDS[start : start + 48])} for start in starts])


def train(name: str) -> None:
    torch.manual_seed(0)  # All sites need the same frozen weights, as from one checkpoint.
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    arguments = SFTConfig(
        output_dir=f"{name}-trainer", max_steps=5000,  # Above what the run takes.
        per_device_train_batch_size=8, gradient_accumulation_steps=2, learning_rate=1e-2,
        max_length=64, logging_steps=20, save_strategy="no", report_to=[], bf16=False,
    )  # fmt: skip
    trainer = SFTTrainer(
        LlamaForCausalLM(config), arguments, train_dataset=texts(), processing_class=tokenizer(),
        peft_config=LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    )  # fmt: skip
    # With a key there is no need for an address: the key's file has the broker's.
    broker = None if os.environ.get("NARROWS_KEY") else "tcp://127.0.0.1:7070"
    with joined(trainer, broker=broker, name=name):
        trainer.train()
    trainer.save_model(name)
    print(f"{name}: the run's adapters are in the folder {name}")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: trl_sft.py NAME")
    try:
        train(sys.argv[1])
    except (NarrowsError, KeyboardInterrupt) as error:
        sys.exit(f"{sys.argv[1]}: {str(error) or 'interrupted'}")
