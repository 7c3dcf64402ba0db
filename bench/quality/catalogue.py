"""The catalogue of the quality bench: every setting that is tried, by the question it answers.

A group is a function whose docstring is the question. Its cells change one thing of BASE, which is
`narrows broker` without any flag. Further changes are in the cell's name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from narrows.bench.codec.codings import CODINGS, OF_PUSHES
from narrows.bench.quality.run import STEP_S, Inner, QualityCell
from narrows.bench.quality.variants import POISONS
from narrows.learner.reference.gpt import preset

BASE: Final = QualityCell("", "defaults")

CHOOSING_SEEDS: Final = (1, 2, 3)
"""Judged on the validation text. A choice made with these seeds is not reported with them."""

REPORTING_SEEDS: Final = (11, 12, 13, 14, 15)
"""Judged on the test text."""

RATES: Final = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Peaks of data parallel in units of the preset's. The best should not be the first or last."""

SMALL_STEPS: Final = 500
SHORT_STEPS: Final = 150
SMALL: Final[Mapping[str, tuple[str, ...]]] = {
    "modes": ("decoupled", "streaming", "diloco, 0.7 / 0.9, raw32"),
    "outer": ("0.7 / 0.9",),
    "merge rule": ("mean, 4 learners",),
    "codec": ("raw32", "int4, rho 1"),
    "lateness": ("5 s",),
    "speeds": ("4:3:2:1",),
    "quorum": ("K 1, no grace, no waits, 4:3:2:1",),
    "deaths": ("dead half of the time",),
}
"""Cells of the short selection, by group: ten runs of 500 steps times the reporting seeds, and the
rates of one data-parallel twin."""

_ONE_BY_ONE: Final = {"merge.grace_fraction": 0.0, "merge.wait_fraction": 0.0}

AWAY_PERIOD_S: Final = 200.0 * STEP_S
"""Period of learners that come and go: they are away once in each."""


def _cell(name: str, settings: Mapping[str, object] | None = None, **changes: Any) -> QualityCell:
    return replace(BASE, name=name, settings=settings or {}, **changes)


def modes() -> list[QualityCell]:
    """How far are the modes from data parallel, the classic method included?"""
    raw = {"codec.push": "raw32", "codec.publish": "raw32"}
    published = {"run.mode": "diloco", "outer.lr": 0.7, "outer.momentum": 0.9, **raw}
    return [
        _cell("decoupled"),
        _cell("streaming", {"run.mode": "streaming"}),
        _cell("diloco", {"run.mode": "diloco"}),
        _cell("diloco, 0.7 / 0.9, raw32", published),
    ]


def inner_rate() -> list[QualityCell]:
    """Does the decoupled run want another peak learning rate than data parallel?"""
    peak = preset(BASE.model).peak_learning_rate
    return [_cell(f"{each:g} of the preset's", peak_learning_rate=each * peak) for each in RATES]


def outer() -> list[QualityCell]:
    """Which outer learning rate and momentum (Nesterov)?"""
    return [
        _cell(f"{rate} / {momentum}", {"outer.lr": rate, "outer.momentum": momentum})
        for rate in (0.4, 0.7, 1.0)
        for momentum in (0.0, 0.4, 0.6, 0.8, 0.9)
    ]


def sync_period() -> list[QualityCell]:
    """How does the loss rise with H, and which outer gain suits which H?"""
    return [
        _cell(
            f"H {period}, {rate} / {momentum}",
            {
                "fragments.sync_period_steps": period,
                "outer.lr": rate,
                "outer.momentum": momentum,
            },
        )
        for period in (5, 10, 20, 40, 80)
        for rate, momentum in ((0.4, 0.2), (0.7, 0.4), (0.7, 0.6), (1.0, 0.0))
    ]


def fragments() -> list[QualityCell]:
    """Into how many fragments?"""
    return [_cell(f"P {count}", {"fragments.count": count}) for count in (1, 2, 4, 8, 16)]


def merge_rule() -> list[QualityCell]:
    """Radial-directional averaging or the mean?"""
    return [
        _cell(f"{rule}, {learners} learners", {"merge.rule": rule}, learners=learners)
        for learners in (4, 8)
        for rule in ("layout", "mean")
    ]


def codec() -> list[QualityCell]:
    """How much loss do fewer bits cost, and does the residual help?"""
    off = {"codec.error_feedback": False}
    two = {"codec.push_bits": 2.0, "codec.publish_bits": 2.0}
    return [
        _cell("raw32", _codec("raw32", 1.0)),
        _cell("int8, rho 0.25", _codec("int8-zstd", 0.25)),
        _cell("int4, rho 0.5", _codec("int4-zstd", 0.5)),
        _cell("int4, rho 1", _codec("int4-zstd", 1.0)),
        _cell("int4, rho 0.5, no residual", {**_codec("int4-zstd", 0.5), **off}),
        _cell("int4, rho 1, no residual", {**_codec("int4-zstd", 1.0), **off}),
        _cell("publication raw32", {"codec.publish": "raw32"}),
        _cell("push raw32", {"codec.push": "raw32"}),
        _cell("auto, 2 bits", {"codec.push": "auto", "codec.publish": "auto", **two}),
        *(_cell(f"int4, rho {rho:g}", _codec("int4-zstd", rho)) for rho in (1.5, 2.0, 3.0)),
        *(_cell(name, variant=name) for name in (*CODINGS, *OF_PUSHES)),
    ]


def _codec(name: str, rho: float) -> dict[str, object]:
    return {
        "codec.push": name,
        "codec.publish": name,
        "codec.push_rho": rho,
        "codec.publish_rho": rho,
    }


def adoption() -> list[QualityCell]:
    """Is it worth keeping the steps between snapshot and adoption?"""
    return [_cell(name, adoption=name) for name in ("overwrite", "blend", "carry", "lean")]


def lateness() -> list[QualityCell]:
    """How much loss does a slow line cost? Latency of every message, one way; a step takes 1 s."""
    cells = [_cell(f"{s} s", latency_s=(float(s), float(s))) for s in (1, 5, 10)]
    for cell in cells[:2]:
        cells += [replace(cell, name=f"{cell.name}, {n}", adoption=n) for n in ("blend", "carry")]
        longer: dict[str, object] = {"fragments.sync_period_steps": 20}
        cells.append(replace(cell, name=f"{cell.name}, H 20", settings=longer))
    return cells


def weights() -> list[QualityCell]:
    """Token weights or equal ones, where learners differ?"""
    return [
        _cell(f"{rule}, 4:3:2:1", {"merge.weights": rule}, step_s=_step_s(4, 3, 2, 1))
        for rule in ("tokens", "equal")
    ]


def variants() -> list[QualityCell]:
    """Do outer rules help that were proposed elsewhere?"""
    rules = ("momentum warm-up", "momentum restart", "outer decay", "heloco")
    # M times the learning rate: a merge has all learners here, and the outer gain is the default's.
    gain = {"outer.lr": BASE.learners * BASE.config().outer.lr}
    name, late = "K 1, no grace, no waits, 4:3:2:1, delayed nesterov", "delayed nesterov"
    alone = _cell(name, {**gain, **_ONE_BY_ONE}, step_s=_step_s(4, 3, 2, 1), variant=late)
    return [*(_cell(rule, variant=rule) for rule in rules), _cell(late, gain, variant=late), alone]


def muon() -> list[QualityCell]:
    """Is a decoupled run as good as data parallel when the inner optimizer is Muon?"""
    peak = preset(BASE.model).peak_learning_rate
    return [
        _cell(f"muon, {each:g} of the preset's", peak_learning_rate=each * peak, inner="muon")
        for each in (0.5, 1.0, 2.0)
    ]


def learners() -> list[QualityCell]:
    """How does it go with the number of learners?"""
    return [_cell(f"{count} learners", learners=count) for count in (2, 4, 8)]


def size() -> list[QualityCell]:
    """Do the findings hold for a model of another size?"""
    return [
        _cell("decoupled", model="micro"),
        _cell("0.7 / 0.9", {"outer.momentum": 0.9}, model="micro"),
        _cell("mean", {"merge.rule": "mean"}, model="micro"),
        _cell("raw32", _codec("raw32", 1.0), model="micro"),
        _cell("int4, rho 1", _codec("int4-zstd", 1.0), model="micro"),
    ]


def speeds() -> list[QualityCell]:
    """How much loss do unequal learners cost, at the same tokens per second of all?"""
    return [
        _cell("4:3:2:1", step_s=_step_s(4, 3, 2, 1)),
        _cell("8 learners, 18% apart", learners=8, step_s=APART),
    ]


def _step_s(*rates: float) -> tuple[float, ...]:
    """Step times of learners with these relative speeds; their mean speed is the nominal one."""
    mean = sum(rates) / len(rates)
    return tuple(STEP_S * mean / rate for rate in rates)


APART: Final = _step_s(1.18, 1.18, 1.18, 1.18, 1, 1, 1, 1)
"""Two kinds of machines, as in Decoupled DiLoCo (arXiv 2604.21428)."""


def quorum() -> list[QualityCell]:
    """Is K = 1 enough, and how much do the grace window and the waits for arrivals save?"""
    rules: dict[str, Mapping[str, object]] = {
        "K 1": {},
        "K 1, no waits": {"merge.wait_fraction": 0.0},
        "K 1, no grace": {"merge.grace_fraction": 0.0},
        "K 1, no grace, no waits": _ONE_BY_ONE,
        "K 4": {"merge.quorum": 4},
    }
    unequal = [
        _cell(f"{name}, 4:3:2:1", rule, step_s=_step_s(4, 3, 2, 1)) for name, rule in rules.items()
    ]
    rules["K 8"] = {"merge.quorum": 8}
    apart = [
        _cell(f"{name}, 18% apart", rule, learners=8, step_s=APART) for name, rule in rules.items()
    ]
    return unequal + apart


def deaths() -> list[QualityCell]:
    """How much loss does a learner cost that dies, and is the ramp after its return worth it?"""
    half = _away(3, share=0.5)
    often = _away(3, share=0.025)
    return [
        _cell("dead half of the time", deaths=half),
        _cell("dead half of the time, no ramp", deaths=half, ramp=False),
        _cell("dead for 5 of 200 s", deaths=often),
        _cell("dead for 5 of 200 s, no ramp", deaths=often, ramp=False),
    ]


def _away(learner: int, *, share: float) -> tuple[tuple[int, float, float], ...]:
    """Deaths of a learner that is away for this share of every period, at the period's end; more of
    them than any run is long."""
    away_s = share * AWAY_PERIOD_S
    periods = range(1, 2 * round(BASE.steps * STEP_S / AWAY_PERIOD_S))
    return tuple((learner, AWAY_PERIOD_S * i - away_s, away_s) for i in periods if share)


def scavenging() -> list[QualityCell]:
    """How much sooner is the goal reached with four extra learners, part of the time?

    The goal is that of four learners, regardless of who contributes: compare `virtual s`.
    """
    tokens = BASE.learners * BASE.step_tokens
    goal = {"run.goal_tokens": BASE.steps * tokens, "run.tokens_per_run_step": tokens}
    cells = [_cell("no extra learners")]
    for share in (0.25, 0.5, 1.0):
        comings = [away for i in range(4, 8) for away in _away(i, share=1 - share)]
        cells.append(_cell(f"{share:+.0%} compute", goal, learners=8, deaths=tuple(comings)))
    return cells


def poison() -> list[QualityCell]:
    """One of eight learners sends something else: how much do clip and robust merges save?"""
    no_clip = {"merge.clip_ratio": 0.0}
    cells: list[QualityCell] = []
    for kind in ("", *POISONS):
        name = kind or "nobody"
        cells += [
            _cell(f"{name}, clip", learners=8, poison=kind),
            _cell(f"{name}, no clip", no_clip, learners=8, poison=kind),
            _cell(f"{name}, median", learners=8, poison=kind, variant="median"),
            _cell(f"{name}, trimmed mean", learners=8, poison=kind, variant="trimmed mean"),
        ]
    return cells


_MAKERS: Final[Sequence[Callable[[], list[QualityCell]]]] = (
    modes, inner_rate, outer, sync_period, fragments, merge_rule, codec, adoption, lateness,
    weights, variants, muon, learners, size, speeds, quorum, deaths, scavenging, poison,
)  # fmt: skip
GROUPS: Final = {make.__name__.replace("_", " "): make for make in _MAKERS}

DATA_PARALLEL: Final = "data parallel"


def question(group: str) -> str:
    """The question of a group."""
    if group == DATA_PARALLEL:
        return "The measure: the best peak learning rate by validation loss."
    return " ".join((GROUPS[group].__doc__ or "").split("\n\n")[0].split())


def full() -> list[QualityCell]:
    """The whole catalogue."""
    return [replace(cell, group=name) for name, make in GROUPS.items() for cell in make()]


def small() -> list[QualityCell]:
    """The cells that fit into a quarter of an hour on two cores."""
    return [
        replace(cell, steps=SMALL_STEPS)
        for cell in full()
        if cell.name in SMALL.get(cell.group, ())
    ]


def short() -> list[QualityCell]:
    """A look in minutes: the modes, in runs that are too short for a finding."""
    return [replace(cell, steps=SHORT_STEPS) for cell in small() if cell.group == "modes"]


class ModelShape(NamedTuple):
    """The common part of a cell and its data-parallel twins."""

    model: str
    learners: int
    steps: int
    inner: Inner


def shape_of(cell: QualityCell) -> ModelShape:
    """Learners and steps of the run's clock. A goal of fewer tokens counts as fewer learners."""
    run = cell.config().run
    learners = run.tokens_per_run_step // cell.step_tokens
    return ModelShape(cell.model, learners, run.goal_tokens // run.tokens_per_run_step, cell.inner)


def rates_of(cell: QualityCell) -> list[QualityCell]:
    """The data-parallel twins of a cell at all learning rates: as many tokens in as many steps of
    the run's clock, the same model and inner optimizer."""
    shape, peak = shape_of(cell), preset(cell.model).peak_learning_rate
    return [
        QualityCell(
            DATA_PARALLEL,
            f"{factor:g} of the preset's rate",
            **shape._asdict(),
            peak_learning_rate=factor * peak,
            data_parallel=True,
        )
        for factor in RATES
    ]
