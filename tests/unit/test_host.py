"""The broker's host with real syncer, merging and store, over ports of the test: rounds, crashes,
bad bytes, and attempts of somebody with an admitted key; and the process around it."""

import errno
import json
import logging
import os
import select
import threading
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from learner_cases import LAYOUT, HandLearner, House, begun
from safetensors.numpy import save_file

from narrows.bench.kit.processes import WAIT_S
from narrows.broker.config import load_broker
from narrows.broker.merging import Model
from narrows.broker.process import downlink, host, pipeline
from narrows.broker.process.downlink import SPARE_CONNECTIONS, Connection
from narrows.broker.process.service import (
    KINDS_MAX,
    REPEATS_MAX,
    REPEATS_S,
    LimitRepeats,
    Service,
)
from narrows.proto import messages as msg
from narrows.proto.codec import decode_chunk, encode_values
from narrows.proto.codec.payload import float_payload
from narrows.proto.errors import StateError
from narrows.proto.events import LINES_AT_ONCE, EventFile
from narrows.proto.wire import pack_layout
from narrows.proto.workers import Workers


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path / "state")


def one_round(house: House, *learners: HandLearner) -> None:
    """Each learner pushes once, and adopts what comes of it."""
    version = learners[0].version
    for each in learners:
        each.push()
    house.until(lambda: house.heads[0] > version, "a version", *learners)
    for each in learners:
        each.listen()


def test_a_state_that_is_being_fetched_stays_while_the_head_moves_on(house: House) -> None:
    """Holds `Downlink.serve`."""
    a, late = begun(house, "site-a")[0], HandLearner(house, "late")
    one_round(house, a)
    late.hello()
    late.fetch(msg.DataKind.STATE, 1, 0)
    house.settle()
    one_round(house, a)
    late.fetch(msg.DataKind.STATE, 1, 1)
    a.fetch(msg.DataKind.STATE, 1, 0)
    house.settle()
    late.listen()
    assert late.version == 1
    header = [h for topic, h, _, _ in house.wires.datas if topic.startswith("r/site-a")][-1]
    assert (header.version, header.push_id) == (1, 1), "push 2 is in version 2 only"


def test_an_answer_is_of_the_version_that_is_fetched_until_the_publications_after_it_are_gone(
    house: House,
) -> None:
    """Holds `Downlink.serve`."""
    a, late = begun(house, "site-a")[0], HandLearner(house, "late")
    late.hello()

    def answered(asked: int) -> int:
        late.fetch(msg.DataKind.STATE, asked, 0)
        house.settle()
        return [h for topic, h, *_ in house.wires.datas if topic.startswith("r/late")][-1].version

    assert answered(0) == 0
    one_round(house, a)
    assert answered(1) == 1, "a second copy is made"
    for _ in range(msg.PUBLICATIONS_KEPT - 1):
        one_round(house, a)
        for version in (0, 1):  # A copy that nobody asks for is forgotten.
            answered(version)
    head = house.heads[0]
    assert answered(0) == 0 and answered(head) == 1, "publications lead from it to the head"
    assert answered(1) == 1, "not that of the head"
    one_round(house, a)
    assert answered(head + 1) == head + 1


def test_a_layout_of_another_life_is_dropped(house: House) -> None:
    learner = HandLearner(house, "site-a")
    learner.hello()
    epoch = learner.epoch
    learner.epoch = "7-00000000"
    learner.seed()
    assert house.host.syncer.state.layout is None
    learner.epoch = epoch
    learner.seed()
    assert house.host.syncer.state.layout is not None


def test_snapshots_go_on_after_a_full_disk_but_not_at_each_version(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Holds `Pipeline.durable` and `Pipeline.disk`: no version that is written hides it."""
    monkeypatch.setattr(pipeline, "SNAPSHOT_VERSIONS", 1)
    (a,) = begun(house, "site-a")
    full = Mock(side_effect=OSError(errno.ENOSPC, "the disk is full"))
    with monkeypatch.context() as patch:
        patch.setattr(house.store, "snapshot", full)
        for _ in range(3):
            one_round(house, a)
        assert full.call_count == 1, "each try writes a whole state onto a full disk"
        house.wait(pipeline.SNAPSHOT_AGAIN_S, a)
        one_round(house, a)
        assert full.call_count == 2
        told = house.host.status(house.now).disk
        assert (told.error, told.snapshot_error) == ("", "[Errno 28] the disk is full")
        assert told.error_s == 0 and told.snapshot_error_s > pipeline.SNAPSHOT_AGAIN_S
    house.wait(pipeline.SNAPSHOT_AGAIN_S, a)
    one_round(house, a)
    assert not house.host.status(house.now).disk.snapshot_error
    ((newest,),) = house.store.query("SELECT max(version) FROM snapshots")
    assert newest == house.heads[0]


def test_what_was_decoded_of_a_push_that_is_dropped_does_not_count_for_the_next(
    house: House,
) -> None:
    """Holds `Pipeline.drop`."""
    (a,) = begun(house, "site-a")
    push_id = a.push()
    house.pool.work()  # The loop hears of it later.
    a.say(msg.Bye("gone"))
    a.hello()
    a.announce(push_id)
    house.settle()
    assert house.heads[0] == 0, "nothing of it is here"
    for index in range(len(a.payloads)):
        a.send_chunk(index)
    house.until(lambda: house.heads[0] == 1, "a version", a)


def test_an_answer_waits_for_the_subscriptions_of_its_learner(house: House) -> None:
    """Holds `Downlink.listens`."""
    begun(house, "site-a")
    late = HandLearner(house, "late")
    late.hello(listens=False)
    late.fetch(msg.DataKind.STATE, 0, 0, 1)
    house.settle()
    late.listen()
    assert late.version == -1, "it would be lost"
    house.subscribe(late.incarnation)
    house.settle()
    late.listen()
    assert late.version == 0
    sent = len(house.wires.datas)
    house.host.downlink.keep_listeners(lambda _: False)
    late.fetch(msg.DataKind.STATE, 0, 0)
    house.settle()
    assert len(house.wires.datas) == sent, "its new connections have said nothing yet"
    house.subscribe(late.incarnation)
    house.settle()
    assert len(house.wires.datas) == sent + 1


def test_who_never_listens_holds_no_memory(house: House) -> None:
    """Holds `Downlink.turn`."""
    begun(house, "site-a")
    deaf = HandLearner(house, "deaf")
    deaf.hello(listens=False)
    for _ in range(2 * downlink.EARLY_MAX):
        deaf.fetch(msg.DataKind.STATE, 0, 0, 1)
    house.settle()
    assert not [topic for topic, *_ in house.wires.datas if topic.startswith("r/deaf")]
    assert len(house.host.downlink._early[deaf.incarnation]) == downlink.EARLY_MAX
    deaf.say(msg.Bye("gone"))
    house.wait(1.0)
    assert not house.host.downlink._early


def test_a_state_is_encoded_once_for_all_who_ask(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Holds `Downlink.serve`."""
    encode = Mock(wraps=encode_values)
    monkeypatch.setattr(downlink, "encode_values", encode)
    learners = begun(house, "site-a", "site-b")
    for each in learners:
        for chunk in range(2):
            each.fetch(msg.DataKind.STATE, 0, chunk)
            house.settle()
    assert encode.call_count == 1
    house.now += downlink.IDLE_S
    house.settle()
    assert not house.host.downlink._copies[0], "nobody asks for it any more"


def test_a_failed_merge_is_refused_and_its_learner_may_push_again(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Holds `Pipeline.merged`."""
    (a,) = begun(house, "site-a")
    error = FloatingPointError("version 1 would not be finite")
    monkeypatch.setattr(pipeline, "merge", Mock(side_effect=error))
    a.push()
    house.until(lambda: a.heard(msg.Refuse), "a refusal", a)
    refusal = a.heard(msg.Refuse)[0]
    assert (refusal.code, refusal.push_id) == ("merge_failed", 1)
    assert "next push" in refusal.remedy and house.heads == (0,)
    monkeypatch.undo()
    one_round(house, a)
    assert a.version == 1 and a.outcomes == [((a.incarnation, 2),)]


def test_a_push_with_which_no_sum_is_finite_keeps_nobody_else_out(tmp_path: Path) -> None:
    house = House(tmp_path / "state", {"merge.outer_lr": 4.0})
    a, huge = begun(house, "site-a", "site-b")
    huge.push(2.0**100, tokens=1 << 40)
    a.push()
    house.until(lambda: house.noted("merged"), "a version", a)
    assert [each.code for each in huge.heard(msg.Refuse)] == ["merge_failed"]
    assert len(house.faults) == 1 and not a.heard(msg.Refuse)
    a.listen()
    assert a.outcomes == [((a.incarnation, 1),)] and not house.host.pipeline.pushes


def test_a_chunk_that_was_damaged_on_its_way_is_asked_for_again(house: House) -> None:
    """Holds `Host.data`."""
    (a,) = begun(house, "site-a")
    a.push()
    a.announce(a.push_id + 1)
    a.send_chunk(0, payload_digest=7)
    assert house.faults == [""]
    assert "bad_digest" in house.noted("refused")[0].text
    a.send_chunk(1)
    house.until(lambda: a.heard(msg.Fetch), "a question", a)
    assert a.heard(msg.Fetch) == [msg.Fetch(msg.DataKind.PUSH, 0, 0, a.push_id, ((0, 1),))]
    a.send_chunk(0)
    house.until(lambda: house.noted("merged"), "a version", a)
    a.listen()
    assert a.version == 1 and not a.heard(msg.Refuse)


def test_version_0_may_come_from_a_file(tmp_path: Path) -> None:
    """Holds `Pipeline.seed`."""
    tensors = {e.name: np.full(e.shape, 0.25, np.float32) for e in LAYOUT.entries}
    save_file(tensors, tmp_path / "init.safetensors")
    house = House(tmp_path / "state", {"broker.init": str(tmp_path / "init.safetensors")})
    a = HandLearner(house, "site-a")
    a.hello()
    assert a.heard(msg.Welcome)[0].role == "wait"
    assert [each.kind for each in a.heard(msg.Fetch)] == [msg.DataKind.LAYOUT]
    a.send(msg.DataKind.LAYOUT, 0, msg.LOSSLESS, pack_layout(LAYOUT))
    house.settle()
    assert house.heads == (0,) and set(house.host.pipeline.head(0)[0].global_.tolist()) == {0.25}


@pytest.mark.parametrize("code", ["bad_payload", "not_finite_seed", "too_large"])
def test_a_version_0_that_cannot_be_is_refused_and_the_next_learner_seeds(
    house: House, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    """It is damaged, or does not fit into the memory."""
    rest = np.full(520 * 512 + 700 - (1 << 18), np.nan, np.float32)
    nan = float_payload(rest, np.array([0, rest.size]))[0]
    payload = {"bad_payload": b"no payload", "not_finite_seed": nan}.get(code)
    a, b = HandLearner(house, "site-a"), HandLearner(house, "site-b")
    a.hello()
    b.hello()
    assert a.heard(msg.Welcome)[0].role == "seed"
    if code == "too_large":
        monkeypatch.setattr(pipeline, "decode_chunk", Mock(side_effect=MemoryError))
    a.seed(damaged=payload)
    house.settle()
    monkeypatch.undo()
    (refusal,) = a.heard(msg.Refuse)
    assert refusal.code == code and refusal.remedy
    house.until(lambda: b.heard(msg.Welcome)[-1].role == "seed", "another learner", b)
    b.seed()
    house.settle()
    assert house.heads == (0,)


def test_a_full_pipe_makes_a_publication_wait_and_then_lossy(house: House) -> None:
    """Holds `Downlink.pump`."""
    a, _ = begun(house, "site-a", "site-b")
    house.wires.is_full = True
    a.push()
    house.until(lambda: house.noted("merged"), "a version", a)
    began = house.now
    house.until(lambda: any(each[3] for each in house.wires.datas), "a lossy message", a)
    assert house.now - began <= 1.5
    house.wires.is_full = False
    house.wait(1.0, a)
    a.listen()
    assert a.version == 1


# Attempts of somebody with an admitted key: the memory, the budget, and what nobody could read.


def test_a_connection_is_charged_once_whatever_it_says_and_before_its_learner_says_hello(
    house: House,
) -> None:
    """Holds `Downlink.listens`."""
    downlink = house.host.downlink
    a = Connection(10, 1)
    b = Connection(11, 2)
    steps = [
        (a, "p/00", True, 1), (a, "p/00", True, 1), (a, "p/01", True, 1), (b, "p/00", False, 1),
        (b, "p/00", True, 2), (b, "p/00", False, 1), (b, "p/00", False, 1), (b, "p/00", True, 2),
    ]  # fmt: skip
    assert downlink.sender.fan_out == 0
    for connection, topic, is_on, counted in steps:
        downlink.listens(connection, topic, is_on, house.now)
        assert downlink.sender.fan_out == counted
    downlink.keep_listeners(lambda connection: connection == b)
    assert downlink.sender.fan_out == 1


@pytest.mark.parametrize("topic", ["p/00", "p/03", "p/", "p", ""])
def test_who_hears_any_publication_is_charged_and_no_more_than_the_learners_and_a_few(
    house: House, topic: str
) -> None:
    """Holds `Downlink.keep_listeners`."""
    downlink = house.host.downlink
    for number in range(100):
        assert downlink.sender.fan_out == min(number, SPARE_CONNECTIONS)
        downlink.listens(Connection(number, number), topic, True, house.now)
    downlink.turn(house.now, ["site-m/0.00000001", "site-a.00000001"])
    assert downlink.sender.fan_out == SPARE_CONNECTIONS + 2
    downlink.listens(Connection(0, 0), topic, False, house.now)
    downlink.keep_listeners(lambda connection: connection.descriptor < 3)
    assert downlink.sender.fan_out == 2


def test_pushes_that_displace_each_other_cost_the_workers_nothing(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Holds `Pipeline.keep`."""
    (a,) = begun(house, "site-a")
    decode = Mock(wraps=decode_chunk)
    monkeypatch.setattr(pipeline, "decode_chunk", decode)
    for _ in range(50):
        a.push()
    house.settle()
    assert decode.call_count == len(a.payloads), "the last push alone"


def test_a_publication_of_other_chunks_is_answered_with_the_state(tmp_path: Path) -> None:
    """Holds `Downlink.serve`."""
    house = House(tmp_path / "state")
    (a,) = begun(house, "site-a")
    one_round(house, a)
    house.kill()
    again = House(tmp_path / "state", {"wan.down": "4Mbit/s"}, now=house.now + 1, lives=1)
    assert again.config.shared.chunk_elements < house.config.shared.chunk_elements
    late = HandLearner(again, "late")
    late.hello()
    late.fetch(msg.DataKind.PUBLICATION, 1, 0, 1, 2)
    again.wait(5.0, late)
    kinds = [header.kind for topic, header, _, _ in again.wires.datas if topic.startswith("r/")]
    assert kinds == [msg.DataKind.STATE]


# The process around it: what it writes for people, and its workers.


def test_what_a_learner_asked_for_that_is_gone_waits_no_more(house: House) -> None:
    """Holds `Downlink.turn`."""
    (a,) = begun(house, "site-a")
    house.wires.is_full = True
    a.fetch(msg.DataKind.STATE, 0, 0, 1)
    house.settle()
    assert len(house.host.downlink.sender) == 2
    a.say(msg.Bye("gone"))
    house.wait(1.5)
    assert len(house.host.downlink.sender) == 0


@pytest.mark.parametrize("code", ["bad_payload", "not_finite"])
def test_what_a_worker_refuses_counts_against_the_key_of_its_learner(
    house: House, code: str
) -> None:
    """Holds `Pipeline.checked`."""
    (a,) = begun(house, "site-a")
    a.push()
    a.announce(a.push_id + 1)
    whole = a.payloads[1]
    a.payloads[1] = {"bad_payload": whole[:-1], "not_finite": b"\xc0\x7f" + whole[2:]}[code]
    a.send_chunk(1)
    assert not house.faults, "no worker has seen it yet"
    house.settle()
    assert a.heard(msg.Refuse)[0].code == code and house.faults == [a.peer]


def test_what_no_socket_takes_is_not_charged(house: House) -> None:
    """Holds `Downlink.pump`."""
    (a,) = begun(house, "site-a")
    before = house.host.downlink.sender.sent_bytes
    house.wires.is_full = True
    for _ in range(100):
        a.say(msg.AskStatus())
    assert house.host.downlink.sender.sent_bytes == before
    house.wires.is_full = False
    a.say(msg.AskStatus())
    assert house.host.downlink.sender.sent_bytes > before


def test_a_start_that_takes_long_shortens_no_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Holds `replay`, at a start of `Host`."""
    house = House(tmp_path / "state", {"run.goal_tokens": "100"})
    (a,) = begun(house, "site-a")
    one_round(house, a)
    a.say(msg.Report(1, 100, 1.0, (a.version,), finished=(0,)))
    house.wait(1.0)
    house.kill()

    def slow(*arguments: Any) -> Model | None:
        house.now += 60.0
        return pipeline.replay(*arguments)

    monkeypatch.setattr(host, "replay", slow)
    house.start()
    house.wait(5.0)
    assert house.host.finished is None, "site-a has taught the run: 30 s are for it"
    assert not house.noted("stood_still")


def test_the_end_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Holds `Pipeline.commit_end`."""
    house = House(tmp_path / "state", {"run.goal_tokens": "100"})
    (a,) = begun(house, "site-a")
    one_round(house, a)
    watchers = [HandLearner(house, f"watcher-{index}") for index in range(host.ASKERS_MAX + 1)]
    for each in watchers:
        each.say(msg.AskStatus())
    built = Mock(wraps=house.host.status)
    monkeypatch.setattr(house.host, "status", built)
    a.say(msg.Report(1, 100, 1.0, (a.version,), finished=(0,)))
    house.wait(1.0)
    a.say(msg.Bye("the run has ended"))
    house.wait(1.0)
    assert house.host.finished is not None and house.host.finished.missing == ()
    assert built.call_count == 1, "for all who asked"
    heard = [[said.phase for said in each.heard(msg.Status)] for each in watchers]
    assert heard == [["ending"], *[["ending", "ended"]] * host.ASKERS_MAX], (
        "told once more, unasked"
    )
    house.kill()
    house.start()
    assert house.host.syncer.status(house.now).phase == "ended"


def test_a_commit_that_is_under_way_at_a_stop_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Holds `Service.run`."""
    flags = {"broker.listen": "tcp://127.0.0.1:0", "broker.state_dir": str(tmp_path / "state")}
    service = Service(load_broker(None, flags), events=None)
    told = Mock()
    began = threading.Event()

    def commit() -> str:
        began.set()
        return "durable"

    def turn() -> None:
        service._workers.run(commit, told)
        assert began.wait(WAIT_S), "no worker is free"  # What has not begun is dropped.
        service.host.stop("the test stops it", 0.0)

    monkeypatch.setattr(service, "_turn", turn)
    service.run()
    assert told.call_args.args[0] == "durable" and service.is_saved


def test_nothing_is_said_to_be_durable_in_a_directory_that_is_gone(house: House) -> None:
    """Holds `Pipeline.close`."""
    begun(house, "site-a")
    house.folder.rename(house.folder.with_name("elsewhere"))
    with pytest.raises(StateError, match="was removed or replaced"):
        house.host.pipeline.close()


def test_the_events_file_is_bounded_and_a_full_disk_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Holds `EventFile.write`."""
    path = tmp_path / "events.jsonl"
    monkeypatch.setattr("narrows.proto.events.EVENTS_BYTES_MAX", 200)
    events = EventFile(path)
    for number in range(10):
        events.write({"event": "note", "number": number})
    kept = [json.loads(line)["number"] for line in path.read_text().splitlines()]
    assert kept[-1] == 9 and path.stat().st_size <= 200
    assert path.with_name("events.jsonl.1").stat().st_size <= 200
    full = EventFile(Path("/dev/full"))
    full.write({"event": "lost"})
    for each in (events, full):
        each.close()


def test_a_flood_of_one_kind_of_line_is_cut_and_told() -> None:
    """Holds `LimitRepeats.filter`."""
    now = [1000.0]
    limit = LimitRepeats(lambda: now[0])

    def passes(kind: str, level: int = logging.WARNING) -> str:
        line = logging.LogRecord("n", level, "", 0, "%s", ("bad",), None)
        line.kind = kind
        line.created = 5000.0 - now[0]  # The clock on the wall goes back.
        return line.getMessage() if limit.filter(line) else ""

    passed = [passes("refused site-a") for _ in range(REPEATS_MAX + 5)]
    assert passed == ["bad"] * REPEATS_MAX + [""] * 5 and passes("joined")
    now[0] += REPEATS_S
    assert passes("later") == "bad (left out: 5 lines)"
    passed = [passes(f"refused site-{number}") for number in range(2 * KINDS_MAX)]
    assert passed.count("bad") == KINDS_MAX - 1 + REPEATS_MAX, "new names are one kind by then"
    assert passes("disk ") and passes("an error", logging.ERROR) and passes("later")
    assert not passes("refused site-x")
    now[0] += REPEATS_S
    hidden = KINDS_MAX + 1 - REPEATS_MAX + 1
    assert passes("one more") == f"bad (left out: {hidden} lines)"


def test_a_flood_of_notes_leaves_the_events_file_its_other_lines(tmp_path: Path) -> None:
    """Holds `EventFile.write`."""
    path = tmp_path / "events.jsonl"
    events = EventFile(path)
    for _ in range(LINES_AT_ONCE + 200):
        events.write({"kind": "refused"}, kind="refused")
    events.write({"kind": "merged"})
    events.write({"kind": "joined"}, kind="joined")
    events._quotas["refused"].used = 0.0  # Time passes.
    events.write({"kind": "refused"}, kind="refused")
    events.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    kinds = Counter(line["kind"] for line in lines)
    assert kinds["merged"] == kinds["joined"] == 1
    assert len(lines) == 3 + LINES_AT_ONCE + 200 - lines[-1]["left_out"] <= LINES_AT_ONCE + 150


def test_a_wake_while_the_pool_closes_writes_to_no_closed_pipe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Holds `Workers.close`."""
    pool = Workers(1, "test")
    write = os.write
    threads = list[threading.Thread]()

    def write_while_another_thread_closes(fd: int, data: bytes) -> int:
        threads.append(threading.Thread(target=pool.close))
        threads[0].start()
        threads[0].join(0.2)  # It would be over by now if nothing held it back.
        return write(fd, data)

    monkeypatch.setattr(os, "write", write_while_another_thread_closes)
    pool.wake()
    threads[0].join()
    pool.wake()
    assert len(threads) == 1, "a closed pool writes nothing"


def test_all_workers_share_the_items_of_a_work_and_the_first_error_is_raised() -> None:
    """Holds `Workers.spread`."""
    pool = Workers(3, "test")
    meeting = threading.Barrier(3)
    ends = list[Any]()
    begun = list[int]()

    def meet(item: int) -> tuple[int, int]:
        meeting.wait(WAIT_S)
        return item, threading.get_ident()

    def fail(item: int) -> None:
        begun.append(item)
        if item > 1:
            meeting.wait(WAIT_S)  # All of them fail.
            raise ValueError(item)

    met = pool.spread(meet, range(3))
    assert [item for item, _ in met] == [0, 1, 2]
    assert len({thread for _, thread in met}) == 3
    with pytest.raises(ValueError, match="2"):
        pool.spread(fail, range(99))
    assert sorted(begun) == [0, 1, 2, 3, 4], "nothing begins after an error"
    for _ in range(9):  # More works than threads, and each asks for help.
        pool.run(lambda: pool.spread(abs, range(99)), lambda result, now: ends.append(result))
    while len(ends) < 9:
        assert select.select([pool.wake_fd], [], [], WAIT_S)[0]
        pool.finish(0.0)
    pool.close()
    ends.append(pool.spread(abs, range(99)))  # As a work does that was running then.
    assert ends == [list(range(99))] * 10
