"""`narrows bench attack poison`: one learner of a few sends something else than it has learned.

Real models, pushes, merge and watch; sockets and time are simulated (bench/sim). Every line of the
rows file is one run.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from typing import Final, TypeAlias

import numpy as np
import torch
from rich.console import Console

from narrows.bench.attack.poisons import ATTACKS, CLAIMS, claimed_weights
from narrows.bench.attack.report import Row, honest_alarms, key_of, summary, table
from narrows.bench.kit import machine
from narrows.bench.kit.runner import run_missing
from narrows.bench.quality.run import STEP_S, QualityCell, adamw, learner_name, losses_of
from narrows.bench.sim.trained import TrainedSimulation, Training
from narrows.bench.sim.virtual import Faults
from narrows.broker.cli.tables import terminal
from narrows.broker.config import BrokerConfig
from narrows.broker.merging import (
    Contribution,
    DecodedVector,
    FragmentState,
    GlobalModel,
    MergeResult,
    Outcome,
    Policy,
    warm_up,
)
from narrows.learner.reference.corpus import Bytes, Corpus, load_corpus
from narrows.learner.reference.gpt import GPT, preset
from narrows.proto.codec import DecodedChunk
from narrows.proto.errors import ConfigError
from narrows.proto.fragments import Fragment

Job: TypeAlias = tuple["PoisonCell", int]

MODEL: Final = "nano"

EQUAL: Final[Mapping[str, object]] = {"merge.weights": "equal"}
"""The defaults of a run with keys, but for one whose keys all name one organisation."""

TOKENS: Final[Mapping[str, object]] = {"merge.weights": "tokens"}
"""The defaults of a run without keys."""

CLAIMED: Final[Mapping[str, object]] = {**TOKENS, "merge.norm_limit": 0.0}
"""The rules of the releases before: clip_ratio alone, weights by what was claimed."""

BOUNDED: Final[Mapping[str, object]] = {
    **EQUAL,
    "merge.tokens_per_s_max": int(1.5 * QualityCell("", "", model=MODEL).step_tokens / STEP_S),
}
"""The operator knows how fast the learners are: the run's clock counts half as much again."""

RULES: Final = {
    "defaults": EQUAL,
    "weights by tokens": TOKENS,
    "before": CLAIMED,
    "tokens_per_s_max": BOUNDED,
}


@dataclass(frozen=True)
class PoisonCell:
    """One run to try; learner 0 is the attacker, if there is one."""

    group: str
    rules: str
    """Name of the settings."""
    learners: int
    attack: str = "nobody"
    settings: Mapping[str, object] = field(default_factory=lambda: dict(EQUAL))
    claims: str = ""
    """Name of the attacker's claims about its work."""
    texts: str = ""
    """parts: each learner has its own part of the text. kinds: each has another kind of text."""
    steps: int = 300


def attacks() -> list[PoisonCell]:
    """Each attack under the defaults of several organisations."""
    of_two = ["nobody", "sign-flip x1", "sign-flip x10", "push x10^4", "noise at the bound"]
    of_four = ["nobody", "sign-flip x1.5", "sign-flip x10"]
    return [
        PoisonCell("attacks", "defaults", learners, name)
        for learners, names in ((3, list(ATTACKS)), (2, of_two), (4, of_four))
        for name in names
    ]


def robust() -> list[PoisonCell]:
    """Robust averages, with and without an attacker."""
    return [
        PoisonCell("robust", rule, 3, name, {**EQUAL, "merge.robust": rule})
        for rule in ("trimmed", "centered")
        for name in ("nobody", "sign-flip x1.5")
    ]


def tokens() -> list[PoisonCell]:
    """Claims about tokens and steps, under equal weights, weights by tokens, and the rules before.

    The attacks are the one that costs most at the bound, and one beyond it. "nobody" shows what
    weights by tokens cost, and what becomes of a run whose clock is ahead of its work.
    """
    lies = [
        PoisonCell("tokens", rules, 3, attack, RULES[rules], claims)
        for rules in ("defaults", "weights by tokens")
        for attack in ("sign-flip x1.5", "sign-flip x3")
        for claims in ("one step", "tokens, one step")
    ]
    lies += [
        PoisonCell("tokens", rules, learners, attack, RULES[rules], claims)
        for learners, rules, attack, claims in (
            (3, "before", "sign-flip x3", "one step"),
            (2, "defaults", "sign-flip x3", "one step"),
            (2, "weights by tokens", "sign-flip x3", "one step"),
            (8, "weights by tokens", "sign-flip x3", "one step"),
            (3, "defaults", "nobody", "tokens, one step"),
            (3, "tokens_per_s_max", "sign-flip x3", "tokens, one step"),
        )
    ]
    honest = [PoisonCell("tokens", "weights by tokens", 3, settings=TOKENS)]
    return [*honest, PoisonCell("tokens", "defaults", 8), *lies]


def unequal() -> list[PoisonCell]:
    """Are honest learners of unequal text named?"""
    return [
        PoisonCell("unequal", "defaults", learners, texts=texts, steps=400)
        for texts, learners in (("kinds", 3), ("kinds", 2), ("kinds", 4), ("parts", 4))
    ]


GROUPS: Final = {make.__name__: make for make in (attacks, robust, tokens, unequal)}


@dataclass
class _Seen:
    """Findings of the watch during a run."""

    rounds: int = 0
    contributed: dict[str, int] = field(default_factory=dict[str, int])
    named: dict[str, int] = field(default_factory=dict[str, int])
    """Rounds that a learner had contributed to when it was named first."""
    alarms: dict[str, int] = field(default_factory=dict[str, int])
    """Rounds after which a learner stood named."""
    shares: list[float] = field(default_factory=list[float])
    """Weights of the attacker, where it was not alone."""
    pieces: int = 0
    clipped: int = 0


class _Observed(GlobalModel):
    """A global model that notes shares, and whom its watch names."""

    seen: _Seen
    by_claims = False
    """Contributions weigh by their claims alone, as in the releases before."""
    _claims: Sequence[tuple[int, int]] = ()

    def merge(
        self,
        index: int,
        version: int,
        contributed: Sequence[Contribution],
        chunks: Mapping[int, tuple[int, DecodedChunk]],
        policy: Policy,
    ) -> Outcome:
        self._claims = [(each.tokens, each.steps) for each in contributed]
        return super().merge(index, version, contributed, chunks, policy)

    def merged(
        self,
        fragment: Fragment,
        contributions: Sequence[DecodedVector],
        weights: Sequence[float],
        policy: Policy,
    ) -> MergeResult:
        if self.by_claims:
            weights = claimed_weights(self._claims)
        for each, share in zip(contributions, weights, strict=True):
            if each.learner == learner_name(0) and len(weights) > 1:
                self.seen.shares.append(share)
        return super().merged(fragment, contributions, weights, policy)

    def install(self, outcome: Outcome) -> None:
        super().install(outcome)
        evidence, seen = outcome.merged.evidence, self.seen
        seen.rounds += 1
        seen.pieces += outcome.merged.norms.size
        seen.clipped += outcome.merged.clipped
        for each in evidence:
            seen.contributed[each.learner] = seen.contributed.get(each.learner, 0) + 1
        for name in self.watch.suspects(evidence):
            seen.named.setdefault(name, seen.contributed[name])
            seen.alarms[name] = seen.alarms.get(name, 0) + 1


def run_cell(cell: PoisonCell, seed: int) -> Row:
    """Trains one cell with one seed."""
    torch.set_num_threads(1)
    seen, shape, attacker = _Seen(), preset(MODEL), learner_name(0)
    quality = QualityCell("", "", learners=cell.learners, steps=cell.steps, settings=cell.settings)

    def make(
        config: BrokerConfig, table: Sequence[Fragment], states: Sequence[FragmentState]
    ) -> GlobalModel:
        model = _Observed(config, table, states)
        model.seen, model.by_claims = seen, cell.rules == "before"
        return model

    poison, lie = ATTACKS[cell.attack], CLAIMS[cell.claims]
    training = Training(
        corpus=_corpus(),
        make_model=partial(GPT, shape, seed=seed),
        make_optimizers=adamw,
        peak_learning_rate=shape.peak_learning_rate,
        batch=shape.batch,
        seed=seed,
        poison={attacker: poison} if poison else {},
        lies={attacker: lie} if lie else {},
        make_global=make,
        texts=texts_of(cell.texts),
    )
    run = TrainedSimulation(
        quality.config(), seed, Faults(until_s=0.0, latency_s=quality.latency_s), quality.specs(),
        training,
    )  # fmt: skip
    row: Row = {**asdict(cell), "seed": seed}
    try:
        run.run(100.0 * cell.steps)
        run.write_global(probe := GPT(shape))
        row["validation_loss"], row["test_loss"] = losses_of(probe)
    except FloatingPointError as error:
        row |= {"validation_loss": None, "test_loss": None, "failed": str(error)}
    row |= asdict(seen)
    shares: list[float] = row.pop("shares")
    return row | {"attacker_share": fmean(shares) if shares else None}


def texts_of(kind: str) -> dict[str, Bytes]:
    """Training text by learner: parts of the corpus, or other kinds of text."""
    train = _corpus().train
    if kind == "parts":
        cut = len(train) // 4
        return {learner_name(i): train[i * cut : (i + 1) * cut] for i in range(4)}
    if kind != "kinds":
        return {}
    library, include = (Path(sysconfig.get_path(name)) for name in ("stdlib", "include"))
    files = [
        sorted((library / "encodings").glob("cp*.py")),
        [],
        [library / "pydoc_data" / "topics.py"],
        sorted(include.rglob("*.h")),
    ]
    texts = [np.frombuffer(b"".join(map(Path.read_bytes, each)), np.uint8) for each in files]
    return {learner_name(i): text if text.size else train for i, text in enumerate(texts)}


@cache
def _corpus() -> Corpus:
    return load_corpus()


def run_poison_bench(
    rows_file: Path,
    json_file: Path | None,
    *,
    steps: int,
    seeds: Sequence[int],
    groups: Sequence[str],
    workers: int,
) -> None:
    """Runs what is missing, prints the table, writes the JSON. Raises ConfigError for a group that
    does not exist."""
    for name in groups:
        if name not in GROUPS:
            raise ConfigError("--groups", expected=f"of {', '.join(GROUPS)}", got=name)
    cells = [
        replace(cell, steps=cell.steps * steps // 300)
        for name in groups or GROUPS
        for cell in GROUPS[name]()
    ]
    console = terminal()
    rows = run_cells(cells, seeds, rows_file, workers=workers, console=console)
    report = summary(rows)
    console.print(table(report))
    false = honest_alarms(rows)
    console.print(f"honest runs: {false}", markup=False)
    machine.write_result(json_file, "attack poison", {"rows": report, "honest": false})


def run_cells(
    cells: Sequence[PoisonCell], seeds: Sequence[int], path: Path, *, workers: int, console: Console
) -> list[Row]:
    """Rows of all cells with all seeds, seed by seed."""
    jobs: dict[str, Job] = {
        key_of({**asdict(cell), "seed": seed}): (cell, seed) for seed in seeds for cell in cells
    }
    warm_up()
    rows = run_missing(
        jobs, run_cell, path, key_of=key_of, say=_said, workers=workers, console=console
    )
    return [rows[key] for key in jobs]


def _said(row: Row) -> str:
    loss = row["validation_loss"]
    text = "diverged" if loss is None else f"{loss:.4f}"
    return f"{row['rules']}, {row['learners']} learners, {row['attack']}: {text}"
