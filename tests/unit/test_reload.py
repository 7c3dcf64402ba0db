"""Rates that change while the broker runs, and a budget that is too small."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from machines import Desk, one, only

from narrows.broker.config import BrokerConfig, load_config
from narrows.broker.syncer import events as ev
from narrows.broker.syncer.member import Stepping
from narrows.proto import messages as msg


def other(desk: Desk, **settings: Any) -> BrokerConfig:
    """The desk's configuration with other values."""
    wan = replace(desk.state.config.wan, **settings)
    return replace(desk.state.config, wan=wan)


def test_new_rates_are_told_to_everybody() -> None:
    desk = Desk().running("a", "b")
    config = other(desk, up=5e6, total_down=40e6)
    effects = desk.do(ev.ConfigRead(config))
    assert one(effects, ev.RatesChanged).wan.up == 5e6
    told = only(effects, msg.Welcome)
    assert [each.settings.message_bytes for each in told] == [6250, 6250]
    assert {each.up_bits_per_s for each in only(effects, msg.Beat)} == {5e6}


def test_what_needs_a_restart_is_named_and_left_as_it_is() -> None:
    desk = Desk().running("a")
    config = other(desk, streams=9)
    effects = desk.do(ev.ConfigRead(config))
    assert "wan.streams stay as they are" in only(effects, ev.Note)[0].text
    assert desk.state.settings.streams != 9
    assert not only(effects, ev.RatesChanged)


def test_a_transfer_cut_for_the_smaller_rate_is_still_taken_after_the_rate_rose() -> None:
    desk = Desk(wan__up="1Mbit/s").running("a")
    least = desk.state.least_chunk_elements
    desk.do(ev.ConfigRead(other(desk, up=1e9)))
    assert desk.state.settings.message_bytes > 100_000
    assert desk.state.least_chunk_elements == least


def test_a_budget_that_is_too_small_is_named_once_with_what_would_do() -> None:
    desk = Desk(wan__total_up="200kbit/s").running("a", "b")
    state = desk.state
    state.table = tuple(replace(part, elements=1_000_000) for part in state.table)
    for name in ("a", "b"):
        desk.say(name, msg.Report(9, 9, 0.1, None, (), msg.TokenLedger(), 1e5))
    need = desk.syncer.allowance.need
    [note] = only(need.warn(), ev.Note)
    assert "wan.total_up is too little" in note.text
    assert "per learner, the budget gives 100 kbit/s" in note.text
    assert need.warn() == []
    need.forget()
    assert len(need.warn()) == 1


def test_enough_is_not_warned_of() -> None:
    desk = Desk(wan__total_up="200kbit/s").running("a", "b")
    assert desk.syncer.allowance.need.warn() == []


def test_rates_are_read_with_their_units() -> None:
    config = load_config(None, {"wan.up": "1.5Gbit/s"})
    assert config.wan.up == 1.5e9


def test_under_codec_auto_the_bits_follow_the_budget() -> None:
    desk = Desk(codec__push="auto", codec__push_bits=3.0, wan__up="1Mbit/s").running("a")
    desk.state.table = tuple(replace(part, elements=1_000_000) for part in desk.state.table)
    report = msg.Report(9, 9, 0.25, None, (), msg.TokenLedger(), 1e6)
    desk.say("a", report)
    member = desk.state.roster.get("a")
    assert member is not None
    member.stepping = Stepping(5, desk.now - 1.0, 9, desk.now)
    told = only(desk.wait(1.1), msg.Welcome)[-1].settings
    # 20 steps of 0.25 s for two million parameters.
    assert 2.0 < told.push_bits < 2.5
    assert told.publish_bits == desk.state.config.codec.publish_bits
    assert not only(desk.wait(5.0), msg.Welcome)
    desk.do(ev.ConfigRead(other(desk, up=1e9)))
    assert only(desk.wait(1.1), msg.Welcome)[-1].settings.push_bits == 3.0
    assert not only(desk.wait(5.0), msg.Welcome)
