"""Trainer, and those that are built on it, take part in a run with one line."""

from pathlib import Path
from typing import Any

import pytest
from frameworks import lab
from transformers import Trainer, TrainerCallback, TrainingArguments

from narrows.integrations.transformers import joined

pytestmark = pytest.mark.real


def trainer(folder: Path, model: Any, **options: Any) -> Trainer:
    """A Trainer that ends at 2,000 steps if nothing ends it before."""
    arguments = {
        "per_device_train_batch_size": lab.BATCH, "max_steps": 2000, "learning_rate": 1e-3,
        "logging_steps": 10, "report_to": [], "save_strategy": "no", "use_cpu": True,
        "disable_tqdm": True, **options,
    }  # fmt: skip
    return Trainer(
        model=model,
        args=TrainingArguments(output_dir=str(folder / "trainer"), **arguments),
        train_dataset=lab.Rows(4000),
        eval_dataset=lab.Rows(64, seed=2),
    )


class Notes(TrainerCallback):
    """A callback of the user's, after ours: what it was given to log."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.logs.append(dict(logs))


@pytest.mark.parametrize("accumulation", [1, 4])
def test_it_trains_in_a_run_with_one_line(tmp_path: Path, accumulation: int) -> None:
    notes = Notes()
    training = trainer(
        tmp_path, lab.llama(), gradient_accumulation_steps=accumulation,
        include_num_input_tokens_seen=True,
    )  # fmt: skip
    training.add_callback(notes)
    with lab.run(tmp_path, lab.llama, 30e3) as run:
        with joined(training, broker=run.address, name="ours") as member:
            training.train()
        run.check(member.learner, training.state.num_input_tokens_seen)
    assert 0 < notes.logs[-1]["narrows/progress"] <= 1
    assert "narrows/merged_tokens" in training.state.log_history[-1]
