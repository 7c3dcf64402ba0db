"""One cell of the quality bench: a run, or its data-parallel twin, and the loss that it reaches."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from typing import Any, Literal, TypeAlias

import torch

from narrows.bench.codec.codings import CODINGS, OF_PUSHES
from narrows.bench.quality.baselines import accumulate
from narrows.bench.quality.variants import POISONS, model_maker
from narrows.bench.sim.broker import SimulatedRound
from narrows.bench.sim.learner import LearnerSpec
from narrows.bench.sim.trained import Adoption, TrainedSimulation, Training
from narrows.bench.sim.virtual import Faults, Span
from narrows.broker.config import BrokerConfig, load_config
from narrows.learner.reference.corpus import Bytes, Corpus, Reader, fixed_windows, load_corpus
from narrows.learner.reference.gpt import (
    GPT,
    GPTConfig,
    learning_rate,
    make_optimizer,
    parameter_count,
    parameter_groups,
    preset,
    set_learning_rate,
    validation_loss,
)
from narrows.proto.frames import digest

Inner: TypeAlias = Literal["adamw", "muon"]

STEP_S = 1.0
"""Virtual seconds of a nominal inner step."""

EVALUATION_WINDOWS = 1024
CURVE_WINDOWS = 128
CURVE_POINTS = 10


@dataclass(frozen=True)
class QualityCell:
    """One setting to try. The defaults of `narrows broker` hold for everything that is not
    given."""

    group: str
    """The question that the cell belongs to."""
    name: str
    model: str = "nano"
    learners: int = 4
    steps: int = 1000
    """Steps of the run's clock. Tokens are steps * learners * batch * context, whichever learner
    makes them."""
    peak_learning_rate: float = 0.0
    """0: the preset's."""
    data_parallel: bool = False
    """One batch per learner in every step, exact mean gradients: the reference for the others."""
    settings: Mapping[str, object] = field(default_factory=dict[str, object])
    """Settings of the broker, by dotted key."""
    step_s: tuple[float, ...] = ()
    """Virtual seconds per inner step of each learner; empty: 1 each. Noise of 10% is added."""
    deaths: tuple[tuple[int, float, float], ...] = ()
    """(learner, at_s, down_s): killed, back after down_s without inner optimizer state."""
    joins_at_s: tuple[float, ...] = ()
    latency_s: Span = (0.001, 0.02)
    adoption: Adoption = "overwrite"
    ramp: bool = True
    inner: Inner = "adamw"
    variant: str = ""
    poison: str = ""
    """Name of the values that learner 0 sends instead of its outer gradients."""

    def config(self) -> BrokerConfig:
        """The configuration of the run's broker."""
        tokens = self.step_tokens * self.learners
        flags = {
            "run.goal_tokens": tokens * self.steps,
            "run.tokens_per_run_step": tokens,
            "run.learners_at_start": len([at for at in self._joins() if at == 0.0]),
            **self.settings,
        }
        return load_config(None, flags)

    @property
    def step_tokens(self) -> int:
        """Tokens of one inner step of one learner."""
        shape = preset(self.model)
        return shape.batch * shape.context

    def specs(self) -> list[LearnerSpec]:
        speeds = self.step_s or (STEP_S,) * self.learners
        return [
            LearnerSpec(learner_name(i), step_s, self.step_tokens, joins_at_s)
            for i, (step_s, joins_at_s) in enumerate(zip(speeds, self._joins(), strict=True))
        ]

    def _joins(self) -> tuple[float, ...]:
        return self.joins_at_s or (0.0,) * self.learners


@dataclass
class QualityResult:
    """Results of one run of a cell; losses in nats per byte."""

    losses: tuple[float, float]
    """Losses on the validation and the test text."""
    up_bits_per_param: float = 32.0
    down_bits_per_param: float = 32.0
    contributors_mean: float = 0.0
    """Learners per merge."""
    merges: int = 0
    learner_steps: float = 0.0
    """Inner steps of all learners by their number. The goal counts merged tokens, so that a
    decoupled run makes more than `steps`."""
    virtual_s: float = 0.0
    """Length of the run on the virtual clock."""
    wall_s: float = 0.0
    curve: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    """(run step, loss over a few validation windows) of the global model."""


def learner_name(index: int) -> str:
    return f"learner-{index}"


def run_cell(cell: QualityCell, seed: int) -> dict[str, Any]:
    """Trains the cell with this seed (of the first parameters, the text's order and the mishaps)
    and returns its row. The row names the text, because another version of Python has another
    text."""
    torch.set_num_threads(1)
    started_s = time.perf_counter()
    result = _data_parallel(cell, seed) if cell.data_parallel else _decoupled(cell, seed)
    result.wall_s = time.perf_counter() - started_s
    row: dict[str, Any] = {**asdict(cell), "seed": seed, **asdict(result)}
    row["corpus_digest"], row["config_digest"] = _corpus().corpus_digest, config_digest(cell)
    row["validation_loss"], row["test_loss"] = row.pop("losses")
    return row


def config_digest(cell: QualityCell) -> str:
    """Digest of the broker's settings, defaults included, without files and ports; "" for data
    parallel."""
    if cell.data_parallel:
        return ""
    settings = asdict(cell.config())
    del settings["broker"]
    return f"{digest(json.dumps(settings, sort_keys=True).encode()):016x}"


def _decoupled(cell: QualityCell, seed: int) -> QualityResult:
    shape, config = preset(cell.model), cell.config()
    rounds = cell.steps // config.fragments.sync_period_steps
    probe = _Probe(shape, cell.steps)
    training = Training(
        corpus=_corpus(),
        make_model=partial(GPT, shape, seed=seed),
        make_optimizers=adamw if cell.inner == "adamw" else muon,
        peak_learning_rate=cell.peak_learning_rate or shape.peak_learning_rate,
        batch=shape.batch,
        seed=seed,
        adoption=cell.adoption,
        ramp=cell.ramp,
        poison={learner_name(0): POISONS[cell.poison]} if cell.poison else {},
        make_global=model_maker(cell.variant, rounds),
        coding=(CODINGS | OF_PUSHES).get(cell.variant),
    )
    run = TrainedSimulation(
        config, seed, Faults(until_s=0.0, latency_s=cell.latency_s), cell.specs(), training,
        on_commit=probe.look,
    )  # fmt: skip
    for learner, at_s, down_s in cell.deaths:
        run.clock.at(at_s, partial(run.kill_learner, learner_name(learner), down_s))
    run.run(100.0 * STEP_S * cell.steps)
    assert run.finished, "the goal was not reached"
    merges = [record for record in run.trace if isinstance(record, SimulatedRound)]
    run.write_global(probe.model)
    shelf = run.shelf
    return QualityResult(
        losses_of(probe.model),
        up_bits_per_param=shelf.up_bits / shelf.up_elements,
        down_bits_per_param=shelf.down_bits / shelf.down_elements,
        contributors_mean=sum(len(merge.contributors) for merge in merges) / len(merges),
        merges=len(merges),
        learner_steps=shelf.steps / cell.learners,
        virtual_s=run.clock.now,
        curve=probe.curve,
    )


class _Probe:
    """Evaluates the global model ten times in a run."""

    def __init__(self, shape: GPTConfig, steps: int) -> None:
        self.model = GPT(shape)
        self.curve: list[tuple[float, float]] = []
        self._interval = self._next = steps / CURVE_POINTS

    def look(self, run: TrainedSimulation) -> None:
        assert run.broker is not None
        state = run.broker.syncer.state
        step = state.clock.run_tokens / run.config.run.tokens_per_run_step
        if step >= self._next:
            self._next = self._interval * (step // self._interval + 1)
            run.write_global(self.model)
            self.curve.append((step, _curve_loss(self.model)))


def _data_parallel(cell: QualityCell, seed: int) -> QualityResult:
    shape, corpus = preset(cell.model), _corpus()
    peak = cell.peak_learning_rate or shape.peak_learning_rate
    model, probe = GPT(shape, seed=seed), list[tuple[float, float]]()
    readers = [
        Reader(
            corpus.train, batch=shape.batch, context=shape.context, name=learner_name(i), seed=seed
        )
        for i in range(cell.learners)
    ]
    optimizers = (adamw if cell.inner == "adamw" else muon)(model, peak)
    for step in range(cell.steps):
        accumulate(model, readers)
        for optimizer in optimizers:
            set_learning_rate(optimizer, learning_rate(step / cell.steps, peak))
            optimizer.step()
            optimizer.zero_grad()
        if (step + 1) % max(1, cell.steps // CURVE_POINTS) == 0:
            probe.append((step + 1.0, _curve_loss(model)))
    return QualityResult(losses_of(model), learner_steps=cell.steps, curve=probe)


def adamw(model: GPT, peak: float) -> list[torch.optim.Optimizer]:
    """The reference worker's inner optimizer."""
    return [make_optimizer(model, peak)]


def muon(model: GPT, peak: float) -> list[torch.optim.Optimizer]:
    """torch's Muon for the matrices between embedding and head, AdamW for the rest. The updates
    have AdamW's scale, so one learning rate serves both."""
    hidden = [p for name, p in model.named_parameters() if p.dim() == 2 and "blocks." in name]
    chosen = {id(p) for p in hidden}
    rest = parameter_groups(model)
    for group in rest:
        group["params"] = [p for p in group["params"] if id(p) not in chosen]
    return [
        torch.optim.Muon(hidden, lr=peak, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([g for g in rest if g["params"]], lr=peak, betas=(0.9, 0.95), fused=True),
    ]


@cache
def _corpus() -> Corpus:
    return load_corpus()


@cache
def _windows(context: int) -> tuple[Bytes, Bytes]:
    corpus = _corpus()
    return (
        fixed_windows(corpus.validation, context=context, count=EVALUATION_WINDOWS),
        fixed_windows(corpus.test, context=context, count=EVALUATION_WINDOWS),
    )


def losses_of(model: GPT) -> tuple[float, float]:
    """Losses on the validation and the test text."""
    validation, test = _windows(model.config.context)
    return validation_loss(model, validation), validation_loss(model, test)


def _curve_loss(model: GPT) -> float:
    windows = _windows(model.config.context)[0]
    return validation_loss(model, windows[:: len(windows) // CURVE_WINDOWS])


def parameters_of(model: str) -> int:
    """Parameters of a preset."""
    return parameter_count(GPT(preset(model)))
