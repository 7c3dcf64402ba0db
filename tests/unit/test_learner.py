"""The ten-line loop with a real broker on loopback: joining, training, outages, leaving."""

import math
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from msgspec.structs import replace
from run_cases import Broker, Loop, broker, stranger, tiny

from narrows.bench.kit.processes import wait_until
from narrows.learner import (
    BrokerUnreachable,
    ConfigError,
    Learner,
    LocalProtocolError,
    Refused,
    Unfinished,
)
from narrows.learner import exchange as exchange_module
from narrows.learner import link as link_module
from narrows.learner.session import View
from narrows.proto.keys import AllowList, SiteKey, create_broker_key, new_pair, write_site_key
from narrows.proto.messages import RunSettings

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A run without a goal, for models from `tiny`; a learner trains there for the others."""
    with broker(tmp_path_factory.mktemp("run")) as made:
        seed = Loop(made.address, "seed")
        done = threading.Event()

        def life() -> None:
            with seed.learner:
                while not done.is_set():  # As long as the tests of this module take.
                    seed.step()

        thread = threading.Thread(target=life)
        thread.start()
        wait_until(lambda: min(seed.versions, default=0) >= 1, "the first versions")
        yield made
        done.set()
        thread.join()


# A whole life.


def test_a_learner_ends_with_the_final_model_and_accounts_for_every_token(tmp_path: Path) -> None:
    with broker(tmp_path, run__goal_tokens=1000) as run:
        loop = Loop(run.address, "a/0")
        loop.train()
        run.join()
    learner, stats = loop.learner, loop.learner.stats()
    assert learner.health == "final" and learner.should_stop and learner.progress == 1.0
    assert learner.run_tokens >= 1000 == learner.goal_tokens and learner.run_step > 0
    assert stats["logged_tokens"] == 8 * stats["steps"] > 0
    assert stats["merged_tokens"] + stats["lost_tokens"] == stats["logged_tokens"]
    assert min(stats["up_bytes"], stats["down_bytes"], stats["code_s"]) > 0


# Joining.


def closed_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def test_who_joins_says_so_and_what_it_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "narrows.learner")
    monkeypatch.setattr(exchange_module, "HEARD_S", 0.0)

    def told(level: str) -> str:
        own = [each for each in caplog.records if each.name == "narrows.learner"]
        return "\n".join(each.getMessage() for each in own if each.levelname == level)

    nobody = f"tcp://127.0.0.1:{closed_port()}"
    with pytest.raises(BrokerUnreachable):
        Loop(nobody, "alone", join_timeout_s=0.2).train()
    assert f"joining {nobody} as alone" in told("INFO")
    assert f"no answer from {nobody} yet; trying for 0.2 s" in told("WARNING")
    with broker(tmp_path, run__learners_at_start=2) as run:
        loops = [Loop(run.address, name) for name in ("first", "second")]
        threads = [threading.Thread(target=each.train, args=(lambda: True,)) for each in loops]
        threads[0].start()
        # What a program that has not set logging up shows begins with WARNING.
        wait_until(
            lambda: "the run has not begun: `narrows status` says" in told("WARNING"), "that"
        )
        assert f"admitted to run {run.service.host.syncer.state.run_id}" in told("INFO")
        assert "the model is here" not in told("INFO")
        threads[1].start()
        for each in threads:
            each.join()
    assert told("INFO").count("the model is here: versions [") == 2
    assert "waits for the model" not in told("WARNING"), "a large one takes its time"


def test_a_learner_whose_name_is_in_use_is_not_told_that_nobody_answers(
    run: Broker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(exchange_module, "HEARD_S", 0.3)
    with Loop(run.address, "twin").learner:
        with pytest.raises(Refused, match="another process is twin"):
            # By another address: in one process a learner is told of the other one at once.
            address = run.address.replace("127.0.0.1", "localhost")
            Loop(address, "twin", join_timeout_s=2.0).train()
    lines = [each.getMessage() for each in caplog.records]
    (refused,) = [index for index, line in enumerate(lines) if line.endswith("trying again")]
    assert not any("no answer" in line for line in lines[refused:])


def test_an_open_learner_of_the_name_in_this_process_is_named_at_once(
    run: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    """To the broker it is another process, which may end: it would have the learner wait for ten
    seconds."""
    forgotten, second = Loop(run.address, "notebook"), Loop(run.address, "notebook")
    forgotten.learner.__enter__()
    forgotten.step()
    with pytest.raises(LocalProtocolError, match=r"notebook is still open.*close\(\)"):
        second.learner.__enter__()
    forgotten.step()
    forgotten.learner.close()
    forgotten.learner.close()
    forgotten.optimizer.step()  # It is an optimizer like any other now.
    assert forgotten.learner.health == "ended" and forgotten.learner.stats()["steps"] == 2
    with Loop(run.address, "notebook").learner as third:
        third.close()
    assert third.health == "ended", "the block is left without a word"
    with pytest.raises(LocalProtocolError, match="entered once"):
        third.__enter__()


def test_a_blocked_data_port_is_named(
    run: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "narrows.learner")
    monkeypatch.setattr(exchange_module, "HEARD_S", 0.0)
    closed, syncer = closed_port(), run.service.host.syncer
    uplink, downlink = syncer.state.ports
    syncer.state.ports = uplink, closed
    with pytest.raises(BrokerUnreachable, match=f"the downlink port {closed}.*firewall"):
        Loop(run.address, "site-a", join_timeout_s=0.5).train()
    syncer.state.ports = uplink, downlink
    with broker(tmp_path) as other:
        syncer = other.service.host.syncer
        syncer.state.ports = closed, syncer.state.ports[1]
        with pytest.raises(BrokerUnreachable, match=f"the uplink port {closed}"):
            Loop(other.address, "site-a", join_timeout_s=0.5).train()
    assert "sends version 0, with which the run begins" in caplog.messages


def test_something_that_is_due_and_does_not_move_for_ten_seconds_is_blocked() -> None:
    stall, now = link_module.Stall(10.0), 100.0
    assert not stall.look(True, 0, now) and not stall.look(True, 0, now + 9.9)
    assert stall.look(True, 0, now + 10.0) and stall.look(True, 0, now + 99.0)
    assert not stall.look(True, 1, now + 99.0), "it moves"
    assert not stall.look(False, 1, now + 108.0), "what waits for its turn is not due"
    assert not stall.look(True, 1, now + 117.0) and stall.look(True, 1, now + 118.0)


def test_a_data_port_that_is_closed_in_the_run_is_told_once_and_when_it_is_over(
    run: Broker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "narrows.learner")
    monkeypatch.setattr(link_module, "BLOCKED_S", 0.3)
    closed, state = closed_port(), run.service.host.syncer.state
    uplink, downlink = state.ports
    blocked = f"on the uplink port {closed}: open it in the firewall"

    def told(text: str) -> int:
        return sum(line.endswith(text) for line in caplog.messages)

    def welcomed() -> None:
        """Has the broker tell its ports anew."""
        with loop.exchange.link.lock:
            loop.exchange.link.host.lost(time.monotonic())

    state.ports = closed, downlink
    loop = Loop(run.address, "cut")
    with loop.learner as learner:
        loop.train_on(lambda: learner.health == "blocked")
        assert told(blocked) == 1
        state.ports = uplink, downlink
        welcomed()
        loop.train_on(lambda: learner.health == "connected" and learner.stats()["merged_tokens"])
        assert told(blocked) == 1 and told(f"data moves on the uplink port {uplink}") == 1
        state.ports = uplink, closed
        welcomed()
        loop.train_on(lambda: learner.health == "blocked")
        assert told(f"on the downlink port {closed}: open it in the firewall") == 1
        state.ports = uplink, downlink
        welcomed()
        loop.train_on(lambda: learner.health == "connected")


@pytest.mark.parametrize("what", ["no such host", "another program", "another key"])
def test_who_cannot_reach_the_broker_is_told_why_at_once_and_at_the_end(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(exchange_module, "HEARD_S", math.inf)  # What is not certain is told never.
    with ExitStack() as stack:
        if what == "no such host":
            address, words = "tcp://no..host:7070", "the host name no..host does not resolve"
        elif what == "another program":
            address = stack.enter_context(stranger(b"HTTP/1.0 400 Bad Request\r\n\r\n"))
            words = f"{address} answers, but not as a broker does"
        else:
            create_broker_key(tmp_path / "keys")
            address = stack.enter_context(
                broker(tmp_path, broker__keys=str(tmp_path / "keys"))
            ).address
            words = "as one does whose key is not"
        key = SiteKey("site-a", new_pair(), (new_pair().public,), address)
        write_site_key(tmp_path / "a.key", key)
        with pytest.raises(BrokerUnreachable, match=words):
            Loop("", "", key=tmp_path / "a.key", join_timeout_s=4.0).train()
    (line,) = [each for each in caplog.messages if words in each]
    assert line.endswith("; trying for 4 s"), caplog.messages


@pytest.mark.parametrize("has_lost_them", [False, True])
def test_the_keys_of_a_broker_that_a_site_trusts_take_turns(
    has_lost_them: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The broker's next key stands in the file before the present one. A file that has none when
    it is read again changes nothing."""
    monkeypatch.setattr(link_module, "REDIAL_S", 0.2)
    keys, pair = tmp_path / "keys", new_pair()
    if has_lost_them:
        monkeypatch.setattr(link_module, "read_site_key", lambda file: SiteKey("site-a", pair))
    servers = new_pair().public, create_broker_key(keys).public
    AllowList.allow(keys, "site-a", pair.public)
    with broker(tmp_path, broker__keys=str(keys)) as run:
        write_site_key(tmp_path / "a.key", SiteKey("site-a", pair, servers, run.address))
        with Loop("", "", key=tmp_path / "a.key").learner as learner:
            assert learner.health == "connected"
    assert ("the key in use stays" in caplog.text) is has_lost_them


def test_a_learner_with_a_key_does_not_join_a_broker_that_has_none(
    run: Broker, tmp_path: Path
) -> None:
    key = SiteKey("site-a", new_pair(), (new_pair().public,), run.address)
    write_site_key(tmp_path / "a.key", key)
    with pytest.raises(Refused, match=r"has no keys.*join without one"):
        Loop("", "", key=tmp_path / "a.key").train()


def test_a_name_or_a_key_that_cannot_be_used_is_named_before_joining(tmp_path: Path) -> None:
    write_site_key(tmp_path / "a.key", SiteKey("site-a", new_pair()))
    for arguments, words in [
        ({"name": "site-a"}, "broker is missing.*--broker and --name, in Python broker= and name="),
        ({"broker": "tcp://h:1"}, "name is missing"),
        ({"broker": "h", "name": "site-a"}, "tcp://HOST:PORT"),
        ({"broker": "tcp://h:1", "name": "a b"}, "letters"),
        ({"broker": "tcp://h:1", "name": "site-b", "key": tmp_path / "a.key"}, "of another name"),
        ({"broker": "tcp://h:1", "key": tmp_path / "a.key"}, "--server"),
    ]:
        model = tiny()
        with pytest.raises(ConfigError, match=words):
            Learner(model, torch.optim.SGD(model.parameters()), **arguments)  # type: ignore[arg-type]


def test_a_rank_whose_group_is_not_there_yet_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would begin as a learner of its own. Holds `is_one_of_several`."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(LocalProtocolError, match=r"init_process_group\(\).*WORLD_SIZE=2"):
        Loop("tcp://127.0.0.1:1", "a")


# The loop.


@pytest.mark.parametrize(
    ("during", "yielded"), [("a step", [0, 1]), ("the wait for data", [0]), ("the join", [])]
)
def test_the_loader_is_asked_for_nothing_once_the_run_ends(
    monkeypatch: pytest.MonkeyPatch, during: str, yielded: list[int]
) -> None:
    """It may wait for data for ever: whoever makes them looks for the end, too."""
    ended, got = ["the join"], list[int]()

    def view(exchange: exchange_module.Exchange) -> View:
        return View(during in ended, 0.0, 0.0, 0, 0, 0, "connected")

    monkeypatch.setattr(exchange_module.Exchange, "view", view)

    def loader() -> Iterator[int]:
        assert during != "the join", "asked a run that has ended for data"
        yield 0
        ended.append("the wait for data")
        yield 1
        assert "a step" not in ended, "asked for data after the end"

    for batch in Loop("tcp://127.0.0.1:1", "a").learner.until_end(loader()):
        got.append(batch)
        if batch == 1:
            ended.append("a step")
    assert got == yielded


def test_progress_does_not_fall_with_a_larger_goal() -> None:
    loop = Loop("tcp://127.0.0.1:1", "a")
    learner = loop.learner
    with loop.exchange.session() as (session, _):
        session.settings = RunSettings(goal_tokens=1000)
        session.beat = replace(session.beat, run_tokens=600)
        assert learner.progress == 0.6
        session.settings = RunSettings(goal_tokens=2000)
        assert learner.progress == 0.6
        session.beat = replace(session.beat, run_tokens=1500)
        assert learner.progress == 0.75


def test_the_loop_says_what_it_forgot(
    run: Broker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(exchange_module, "uncached_advice", lambda: "set NUMBA_CACHE_DIR")
    loop = Loop(run.address, "misuse")
    with pytest.raises(LocalProtocolError, match=r"learner\.log\(tokens="), loop.learner:
        loop.optimizer.step()
    with pytest.raises(LocalProtocolError, match="entered once"), loop.learner:
        pass
    assert not loop.optimizer._optimizer_step_post_hooks
    assert "set NUMBA_CACHE_DIR" in caplog.messages, "a read-only install works, slower to start"


def test_the_last_of_several_optimizers_is_the_boundary_or_the_loop_says_when(run: Broker) -> None:
    model = tiny()
    parts = [torch.optim.SGD(model[i].parameters(), lr=0.1) for i in (0, 2)]
    wrapped = SimpleNamespace(optimizers=[SimpleNamespace(optimizer=part) for part in parts])
    loop = Loop(run.address, "several", model, optimizer=wrapped)
    with loop.learner as learner:
        for tokens in (3, 4):
            learner.log(tokens)
            parts[0].step()
            parts[1].step()
        learner.log(100)
        learner.discard()  # A scaler withheld the step.
        assert (learner.stats()["steps"], learner.stats()["logged_tokens"]) == (2, 7)
    manual = Loop(run.address, "manual", boundary="manual")
    with manual.learner as learner:
        learner.log(5)
        manual.optimizer.step()
        assert not learner.stats()["steps"]
        learner.step()
        assert learner.stats()["logged_tokens"] == 5


def test_a_newcomer_warms_up_and_pauses(run: Broker, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "narrows.learner")
    loop = Loop(run.address, "late")
    assert loop.learner.lr_scale == 0.05 and loop.learner.health == "joining"
    with loop.learner as learner:
        assert min(loop.versions) > 0 and "warms up for 20 steps" in caplog.text
        loop.step()
        assert learner.lr_scale == 0.1
        status = run.service.host.status
        with learner.pause("measuring the loss"):
            wait_until(lambda: "measuring" in str(status(0.0).learners), "the pause")
        wait_until(lambda: "measuring" not in str(status(0.0).learners), "its end")
    assert loop.learner.health == "ended", "it left before the end, with nothing left to merge"


def test_the_figures_of_a_chart_are_flat_numbers(run: Broker) -> None:
    loop = Loop(run.address, "chart")
    assert loop.learner.metrics()["narrows/health"] == 1, "it has not joined"
    with loop.learner as learner:
        assert learner.goal_tokens == 0
        loop.train_on(lambda: learner.stats()["merged_tokens"])
        first = learner.metrics()
        assert all(type(each) is float for each in first.values())
        assert min(first[f"narrows/{way}_bits_per_s"] for way in ("up", "down")) > 0
        assert first["narrows/merged_tokens"] <= learner.stats()["merged_tokens"]
        assert first["narrows/run_tokens"] > 0 == first["narrows/health"]
    up_bytes = learner.stats()["up_bytes"]
    learner.metrics()
    assert learner.metrics()["narrows/up_bits_per_s"] == 0 < up_bytes, "since the last call"


def test_a_loop_that_breaks_leaves_at_once(run: Broker) -> None:
    loop = Loop(run.address, "broken", leave_timeout_s=None)
    with pytest.raises(ZeroDivisionError), loop.learner:
        loop.step()
        1 / 0  # noqa: B018
    leaves = "broken leaves: the loop was broken off"
    wait_until(lambda: any(leaves in note["text"] for note in run.events("note")), leaves)
    assert not loop.exchange.link._thread.is_alive()


def test_a_run_that_ends_without_a_learner_leaves_it_unfinished(tmp_path: Path) -> None:
    with broker(tmp_path, run__goal_tokens=1000) as run:
        loop = Loop(run.address, "site-a", leave_timeout_s=0.1)
        with pytest.raises(Unfinished, match="narrows export"), loop.learner as learner:
            loop.train_on(lambda: learner.should_stop)
            run.stop()
        assert not learner.health == "final"
