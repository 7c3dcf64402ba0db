"""A Status beside its learners: rounds, refusals, line, disk, process; and a learner that makes no
steps."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from desk import Desk, configure, running
from learner_cases import HandLearner, House, begun

from narrows.broker.config import BrokerConfig, load_broker
from narrows.broker.process.gauges import SAMPLE_S, Meter, Refusals
from narrows.broker.process.service import Service
from narrows.broker.syncer import events as ev
from narrows.broker.syncer.members import FIRST_STEP_S, STALLED_S
from narrows.broker.syncer.status import REFUSED_MAX, REFUSED_S
from narrows.broker.verdict import verdict
from narrows.proto import messages as msg
from narrows.proto.timing import HELLO_S
from narrows.proto.wire import ENVELOPE, decode_control, plain

EVERYBODY = configure(run={"mode": msg.Mode.STREAMING}, merge={"quorum": 0})
BOTH = configure(merge={"quorum": 2})


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path / "state")


# A learner without steps.


@pytest.mark.parametrize(
    ("config", "steps_per_s", "after_s"),
    [(EVERYBODY, 10.0, STALLED_S), (EVERYBODY, 0.1, 200.0), (BOTH, 10.0, STALLED_S)],
)
def test_a_learner_that_makes_no_steps_is_told_and_no_round_waits_for_it(
    config: BrokerConfig, steps_per_s: float, after_s: float
) -> None:
    """Holds `Member.is_stalled`, `Member.is_awaited` and `State.absent`."""
    desk = running("a", "b", config=config, steps_per_s=steps_per_s)
    desk.pass_(20.0, "a", "b", steps_per_s=steps_per_s)  # The time of a step is known.
    made = int(desk.steps["b"])
    for push_id in range(1, int(after_s) - 1):
        desk.push("a", 0, push_id)
        desk.pass_(1.0, "a", steps_per_s=steps_per_s)
        desk.report("b", made)
    hangs = desk.status.learners["b"]
    assert hangs.state == "training" and hangs.stepped_s < after_s
    assert not desk.take(ev.MergeRound), "every learner that trains contributes"
    for push_id in range(int(after_s), int(after_s) + 30):
        desk.push("a", 0, push_id)
        desk.pass_(1.0, "a", steps_per_s=steps_per_s)
        desk.report("b", made)
    hangs = desk.status.learners["b"]
    assert hangs.state == "no steps" and hangs.since_s == hangs.stepped_s >= after_s
    assert desk.status.quorum.training == 1 and desk.status.quorum.ready == 2
    assert desk.merges()[0][:2] == (0, ["a"]), "it is declined"
    desk.report("b", made + 1)
    assert desk.status.learners["b"].state == "training"


def test_a_first_step_and_a_pause_may_take_longer() -> None:
    desk = running("a", "b")
    desk.hello("compiles")
    for _ in range(90):
        desk.report("compiles", 0)
        desk.report("b", 10, paused="evaluating")
        desk.pass_(1.0, "a", steps_per_s=10)
    learners = desk.status.learners
    assert learners["compiles"].state == "training"
    paused = learners["b"]
    assert (paused.state, paused.since_s, paused.paused_s) == ("paused", 90.0, 90.0)
    desk.report("b", 10)
    assert desk.status.learners["b"].state == "training", "its patience begins now"
    for _ in range(int(FIRST_STEP_S)):
        desk.report("compiles", 0)
        desk.pass_(1.0, "a", steps_per_s=10)
    assert desk.status.learners["compiles"].state == "no steps"


def test_a_broker_that_stood_still_takes_nobody_for_stalled() -> None:
    desk = running("a")
    desk.now += 2 * STALLED_S
    desk.report("a", 10)
    assert desk.status.learners["a"].state == "training"


# Rounds and quorum.


def test_the_last_merge_tells_why_it_was_then_and_of_whom() -> None:
    desk = running("a", "b")
    assert desk.status.last_merge is None
    desk.to_launch("a", "b")
    desk.push("b", 0, 1)
    desk.push("a", 0, 1)
    desk.pass_(0.5)
    last = desk.status.last_merge
    assert last is not None and (last.fragment, last.version, last.ago_s) == (0, 1, 0.5)
    assert (last.reason, last.contributors) == ("everybody", ("a", "b"))
    assert desk.status.learners["a"].merged_s == 0.5
    fragments = desk.status.fragments
    assert fragments[0].version_s == 0.5 < fragments[1].version_s


def test_the_quorum_says_for_how_long_it_is_short_and_nobody_trains() -> None:
    desk = running("a", "b", config=BOTH)
    assert (desk.status.quorum.short_s, desk.status.quorum.idle_s) == (0.0, 0.0)
    desk.leave("b")
    desk.pass_(40.0, "a", steps_per_s=10)
    told = desk.status.quorum
    assert (told.needed, told.here, told.ready, told.training) == (2, 1, 1, 1)
    assert told.short_s == pytest.approx(40.0, abs=1.0) and told.idle_s == 0.0
    desk.leave("a")
    desk.pass_(20.0)
    assert desk.status.quorum.idle_s == 20.0


def test_the_time_that_is_left() -> None:
    desk = running("a", config=configure(run={"goal_tokens": 10_000}))
    assert desk.status.left_s is None, "there is no speed yet"
    for fragment in range(4):
        desk.to_launch("a", fragment=fragment)
        desk.push("a", fragment, 1 + fragment)
    told = desk.status
    assert told.left_s == pytest.approx((10_000 - told.run_tokens) / told.tokens_per_s)


# What the host adds.


def test_who_was_refused_is_told_for_ten_minutes(house: House) -> None:
    """Holds `Host.status`."""
    (a,) = begun(house, "site-a")
    stranger = HandLearner(house, "stranger")
    old = msg.Hello(99, "stranger", stranger.incarnation, "", "", "0" * 32, ())
    for _ in range(3):
        stranger.say(old)
    a.say(msg.AskStatus())
    said = a.heard(msg.Status)[-1]
    (refused,) = said.refused
    assert (refused.learner, refused.code, refused.times) == ("stranger", "protocol_version", 3)
    assert "same version" in refused.text and said.refusals == {"protocol_version": 3}
    house.now += REFUSED_S
    told = house.host.status(house.now)
    assert told.refused == () and told.refusals == {"protocol_version": 3}
    foreign = msg.Hello(1, "stranger", stranger.incarnation, "run-0", "", "0" * 32, ())
    stranger.say(foreign)
    (refused,) = house.host.status(house.now).refused
    assert (refused.learner, refused.code) == ("stranger", "wrong_run")
    stranger.say(old)
    stranger.hello()
    assert house.host.status(house.now).refused == (), "it has joined since"


def test_a_second_process_with_a_living_name_is_told(house: House) -> None:
    """Holds `kept_out`: but not a learner that is started again while its name is in use."""
    (a,) = begun(house, "site-a")
    second = HandLearner(house, "site-a")
    second.peer = "02"
    second.incarnation = "site-a.00000002"
    hello = msg.Hello(msg.PROTOCOL, "site-a", second.incarnation, "", "", "0" * 32, ())
    said: list[str] = []
    for _ in range(10):
        second.say(hello)
        house.wait(HELLO_S, a)
        said.append(verdict(house.host.status(house.now)).text)
    assert not any("second process" in text for text in said[:4]) and "second process" in said[4]
    assert "with the name site-a was refused 10 times, last 1 s ago" in said[-1]


def test_a_seeder_that_sends_nothing_is_told() -> None:
    """Holds `Seeding`: with each chunk its time begins anew."""
    desk = Desk()
    desk.hello("a")
    desk.pass_(25.0, "a")
    desk.layout("a")
    desk.pass_(25.0, "a")
    desk.seed_chunk("a", 0, 0)
    assert not desk.status.learners["a"].no_data_s
    assert len(desk.noted("no_data")) == 2
    desk.pass_(31.0, "a")
    told = verdict(desk.status)
    assert told.level == "bad" and "from a for 31 s, though it is to send version 0" in told.text
    desk.seed("a")
    assert not desk.status.learners["a"].no_data_s


def test_of_many_that_are_refused_the_newest_are_told() -> None:
    refusals = Refusals()
    for number in range(REFUSED_MAX + 10):
        refusals.count(f"n{number}", "bad_name", "no", 1.0)
    told = refusals.newest(2.0)
    assert [told[0].learner, told[-1].learner] == ["n10", f"n{REFUSED_MAX + 9}"]


def test_a_disk_that_hides_its_room_costs_no_commit(house: House) -> None:
    """Holds `Store.commit`: after its row is durable nothing may say that it was not written."""
    (a,) = begun(house, "site-a")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "statvfs", Mock(side_effect=OSError(errno.ESTALE, "stale")))
        a.push()
        house.until(lambda: house.heads == (1,), "a version", a)
        told = house.host.status(house.now).disk
    assert (told.free_bytes, told.error) == (None, "")


def test_a_slow_merge_is_not_the_disks_fault() -> None:
    """Holds `Rounds.merged`."""
    desk = running("a")
    desk.to_launch("a")
    desk.commits = False
    desk.push("a", 0, 1)
    (due,) = desk.take(ev.MergeRound)
    desk.pass_(40.0, "a")
    assert desk.status.fragments[0].stage_s == 40.0
    desk.do(desk.syncer.done, due)
    desk.pass_(1.0, "a")
    told = desk.status.fragments[0]
    assert (told.stage, told.stage_s) == ("committing", 1.0)


def test_the_disk_tells_what_it_refuses_and_for_how_long(house: House) -> None:
    """Holds `Pipeline.disk` and `Store.figures`."""
    (a,) = begun(house, "site-a")
    a.push()
    house.until(lambda: house.heads == (1,), "a version", a)
    told = house.host.status(house.now).disk
    assert told.free_bytes and told.journal_bytes >= len(a.payloads[0])
    assert 0 < told.commit_p50_ms <= told.commit_p99_ms
    assert (told.versions_since_snapshot, told.error, told.error_s) == (1, "", 0.0)
    with pytest.MonkeyPatch.context() as patch:
        full = OSError(errno.ENOSPC, "No space left on device")
        patch.setattr(house.store, "commit", Mock(side_effect=full))
        a.listen()
        a.push()
        house.wait(40.0, a)
        told = house.host.status(house.now).disk
        assert "No space left" in told.error and 20.0 < told.error_s < 40.0
    house.until(lambda: house.heads == (2,), "a version", a)
    assert house.host.status(house.now).disk.error == ""


def test_the_queue_of_the_workers_says_since_when_it_never_was_empty(house: House) -> None:
    """Holds `Host.run`."""
    (a,) = begun(house, "site-a")
    assert house.host.status(house.now).process.busy_s == 0.0
    for _ in range(3):
        a.push()
    house.now += 7.0
    told = house.host.status(house.now).process
    assert told.queue == 3 * len(a.payloads) and told.busy_s >= 7.0
    house.settle()
    assert house.host.status(house.now).process.queue == 0


@pytest.mark.parametrize("wan", [{"total_up": 800e3}, {"up": 400e3}])
def test_a_line_is_full_while_its_limits_are_used_up(wan: dict[str, float]) -> None:
    """Two learners have sent as much as they may for 40 s, and then half of it."""
    sender = SimpleNamespace(received_bytes=0, sent_bytes=0)
    downlink: Any = SimpleNamespace(sender=sender, asked_bytes={"a": 0, "b": 0}, live_bytes=0)
    settings = {f"wan.{name}": rate for name, rate in wan.items()}
    meter = Meter(load_broker(None, settings), downlink, 0.0)

    def passes(since: int, until: int, bytes_per_s: int) -> msg.LineStatus:
        for second in range(since + 1, until + 1):
            sender.received_bytes += bytes_per_s
            meter.up_bytes["a"] += bytes_per_s
            meter.turn(2, float(second))
        return meter.line(msg.LineStatus(), float(until))

    told = passes(0, 40, 84_000)  # Beats and repairs have the rest.
    assert told.up_full_s >= 30.0 and told.down_full_s == 0.0
    assert told.up_bits_per_s == pytest.approx(672e3) and told.up_bytes == 3_360_000
    learners = {"a": msg.LearnerStatus(), "b": msg.LearnerStatus()}
    meter.describe(learners, 40.0)
    rates = [each.up_bits_per_s for each in learners.values()]
    assert rates == pytest.approx([672e3, 0.0])
    told = passes(40, 40 + 2 * int(SAMPLE_S), 50_000)
    assert told.up_full_s == 0.0


def test_the_process_tells_of_itself_and_of_keys_that_are_not_admitted(tmp_path: Path) -> None:
    """Holds `Service._measure`."""
    flags = {"broker.listen": "tcp://127.0.0.1:0", "broker.state_dir": str(tmp_path)}
    service = Service(load_broker(None, flags), events=None)
    door = Mock(unknown=Mock(return_value={"the-key": 90.0}))
    service.sockets.door = door
    told = service.host.status(100.0)
    process = told.process
    assert min(process.rss_bytes >> 20, process.cpu_s, process.open_files, process.workers) > 0
    assert [(each.learner, each.code, each.ago_s) for each in told.refused] == [
        ("the-key", "key_refused", 10.0)
    ]
    service.sockets.door = None
    service.stop("the test is over")
    service.run()


def test_a_reader_takes_a_status_of_another_version() -> None:
    """Fields of a newer one are skipped, those that an older one lacks have their default."""
    packed = plain(running("a").status)
    packed["learners"]["a"] = [*packed["learners"]["a"].values(), "new"]
    packed["fragments"] = [[*packed["fragments"][0].values(), "new"], [7]]
    packed["disk"]["new"] = packed["new"] = 1
    del packed["quorum"], packed["line"]["up_limit"]
    body = msgspec.msgpack.encode({"type": "status", **packed})
    said = decode_control([ENVELOPE, body], msg.CONTROL_BYTES_MAX)
    assert isinstance(said, msg.Status) and said.quorum == msg.QuorumStatus()
    assert said.learners["a"].state == "training" and said.fragments[1].elements == 7
