"""Plans: more of anything never makes them worse."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from narrows.broker.config import BrokerConfig
from narrows.broker.planning.capacity import fits, loads_of, make_plan
from narrows.broker.planning.demand import RunPlan, Site

CONFIG = BrokerConfig()
MORE = st.floats(1.0, 1e4)


def log_uniform(low: float, high: float) -> st.SearchStrategy[float]:
    """From low to high, every order of magnitude alike."""
    return st.floats(0, 1).map(lambda share: low * (high / low) ** share)


@st.composite
def sites(draw: st.DrawFn, *, given_settings: bool = False) -> Site:
    """From toys to trillions of parameters, from telephone lines to backbones."""
    params = int(draw(log_uniform(1, 1e13)))
    return Site(
        params=params,
        step_s=draw(log_uniform(1e-3, 1e3)),
        learners=draw(st.integers(1, 1024)),
        line_bits_per_s=draw(log_uniform(1e4, 1e12)),
        broker_line_bits_per_s=draw(log_uniform(1e4, 1e12)),
        broker_memory_bytes=int(draw(log_uniform(1e8, 1e13))),
        broker_cores=draw(st.integers(1, 128)),
        disk_bytes_per_s=draw(log_uniform(1e6, 1e11)),
        fragments=draw(st.integers(1, min(params, 512))) if given_settings else 0,
        sync_period_steps=draw(st.integers(1, 1000)) if given_settings else 0,
    )


RATES = ("line_bits_per_s", "broker_line_bits_per_s", "disk_bytes_per_s")


@given(sites(), st.sampled_from(RATES), MORE)
def test_a_faster_line_or_disk_never_makes_a_plan_worse(
    site: Site, name: str, factor: float
) -> None:
    before = make_plan(site, CONFIG)
    after = make_plan(replace(site, **{name: getattr(site, name) * factor}), CONFIG)
    assert fits(after) or not fits(before)
    assert after.sync_period_steps <= before.sync_period_steps


@given(sites(), st.integers(1, 1000))
def test_more_memory_or_cores_never_make_it_stop_fitting(site: Site, factor: int) -> None:
    before = make_plan(site, CONFIG)
    memory = replace(site, broker_memory_bytes=site.broker_memory_bytes * factor)
    cores = replace(site, broker_cores=min(10_000, site.broker_cores * factor))
    for after in (make_plan(memory, CONFIG), make_plan(cores, CONFIG)):
        assert fits(after) or not fits(before)


@given(sites(given_settings=True), st.sampled_from(RATES), MORE)
def test_with_given_settings_no_load_grows_with_bandwidth(
    site: Site, name: str, factor: float
) -> None:
    richer = replace(site, **{name: getattr(site, name) * factor})
    for before, after in zip(*(_loads(each) for each in (site, richer)), strict=True):
        # The checkpoint's pause is whole versions: what it takes of a disk may round up a little.
        assert after <= before * (1 + 1e-9) or name == "disk_bytes_per_s"


@given(sites(given_settings=True), st.integers(2, 1000))
def test_a_longer_period_or_fewer_learners_never_load_more(site: Site, factor: int) -> None:
    period = site.sync_period_steps
    fewer = replace(site, learners=max(1, site.learners // factor))
    calm = RunPlan(site, CONFIG, period * factor)
    for other in (RunPlan(fewer, CONFIG, period), calm):
        for before, after in zip(
            loads_of(RunPlan(site, CONFIG, period)), loads_of(other), strict=True
        ):
            assert after.share <= before.share * (1 + 1e-9)


@given(sites())
def test_every_broker_owns_a_fragment_and_every_fragment_a_parameter(site: Site) -> None:
    plan = make_plan(site, CONFIG)
    assert 1 <= plan.brokers <= plan.fragments <= site.params
    assert plan.overlap_steps < plan.sync_period_steps


def _loads(site: Site) -> list[float]:
    return [load.share for load in loads_of(RunPlan(site, CONFIG, site.sync_period_steps))]
