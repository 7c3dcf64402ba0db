"""Trainer, and those that are built on it, take part in a run with one line."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import trl
from cli_cases import Narrows
from frameworks import lab
from peft import LoraConfig
from run_cases import broker
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Trainer, TrainerCallback, TrainingArguments

from narrows.bench.kit.processes import wait_until
from narrows.integrations.transformers import Joined, joined
from narrows.learner import LocalProtocolError

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
    with lab.run(tmp_path, lab.llama, 60e3) as run:
        with joined(training, broker=run.address, name="ours") as member:
            training.train()
        run.check(member.learner, training.state.num_input_tokens_seen)
    assert all(0 <= logs["narrows/progress"] <= 1 for logs in notes.logs)
    assert "narrows/merged_tokens" in training.state.log_history[-1]


class Hook(TrainerCallback):
    """Calls a function at the end of every step, with the number of the step."""

    def __init__(self, at_step: Callable[[int], None]) -> None:
        self.at_step = at_step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.at_step(state.global_step)


def test_an_exception_leaves_nothing_behind(narrows: Narrows, tmp_path: Path) -> None:
    def fail(step: int) -> None:
        if step == 20:
            assert lab.learner_threads()
            raise RuntimeError("step 20")

    training = trainer(tmp_path, lab.llama())
    training.add_callback(Hook(fail))
    with broker(tmp_path) as run:
        with pytest.raises(RuntimeError, match="step 20"):
            with joined(training, broker=run.address, name="ours"):
                training.train()
        assert not lab.learner_threads()
        assert not any(isinstance(each, Joined) for each in training.callback_handler.callbacks)
        wait_until(
            lambda: lab.state_of(narrows, run.address).startswith("left"),
            "the broker to hear of it",
        )
        again = trainer(tmp_path, lab.llama(), max_steps=5)
        with joined(again, broker=run.address, name="ours") as member:
            again.train()
        again.log({})
        assert member.learner.stats()["steps"] == 5


def test_what_cannot_take_part_is_told_with_its_remedy(tmp_path: Path) -> None:
    strategy = {"eval_strategy": "steps", "save_strategy": "steps"}
    best = trainer(tmp_path, lab.llama(), load_best_model_at_end=True, **strategy)
    with pytest.raises(LocalProtocolError, match=r"load_best_model_at_end.* Set it to False"):
        with joined(best, broker="tcp://127.0.0.1:1", name="ours"):
            pass
    with pytest.raises(TypeError, match="brokers"):
        with joined(trainer(tmp_path, lab.llama()), brokers="tcp://127.0.0.1:1"):
            pass
    rows = [{"pixels": lab.Rows(1).ids[0]} for _ in range(9)]
    images = trainer(tmp_path, lab.llama(), remove_unused_columns=False)
    images.train_dataset = rows
    with broker(tmp_path) as run, pytest.raises(LocalProtocolError, match=r"pixels.* tokens="):
        with joined(images, broker=run.address, name="ours"):
            images.train()


def test_evaluation_and_saving_are_pauses_and_an_early_end_is_told(
    narrows: Narrows, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seen: dict[str, str] = {}
    training = trainer(
        tmp_path, lab.llama(), max_steps=8, eval_strategy="steps", eval_steps=4,
        save_strategy="steps", save_steps=4,
    )  # fmt: skip

    class Look(TrainerCallback):
        def look(self, what: str, state: str) -> None:
            wait_until(lambda: lab.state_of(narrows, run.address) == state, f"{what}: {state}")
            seen[what] = state

        def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if "evaluation" not in seen:
                self.look("evaluation", "paused evaluating")

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if "saving" in seen and "step" not in seen:
                self.look("step", "training")

    look = Look()
    write = training.save_model

    def save_model(*given: Any, **named: Any) -> None:
        look.look("saving", "paused saving")
        write(*given, **named)

    training.save_model = save_model
    training.add_callback(look)
    with broker(tmp_path, run__goal_tokens=100_000) as run, caplog.at_level(logging.WARNING):
        with joined(training, broker=run.address, name="ours"):
            training.train()
        assert lab.state_of(narrows, run.address).startswith("left")
    assert seen.keys() == {"evaluation", "saving", "step"}
    assert "of the run's goal: the model is then this learner's" in caplog.text


@pytest.mark.parametrize("batch", [4, 8])
def test_the_rate_is_that_of_trainers_schedule_at_the_runs_progress(
    tmp_path: Path, batch: int
) -> None:
    """So it is the same for learners with other batches and other steps to make."""
    peak = 0.1
    rates: list[float] = []
    before: list[float] = []
    after: list[float] = []

    class Noting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            rates.append(self.param_groups[0]["lr"])
            after.append(member.learner.progress)
            return super().step(closure)

    class Before(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            before.append(member.learner.progress)

    model = lab.llama()
    training = trainer(
        tmp_path, model, per_device_train_batch_size=batch, max_steps=8000 // batch,
        logging_steps=1, lr_scheduler_type="linear", warmup_steps=0.2,
    )  # fmt: skip
    training.optimizer = Noting(model.parameters(), lr=peak)
    training.add_callback(Before())
    with lab.run(tmp_path, lab.llama, 40e3) as run:
        with joined(training, broker=run.address, name="ours") as member:
            training.train()
    assert [each["learning_rate"] for each in training.state.log_history[:-1]] == rates
    for early, late, rate in zip(before, after, rates, strict=True):
        bounds = [peak * min(each / 0.2, (1 - each) / 0.8) for each in (early, late)]
        assert min(bounds) - 0.01 * peak <= rate <= max(bounds) + 0.01 * peak
    assert after[-1] > 0.8


def test_a_checkpoint_brings_the_optimizer_and_the_place_in_the_data(tmp_path: Path) -> None:
    class Noting(lab.Rows):
        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            taken.append(index)
            return super().__getitem__(index)

    scales: list[float] = []
    lives: list[list[int]] = []
    with broker(tmp_path) as run:
        for steps, resume in ((40, None), (80, True)):
            taken: list[int] = []
            lives.append(taken)
            training = trainer(
                tmp_path, lab.llama(), max_steps=steps, save_strategy="steps", save_steps=40
            )
            training.train_dataset = Noting(4000)
            with joined(training, broker=run.address, name="ours") as member:
                training.add_callback(Hook(lambda _: scales.append(member.learner.lr_scale)))
                training.train(resume_from_checkpoint=resume)
            assert training.state.global_step == steps
    assert min(scales[40:]) == 1.0
    assert member.learner.stats()["lost_tokens"] == 0
    first, second = lives
    # The loader takes a batch ahead: it is the next one to train on.
    assert first[40 * lab.BATCH :] == second[: len(first) - 40 * lab.BATCH]
    assert not set(first[: 40 * lab.BATCH]) & set(second)


def tokenizer() -> PreTrainedTokenizerFast:
    """Words w0, w1, ... are tokens 3, 4, ..."""
    words = {f"w{index}": index + 3 for index in range(lab.VOCABULARY - 3)}
    model = models.WordLevel({**words, "<pad>": 0, "<s>": 1, "</s>": 2}, unk_token="<s>")
    whole = Tokenizer(model)
    whole.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=whole, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


@pytest.mark.filterwarnings("ignore::FutureWarning")  # TRL sets what Trainer has renamed.
@pytest.mark.parametrize("adapted", [True, False], ids=["LoRA", "whole"])
def test_a_trainer_of_trl_takes_part(tmp_path: Path, adapted: bool) -> None:
    texts = [
        " ".join(f"w{(7 * row + word) % 60}" for word in range(8 + row % 17)) for row in range(999)
    ]
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    config = trl.SFTConfig(
        output_dir=str(tmp_path / "trainer"), max_length=32, max_steps=2000, report_to=[],
        save_strategy="no", use_cpu=True, bf16=False, disable_tqdm=True, logging_steps=10,
        per_device_train_batch_size=lab.BATCH, gradient_accumulation_steps=2,
        include_num_input_tokens_seen=True,
    )  # fmt: skip
    model = lab.llama()
    torch.manual_seed(1)
    training = trl.SFTTrainer(
        model=model, args=config, processing_class=tokenizer(),
        train_dataset=datasets.Dataset.from_list([{"text": text} for text in texts]),
        peft_config=lora if adapted else None,
    )  # fmt: skip
    with lab.run(tmp_path, lab.adapted_llama if adapted else lab.llama, 60e3) as run:
        with joined(training, broker=run.address, name="ours") as member:
            training.train()
        run.check(member.learner, training.state.num_input_tokens_seen)


def test_a_step_that_a_scaler_skips_is_not_counted(tmp_path: Path) -> None:
    training = trainer(tmp_path, lab.llama(), max_grad_norm=0.0, optim="adamw_torch")
    training.accelerator.scaler = lab.overflowing_scaler()
    with lab.run(tmp_path, lab.llama, 60e3) as run:
        with joined(training, broker=run.address, name="ours") as member:
            training.train()
        steps = member.learner.stats()["steps"]
        assert 0 < steps < training.state.global_step
        run.check(member.learner, steps * lab.STEP_TOKENS)
