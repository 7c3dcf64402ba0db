"""The page's history and its stream of events, fed with made-up statuses: no socket, no browser."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest
from made_up import MadeUpRun
from msgspec.structs import replace

from narrows.broker.page import history as module
from narrows.broker.page.history import BIN_S, CURVES_MAX, POINTS_MAX, History, Line
from narrows.broker.page.metrics import StatusCollector
from narrows.broker.page.server import Watcher, application
from narrows.proto.errors import BrokerUnreachable, ErrorCode, Refused
from narrows.proto.messages import LearnerState, RefusalStatus, Status

NOON = 1_000_000.0


def fed(run: MadeUpRun, seconds: int, history: History | None = None) -> History:
    """A history that has seen so many seconds of the run."""
    history = history or History()
    for _ in range(seconds):
        history.take(run.ask(), NOON + run.seconds)
    return history


class Viewer:
    """Does with events what page.js does, so that a test sees what a browser would."""

    def __init__(self, everything: dict[str, Any]) -> None:
        self.states = {name: each["states"] for name, each in everything["learners"].items()}
        self.merged = {name: each["merged"] for name, each in everything["learners"].items()}
        self.bin = everything["bin"]
        self.rates = list(everything["rates"])

    def change(self, said: dict[str, Any]) -> None:
        for _ in range(said["bin"] - self.bin):
            for name in self.states:
                self.states[name] = (self.states[name] + self.states[name][-1])[-120:]
                self.merged[name] = [*self.merged[name], 0][-120:]
        self.bin = said["bin"]
        for name, row in said["learners"].items():
            self.states[name] = self.states.get(name, "?")[:-1] + row["state"]
            self.merged[name] = [*self.merged.get(name, [0])[:-1], row["merged"]]
        self.rates += said["rates"]


def test_changes_lead_a_viewer_to_what_another_one_gets_at_first() -> None:
    run = MadeUpRun(8)
    history = fed(run, 20)
    viewer = Viewer(history.everything())
    for _ in range(300):
        fed(run, 1, history)
        viewer.change(history.change())
    fresh = Viewer(history.everything())
    assert (viewer.states, viewer.merged, viewer.bin) == (fresh.states, fresh.merged, fresh.bin)
    assert len(viewer.rates) == 320


def test_a_learner_that_dies_is_seen_in_its_lane_and_named() -> None:
    run = MadeUpRun(2)
    history = fed(run, 10)
    run.learners["site-0001"].state = LearnerState.LOST
    status = run.ask()
    status.learners["site-0001"].state = LearnerState.LOST
    history.take(status, NOON + 11)
    change = history.change()
    assert change["learners"]["site-0001"]["state"] == "l"
    assert [text for _, text in change["notices"]] == ["site-0001: lost"]


def test_a_lane_shows_that_a_line_is_cut_and_a_refusal_is_noticed() -> None:
    run = MadeUpRun(2)
    history = fed(run, 10)
    status = run.ask()
    status.learners["site-0001"].no_data_s = 40.0
    refused = RefusalStatus("site-x", "layout_differs", "site-x: layout_differs: another model", 1)
    for seconds in (11, 12):
        history.take(replace(status, refused=(refused,)), NOON + seconds)
        row = history.everything()["learners"]["site-0001"]
        assert row["states"][-1] == "c" and row["text"] == "line up cut, 40 s"
    assert history.everything()["refusals"] == [(NOON + 11, "site-x was refused: another model")]
    for number in range(50):  # Without keys, a peer may have any name.
        other = (replace(refused, learner=f"x{number}", text="no"),)
        history.take(replace(status, refused=other), NOON + 13)
    assert history.everything()["refusals"] == [
        (NOON + 13, f"x{number} was refused: no") for number in range(45, 50)
    ]
    texts = [text for _, text in history.everything()["notices"]]
    assert texts == ["site-0001: line up cut"]


def test_a_broker_that_is_gone_is_told_since_when_and_what_to_do_until_it_is_back() -> None:
    run = MadeUpRun(2)
    history = fed(run, 10)
    gone = BrokerUnreachable("tcp://x did not answer")
    history.failed(gone, NOON + 12)
    history.failed(gone, NOON + 20)
    sentence = history.change()["sentence"]
    assert sentence["level"] == "bad" and "for 8 s" in sentence["text"]
    assert "learners train on" in sentence["remedy"] and not history.is_answering
    assert history.everything()["learners"]["site-0000"]["text"].startswith("not known")
    run.seconds = 30.0
    fed(run, 1, history)
    texts = [text for _, text in history.everything()["notices"]]
    assert texts[:2] == ["the broker does not answer", "the broker is back after 19 s"]
    states = history.everything()["learners"]["site-0000"]["states"]
    assert "?" in states[1:] and states[-1] in module.LETTERS.values()


def test_a_broker_that_has_ended_with_its_run_is_not_missed() -> None:
    run = MadeUpRun(1)
    history = fed(run, 10)
    gone = BrokerUnreachable("tcp://x did not answer")
    history.take(replace(run.ask(), phase="ended", awaited=("site-0000",)), NOON + 11)
    history.failed(gone, NOON + 12)
    assert history.verdict.level == "bad", "a learner lacks the final model"
    history.take(replace(run.ask(), phase="ended"), NOON + 13)
    history.failed(gone, NOON + 14)
    assert history.verdict.text.startswith("The run has ended: "), "and the level is ok"
    assert history.change()["notices"] == [] and not history.is_answering
    metrics = StatusCollector(lambda: history).collect()
    assert [each.samples[0].value for each in metrics] == [0.0, 1.0], "up, run_ended"
    assert answered(Watcher(run.ask, lambda: history), "/healthz")["status"] == 200
    history.take(replace(run.ask(), phase="ended"), NOON + 20)
    assert history.change()["notices"] == [(NOON + 20, "the broker is back after 6 s")]


@pytest.mark.parametrize("count", [CURVES_MAX, CURVES_MAX + 1])
def test_many_learners_have_a_median_and_a_band_and_few_have_curves(count: int) -> None:
    shown = fed(MadeUpRun(count), 30).everything()
    assert bool(shown["band"]) == (count > CURVES_MAX)
    assert bool(shown["curves"]) == (count <= CURVES_MAX)
    assert all(low <= mid <= high for _, low, mid, high in shown["band"])


def test_names_that_come_and_go_end_no_chart_and_fill_no_memory() -> None:
    """Holds `History` given more names than curves, and a run that has fewer again."""
    past = [(f"job-{index}", index, 5.0) for index in range(500)]
    history = fed(MadeUpRun(CURVES_MAX + 1), 5, History(past))
    band = history.everything()["band"]
    assert band[0] == (0, 5.0, 5.0, 5.0) and history.everything()["curves"] == {}
    run = MadeUpRun(1)
    for _ in range(50):
        fed(run, 1, history)
    newest = history.everything()["band"][-1]
    assert newest[1:] == pytest.approx([run.learners["site-0000"].loss] * 3)
    assert not history._curves


def test_the_past_stays_within_bounds() -> None:
    line = Line()
    for index in range(20 * POINTS_MAX):
        line.add(index, 0.0)
    xs = [point[0] or 0.0 for point in line.points]
    assert POINTS_MAX / 2 <= len(xs) <= POINTS_MAX
    assert xs == sorted(xs) and xs[0] == 0 and xs[-1] > 19 * POINTS_MAX

    history = fed(MadeUpRun(3), int(module.BINS_MAX * BIN_S) + 50)
    lanes = history.everything()["learners"].values()
    assert all(len(each["states"]) == len(each["merged"]) == module.BINS_MAX for each in lanes)
    assert len(history.everything()["notices"]) <= module.NOTICES_MAX


def test_a_storm_of_learners_is_one_notice() -> None:
    run = MadeUpRun(50)
    history = fed(run, 3)
    status = run.ask()
    for each in status.learners.values():
        each.state = LearnerState.SILENT
    history.take(status, NOON + 4)
    texts = [text for _, text in history.change()["notices"]]
    assert texts[-1].startswith("site-0000, site-0001") and texts[-1].endswith("more: silent")


def test_curves_from_before_the_page_come_first() -> None:
    run = MadeUpRun(1)
    history = fed(run, 5, History([("site-0000", 1, 9.0), ("site-0000", 2, 8.0)]))
    points = history.everything()["curves"]["site-0000"]
    assert points[:2] == [(1.0, 9.0), (2.0, 8.0)] and len(points) == 7


def kinds(stream: AsyncGenerator[bytes], steps: list[Callable[[], Any]]) -> list[str]:
    """The kinds of events that a viewer gets, one after each step."""

    async def follow() -> list[str]:
        found = []
        for step in steps:
            await step()
            event = await anext(stream)
            found.append(event.split(b"\n")[0].decode().removeprefix("event: "))
            json.loads(event.partition(b"data: ")[2])
        await stream.aclose()
        return found

    return asyncio.run(follow())


def test_a_viewer_that_misses_an_event_gets_everything() -> None:
    run = MadeUpRun(2)
    watcher = Watcher(run.ask, History)

    async def once() -> None:
        await watcher.poll()

    async def twice() -> None:
        await watcher.poll()
        await watcher.poll()

    assert kinds(watcher.events(), [once, once, twice, once]) == ["all", "change", "all", "change"]


def test_another_run_at_the_address_begins_another_page() -> None:
    statuses = [MadeUpRun(2).ask(), replace(MadeUpRun(1).ask(), run_id="another")]
    watcher = Watcher(lambda: statuses.pop(0), History)

    async def once() -> None:
        await watcher.poll()

    assert kinds(watcher.events(), [once, once]) == ["all", "all"]
    assert list(watcher.history.everything()["learners"]) == ["site-0000"]


def test_who_saw_an_outage_gets_the_lanes_anew() -> None:
    """Holds `History.take`: viewers draw what they did not see as the last state."""
    run = MadeUpRun(3)
    history = fed(run, 10)
    history.failed(BrokerUnreachable("nobody is there"), NOON + 12)
    run.seconds = 60.0
    shapes = [fed(run, 1, history).is_reshaped for _ in range(2)]
    assert shapes == [True, False]


@pytest.mark.parametrize(
    ("error", "text", "remedy"),
    [
        (
            Refused(ErrorCode.KEY_REFUSED, "it does not admit the key of me", remedy="allow it"),
            "The broker does not answer this page: it does not admit the key of me",
            "allow it",
        ),
        (ValueError("no code"), "no answer from the broker for 0 s: no code", "asks again"),
    ],
)
def test_no_error_leaves_an_old_sentence_or_blames_a_broker_that_runs(
    error: Exception, text: str, remedy: str
) -> None:
    """Holds `Watcher.poll`."""
    run = MadeUpRun(1)
    answers: list[Callable[[], Status]] = [run.ask, lambda: raise_(error), run.ask]
    watcher = Watcher(lambda: answers.pop(0)(), History)
    found = []
    for _ in range(3):
        asyncio.run(watcher.poll())
        found.append(watcher.history.verdict)
    assert (found[0].level, found[1].level, found[2].level) == ("ok", "bad", "ok")
    assert text in found[1].text and remedy in found[1].remedy


def raise_(error: Exception) -> Status:
    raise error


def answered(
    watcher: Watcher, path: str, *, host: str = "localhost", behind_proxy: bool = False
) -> Any:
    """Status and headers of an answer."""
    app = application(watcher, behind_proxy=behind_proxy)
    scope = {
        "type": "http", "method": "GET", "path": path, "query_string": b"", "root_path": "",
        "scheme": "http", "http_version": "1.1", "headers": [(b"host", host.encode())],
    }  # fmt: skip
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    asyncio.run(app(scope, receive, send))
    return sent[0]


@pytest.mark.parametrize(
    ("host", "behind_proxy", "code"),
    [
        ("127.0.0.1:7080", False, 200), ("localhost", False, 200), ("[::1]:7080", False, 200),
        ("evil.example:7080", False, 403), ("", False, 403), ("[", False, 403),
        ("127.0.0.1.evil.example", False, 403), ("runs.example", True, 200),
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/metrics", "/healthz", "/none"])
def test_every_answer_is_guarded(path: str, host: str, behind_proxy: bool, code: int) -> None:
    """Another site's name that leads to this machine reads nothing, and no answer lacks the
    policy."""
    watcher = Watcher(MadeUpRun(1).ask, History)
    asyncio.run(watcher.poll())
    begun = answered(watcher, path, host=host, behind_proxy=behind_proxy)
    assert begun["status"] == (404 if path == "/none" and code == 200 else code)
    headers = dict(begun["headers"])
    assert b"default-src 'none'" in headers[b"content-security-policy"]
    assert headers[b"x-content-type-options"] == b"nosniff"


def test_metrics_of_a_broker_that_is_gone_are_only_that_it_is() -> None:
    def ask() -> Status:
        raise BrokerUnreachable("nobody is there")

    watcher = Watcher(ask, History)
    history = fed(MadeUpRun(3), 2)
    names = [metric.name for metric in StatusCollector(lambda: history).collect()]
    assert {"narrows_up", "narrows_merges", "narrows_learner_loss"} <= set(names)
    assert len(names) == len(set(names))
    asyncio.run(watcher.poll())
    alone = list(StatusCollector(lambda: watcher.history).collect())
    assert [(each.name, each.samples[0].value) for each in alone] == [
        ("narrows_up", 0.0), ("narrows_run_ended", 0.0),
    ]  # fmt: skip
