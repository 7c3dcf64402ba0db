"""The plan of a run: known runs by hand, the choices, the refusals."""

from __future__ import annotations

import json
from math import ceil
from pathlib import Path

import pytest

from narrows.broker.cli.plan import PlanCommand, run_plan, verdict
from narrows.broker.config import BrokerConfig
from narrows.broker.planning.capacity import USABLE, bottleneck, fits, loads_of, make_plan
from narrows.broker.planning.costs import frame_bits, gaussian_bits, payload_bits
from narrows.broker.planning.demand import RunPlan, Site
from narrows.proto.config import override
from narrows.proto.errors import ConfigError
from narrows.proto.frames import encode_header
from narrows.proto.limits import PROTOCOL
from narrows.proto.messages import DataKind, Header

CONFIG = BrokerConfig()


def site(**changes: float) -> Site:
    """12B parameters, 4 learners on lines of 2 Gbit/s, and a broker that has room."""
    values: dict[str, float] = {
        "params": 12 * 10**9,
        "step_s": 2.0,
        "learners": 4,
        "line_bits_per_s": 2e9,
        "broker_line_bits_per_s": 2e9,
        "broker_memory_bytes": 256 << 30,
        "broker_cores": 4,
        "disk_bytes_per_s": 5e8,
    }
    return Site(**(values | changes))  # type: ignore[arg-type]


def config(**changes: object) -> BrokerConfig:
    """The defaults but for these settings, with __ for the dot."""
    return override(BrokerConfig(), {key.replace("__", "."): v for key, v in changes.items()})


def test_rates_are_parameters_times_bits_over_the_period() -> None:
    plan = RunPlan(site(fragments=24), CONFIG, 24)
    assert plan.spacing_s == 2.0
    assert plan.fragment_params == 5e8
    assert plan.push_bits == pytest.approx((gaussian_bits(0.5) + 0.008) * (1 + 66 / 1448), abs=5e-3)
    assert plan.up_bits_per_s == pytest.approx(12e9 * plan.push_bits / 48)
    line = next(load for load in loads_of(plan) if load.name == "line of the broker, in")
    assert line.needed == pytest.approx(4 * plan.up_bits_per_s)


def test_memory_as_it_was_measured_with_8_learners() -> None:
    """narrows bench merge --large: 268 M parameters, 16 fragments, 8 learners: 4.4 GB at most, of
    one merge at a time with the contributions' codes only."""
    plan = RunPlan(
        site(params=1 << 28, learners=8, fragments=16),
        config(merge__rounds_in_flight=1, broker__journal="merged"),
        16,
    )
    assert plan.broker_memory_bytes == pytest.approx(4.4e9, rel=0.08)


def test_journal_as_it_was_measured_with_8_learners() -> None:
    """narrows bench journal: 29 MB a round of 8.4 M parameters, 20 MB as "merged"."""
    measured = {"full": 29e6, "merged": 20e6, "off": 0.0}
    for journal, size_bytes in measured.items():
        plan = RunPlan(
            site(params=1 << 26, learners=8, fragments=8), config(broker__journal=journal), 16
        )
        assert plan.journal_bytes_per_round == pytest.approx(size_bytes, rel=0.06)


def test_learners_keep_eight_bytes_per_parameter_and_four_without_error_feedback() -> None:
    flight = 2 * 16 * 12e9 / 75
    assert RunPlan(site(), CONFIG, 75).learner_memory_bytes == 8 * 12e9 + flight
    lean = RunPlan(site(), config(codec__error_feedback=False), 75)
    assert lean.learner_memory_bytes == 4 * 12e9 + flight


def test_a_model_of_12b_on_2_gbit_fits_one_broker() -> None:
    plan = make_plan(site(), CONFIG)
    assert fits(plan)
    assert plan.brokers == 1
    assert all(load.share <= USABLE for load in loads_of(plan))
    assert bottleneck(plan).name in verdict(plan)[0]
    shorter = RunPlan(plan.site, CONFIG, 24)
    assert not fits(shorter), "a shorter period would have been chosen"


def test_the_verdict_says_where_advice_goes_and_where_figures_come_from() -> None:
    plan = make_plan(site(), CONFIG)
    text = " ".join(verdict(plan))
    assert f"--set fragments.count={plan.fragments}" in text and "TOML" in text
    flags = ("--wan", "--broker-wan", "--broker-memory", "--broker-cores", "--disk")
    assert [flag for flag in flags if f"{flag}" not in text.partition('"there is"')[2]] == []


def test_a_model_of_1t_needs_many_brokers_and_says_so() -> None:
    plan = make_plan(site(params=10**12, step_s=20.0, line_bits_per_s=1e10), CONFIG)
    # 12 bytes of state and 3.2 of kept publications per parameter, in 220 GB each.
    assert 60 <= plan.brokers <= 110
    assert plan.fragment_params <= 1 << 30
    assert any(f"{plan.brokers} are" in line for line in verdict(plan))


def test_what_does_not_fit_is_named_with_a_remedy() -> None:
    plan = make_plan(site(line_bits_per_s=2e7), CONFIG)
    assert not fits(plan)
    text = " ".join(verdict(plan))
    assert "line of a learner, out takes" in text
    assert f"a sync period of {ceil(plan.sync_period_steps * _share(plan))} steps" in text


def _share(plan: RunPlan) -> float:
    return max(load.share for load in loads_of(plan) if "learner" in load.name) / USABLE


def test_settings_that_were_given_are_kept() -> None:
    plan = make_plan(site(fragments=8, sync_period_steps=12), CONFIG)
    assert (plan.fragments, plan.sync_period_steps) == (8, 12)


def test_a_small_model_gets_few_fragments() -> None:
    """A fragment below one chunk would pay for headers only."""
    assert make_plan(site(params=800_000, step_s=0.02), CONFIG).fragments == 3
    assert make_plan(site(params=1), CONFIG).fragments == 1


def test_the_overlap_covers_an_exchange() -> None:
    plan = RunPlan(site(broker_line_bits_per_s=1e9), CONFIG, 50)
    assert plan.overlap_steps * 2.0 >= plan.exchange_s
    assert plan.overlap_steps > CONFIG.fragments.overlap_steps
    assert RunPlan(site(), CONFIG, 1).overlap_steps == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"params": 0},
        {"params": 1 << 60},
        {"step_s": 0.0},
        {"step_s": float("nan")},
        {"learners": 0},
        {"learners": 5000},
        {"line_bits_per_s": 0.0},
        {"line_bits_per_s": float("inf")},
        {"broker_cores": 0},
        {"disk_bytes_per_s": 0},
        {"fragments": -1},
        {"params": 3, "fragments": 4},
    ],
)
def test_nonsense_is_refused_by_name(changes: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(reversed(changes))):
        site(**changes)


def test_bits_of_a_gaussian_in_steps_of_its_rms() -> None:
    assert gaussian_bits(1.0) == pytest.approx(2.105, abs=1e-3)
    assert gaussian_bits(0.5) == pytest.approx(3.062, abs=1e-3)
    assert gaussian_bits(20.0) == pytest.approx(0.0, abs=1e-3)


def test_bits_of_codecs_that_do_not_quantise_are_their_width() -> None:
    assert payload_bits("raw32", 1.0, 3.0) == 32
    assert payload_bits("bf16", 1.0, 3.0) == 16
    assert payload_bits("auto", 1.0, 2.5) == 2.5


def test_frames_cost_a_header_per_chunk() -> None:
    header = Header(
        PROTOCOL, "0" * 32, (1, 1, 1 << 62), DataKind.PUBLICATION, "learner", "0" * 32, 100, 1000,
        1000, 600, 256, "int4-zstd", (1 << 64) - 1, (1 << 64) - 1, 0, 600,
    )  # fmt: skip
    expected = 3.0 + 8 * 3 * (len(encode_header(header)) + 35) / 600
    assert frame_bits(3.0, 600, 256) == pytest.approx(expected)


@pytest.mark.parametrize("how", ["file", "--set"])
def test_what_is_set_to_its_default_is_kept(
    how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file says what it names, and leaves the rest to the plan."""
    file = tmp_path / "broker.toml"
    file.write_text("[fragments]\ncount = 4\n[merge]\nquorum = 1\n")
    set_it = how == "--set"
    run_plan(
        PlanCommand(
            params="12e9", step="2s", learners=4, wan="2Gbit/s", broker_wan="",
            broker_memory="64GB", broker_cores=16, disk="1GB",
            config=None if set_it else file,
            assignments=["fragments.count=4"] if set_it else [], as_json=True,
        )
    )  # fmt: skip
    plan = json.loads(capsys.readouterr().out)
    assert plan["fragments"] == 4
    assert plan["sync_period_steps"] > 10
