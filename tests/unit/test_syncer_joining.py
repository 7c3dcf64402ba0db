"""Hello, Welcome and version 0: who may join, whose history is not ours, and who seeds; what the
status tells of learners, and their rates; and the end: one last round per fragment, and who is
waited for."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

import msgspec
import pytest
from desk import CHUNKS, EPOCH, LAYOUT, RUN, Desk, configure, incarnation, resumed, running

from narrows.broker.syncer import events as ev
from narrows.broker.syncer.members import RATE_MIN
from narrows.broker.verdict import verdict
from narrows.proto import messages as msg
from narrows.proto.errors import RETRIED
from narrows.proto.layout import fingerprint
from narrows.proto.messages import Role
from narrows.proto.timing import RETURN_S
from narrows.proto.units import BitRate
from narrows.proto.wire import encode_control, unpack_layout

T = TypeVar("T")

REFUSALS: list[tuple[dict[str, Any], str, str]] = [
    ({"protocol": 99}, "protocol_version", "same version"),
    ({"site": "site-b"}, "key_name", "its key's site"),
    ({"incarnation": incarnation("b")}, "bad_name", "own name"),
    ({"life": 2}, "name_in_use", "choose another name"),
    ({"run_id": "run-0"}, "wrong_run", "the right --state-dir: the learner trains on"),
    ({"copies": (msg.CopyDigest(0, 1),)}, "layout_differs", "number of fragments"),
    ({"fingerprint": "0" * 32}, "layout_differs", "same model code"),
]


@pytest.mark.parametrize(("fields", "code", "remedy"), REFUSALS)
def test_a_hello_is_refused_with_what_to_do(fields: dict[str, Any], code: str, remedy: str) -> None:
    desk = running("site-a")
    refusal = desk.hello("site-a", **({"peer": "another"} | fields))
    assert (refusal.code, refusal.push_id) == (code, 0)
    assert refusal.expected and refusal.got and remedy in refusal.remedy
    if "fingerprint" in fields:
        assert unpack_layout(refusal.layout) == LAYOUT
    # The learner that is here has lost nothing.
    desk.take(ev.Send)
    desk.report("site-a", 20)
    assert not desk.told(msg.Bye, "site-a")


def test_a_full_run_asks_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(msg, "LEARNERS_MAX", 2)
    desk = running("a", "b")
    assert desk.hello("c").code == "over_capacity"
    assert isinstance(desk.hello("b", 1, peer="again"), msg.Welcome)


def test_a_site_has_half_of_the_places_while_others_are_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(msg, "LEARNERS_MAX", 4)
    desk = running("b/0")
    for name in ("b/1", "b/2", "a", "b/2"):
        assert isinstance(desk.hello(name, site=name[0]), msg.Welcome), "or is here"
    desk.leave("b/2")
    refusal = desk.hello("b/3", site="b")
    assert refusal.code == "over_capacity" and "half of the places" in refusal.expected
    assert isinstance(desk.hello("b/3"), msg.Welcome), "without keys it says not who speaks"


def test_learners_of_another_run_are_named_once_each_and_come_back() -> None:
    """The state directory is not mounted, so the broker has begun in an empty one."""
    desk = Desk()
    for name in ("site-a", "site-b") * 5:
        refusal = desk.hello(name, run_id="x" * 1000)
        desk.pass_(1.0)
    assert refusal.code in RETRIED and refusal.message.startswith("this broker holds another run")
    assert (refusal.expected, refusal.got) == (f"run {RUN}", f"run {'x' * 80}")
    assert not desk.noted("refused") and len(desk.noted("other_run")) == 2
    assert "which is empty: was the state dir" in desk.noted("other_run")[0].text
    desk.pass_(60.0)
    desk.hello("site-a", run_id="x")
    assert verdict(desk.status) == (
        "warning",
        "site-a was refused 6 times, last 0 s ago: it belongs to run x, and this broker holds run "
        f"{RUN}, which is empty",
        "Start the broker with the state directory of that run, which was lost or is not mounted; "
        "if that run is over, stop site-a",
    )
    assert len(desk.noted("other_run")) == 3, "after a minute without it that is news again"


def test_a_name_is_free_after_three_silent_seconds() -> None:
    desk = running("a", "b")
    desk.push("a", 0, 1)
    desk.announce("a", 1, 2)
    desk.pass_(2.9, "b")
    assert isinstance(desk.hello("a", 2), msg.Refuse)
    desk.pass_(0.1, "b")
    assert isinstance(desk.hello("a", 2), msg.Welcome)
    # What the old process pushed completely counts, what it had only announced is gone.
    assert desk.take(ev.Drop) == [ev.Drop(1, incarnation("a"), 2)]
    assert desk.status.learners["a"].incarnation == incarnation("a", 2)


def test_a_connection_belongs_to_who_said_hello_last_and_a_learner_to_its_newest_one() -> None:
    desk = running("a", "b")
    desk.announce("b", 1, 2)
    old = desk.peer("a")
    assert isinstance(desk.hello("a", peer=desk.peer("b")), msg.Welcome)
    assert ev.Drop(1, incarnation("b"), 2) in desk.take(ev.Drop), "b has no connection any more"
    desk.do(desk.syncer.control, old, None, msg.Report(1, 1, None, (0, 0, 0, 0)))
    assert [each.peer for each in desk.take(ev.Send)] == [old], "it is told to say Hello"


COPIES = tuple(
    msg.CopyDigest(version, digest) for version, digest in ((5, 50), (4, 41), (3, 30), (-1, 0))
)


@pytest.mark.parametrize(
    ("head", "epoch", "go_back", "ahead"),
    [
        (5, "6-0123abcd", (1,), 0),
        (3, "6-0123abcd", (0, 1), 3),
        (3, EPOCH, (), 0),  # Within an epoch a publication may overtake a Welcome.
    ],
)
def test_a_learner_of_another_epoch_goes_back_where_its_copy_is_not_ours(
    head: int, epoch: str, go_back: tuple[int, ...], ahead: int
) -> None:
    desk = Desk(recovered=resumed(heads=(head,) * 4), published_digest=lambda f, v: 10 * v)
    welcome = desk.hello("a", run_id=RUN, epoch=epoch, copies=COPIES)
    assert (welcome.go_back, welcome.role) == (go_back, Role.ADOPT)
    noted = [(note.warning, note.fields["versions"]) for note in desk.noted("history_lost")]
    assert noted == [(True, ahead)] * (ahead > 0)


def test_only_the_newest_names_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("narrows.broker.syncer.members.NAMES_MAX", 3)
    desk = running("keeper")
    for i in range(6):
        desk.hello(f"n{i}")
        desk.leave(f"n{i}")
        desk.now += 1.0
    assert list(desk.status.learners) == ["keeper", "n4", "n5"]


def test_an_operator_who_stops_the_broker_sends_everybody_away() -> None:
    desk = running("a", "b")
    desk.take(ev.Send)
    desk.do(desk.syncer.stop, "maintenance")
    assert [bye.reason for bye in desk.told(msg.Bye)] == ["maintenance"] * 2
    assert desk.status.stopping == "maintenance"
    desk.pass_(5.0, "a", "b", steps_per_s=10)
    assert not desk.take(ev.MergeRound)


# Version 0.


def asked(desk: Desk, kind: msg.DataKind) -> list[msg.Fetch]:
    return [fetch for fetch in desk.told(msg.Fetch) if fetch.kind is kind]


def test_the_first_or_the_named_learner_seeds_and_the_others_wait() -> None:
    desk = Desk(configure(run={"learners_at_start": 3}))
    first, second = desk.hello("b"), desk.hello("a")
    assert (first.role, second.role) == (Role.SEED, Role.WAIT)
    assert first.beat.heads == () and first.beat.phase is msg.Phase.SEEDING
    desk.seed("b")
    assert [each for each in desk.log if isinstance(each, ev.Seed)] == [ev.Seed(LAYOUT)]
    assert desk.status.waiting_for == ("learners: 2 of 3 have joined",)
    desk.take(ev.Send)
    desk.hello("c")
    welcomes = desk.told(msg.Welcome)
    assert [each.role for each in welcomes] == [Role.WAIT, Role.ADOPT, Role.ADOPT, Role.ADOPT]
    assert welcomes[-1].beat.heads == (0, 0, 0, 0)
    named = Desk(configure(run={"seeder": "b"}))
    assert named.hello("a").role is Role.WAIT
    assert named.status.waiting_for == ("b to join and send version 0",)
    assert named.hello("b").role is Role.SEED


@pytest.mark.parametrize("noticed_by", ["the time", "the Hello of another one"])
def test_the_next_learner_seeds_if_the_first_one_dies(noticed_by: str) -> None:
    desk = Desk()
    desk.hello("a")
    desk.hello("b")
    desk.layout("a")
    assert desk.seed_chunk("a", 2, 0)
    desk.now += 2.0
    desk.report("b", 0)
    desk.take(ev.Send)
    desk.now += 1.0  # a is silent now, and no event has noticed it yet.
    if noticed_by == "the time":
        desk.do(desk.syncer.advance)
    else:
        assert desk.hello("c").role is Role.WAIT
    assert ev.Drop(2, incarnation("a"), 0) in desk.log
    assert [each.role for each in desk.told(msg.Welcome, "b")] == [Role.SEED]
    assert not desk.seed_chunk("a", 2, 1)
    desk.seed("b")
    assert desk.status.phase == "running"


def test_a_lone_seeding_learner_goes_on_after_a_silence_and_may_be_another_process() -> None:
    desk = Desk()
    desk.hello("a")
    desk.layout("a")
    assert desk.seed_chunk("a", 0, 0)
    desk.pass_(40.0)
    assert desk.hello("a", peer="again").role is Role.SEED
    assert not desk.seed_chunk("a", 0, 0), "what came before is kept"
    desk.pass_(3.0)
    assert desk.hello("a", 2, fingerprint="e" * 32).role is Role.SEED, "with another model"


HUGE = msg.Layout(
    0, tuple(msg.LayoutEntry(f"w{i}", (1 << 46,), "float32", "mean") for i in range(4))
)
"""Its bitmaps would fill the memory."""


@pytest.mark.parametrize(
    ("layout", "fragments", "own", "refused", "remedy"),
    [
        (LAYOUT, 4, "e" * 32, "a", "do not change it"),
        (LAYOUT, 4000, fingerprint(LAYOUT), "a", "fragments.count"),
        (HUGE, 4, fingerprint(HUGE), "a", "train a smaller model"),
        (LAYOUT, 4, fingerprint(LAYOUT), "b", "same model code"),
    ],
)
def test_a_layout_that_cannot_be_or_that_others_do_not_have_is_refused(
    layout: msg.Layout, fragments: int, own: str, refused: str, remedy: str
) -> None:
    """It is not the one of its Hello, or too small for so many fragments, or too large, or b has
    another one."""
    desk = Desk(configure(fragments={"count": fragments}))
    desk.hello("a", fingerprint=own)
    desk.hello("b", fingerprint="f" * 32)
    desk.take(ev.Send)
    desk.layout("a", layout)
    sent = {each.peer: each.message for each in desk.take(ev.Send)}
    refusal = sent[f"{refused}:1"]
    assert isinstance(refusal, msg.Refuse) and remedy in refusal.remedy
    if refused == "a":
        welcome = sent["b:1"]
        assert isinstance(welcome, msg.Welcome) and welcome.role is Role.SEED


def test_a_connection_that_had_another_key_does_not_speak_for_its_learner() -> None:
    desk = running("site-a")
    for message in (msg.Bye("gone"), msg.Report(1 << 40, 1 << 40, None, (0,) * 4)):
        effects = desk.do(desk.syncer.control, desk.peer("site-a"), "site-b", message)
        sent = [each.message for each in effects if isinstance(each, ev.Send)]
        assert not any(isinstance(each, msg.Refuse) for each in sent), sent
    learner = desk.status.learners["site-a"]
    assert learner.state == "training" and learner.logged_tokens == 100


# The status: what people see, and who is waited for.


def test_the_status_of_a_run() -> None:
    desk = running("a", "b")
    desk.push("a", 0, 1)
    desk.push("b", 0, 1, tokens=3000)
    desk.report("b", 20, bases=(0, 0, 0, -1))
    desk.report("a", 20, bases=(0,) * 4)
    status = desk.status
    assert status.phase == "running"
    assert [each.version for each in status.fragments] == [1, 0, 0, 0]
    assert (status.run_tokens, status.merges, status.contributions) == (1000, 1, 2)
    learner = status.learners["a"]
    assert (learner.logged_tokens, learner.merged_tokens) == (250, 250)
    assert (learner.state, learner.steps_per_s) == ("training", 10.0)
    assert learner.versions_behind == 1
    assert status.learners["b"].state == "joining"
    desk.report("a", 30, bases=(9, 0, 0, 0))
    assert desk.status.learners["a"].versions_behind == 0
    assert desk.syncer.state.members.by_name["a"].bases == (1, 0, 0, 0), "not ahead of the run"
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(status), type=msg.Status) == status


class Untouched(tuple[int, ...]):
    """Versions by fragment that must not be looked at."""

    def __iter__(self) -> NoReturn:
        raise AssertionError("a status looks at each fragment of each learner")

    __eq__ = __getitem__ = __iter__  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]


class Counted(list[T]):
    """A list that counts how often it is gone through."""

    times = 0

    def __iter__(self) -> Iterator[T]:
        self.times += 1
        return super().__iter__()


@pytest.mark.parametrize("learners", [2, 40])
def test_a_status_looks_once_at_each_learner_and_fragment(learners: int) -> None:
    """Holds `status`: at 1,000 learners and 100 fragments the pairs would hold the loop up."""
    desk = running(*(f"site-{number}" for number in range(learners)))
    state = desk.syncer.state
    desk.announce("site-0", 0, 1)
    desk.now += 20.0
    for each in state.members:
        each.heard_at = desk.now
        each.versions_behind = 1
        each.bases = Untouched(each.bases)
    state.rounds = counted = Counted(state.rounds)
    assert len(desk.status.learners) == learners
    assert counted.times <= 6


def test_a_learner_is_paused_silent_lost_or_gone() -> None:
    desk = running("a", "b", "site/0")
    desk.report("a", 20, paused="evaluating")
    desk.do(desk.syncer.revoked, ["site"])
    assert desk.status.learners["site/0"].state == "key revoked"
    (note,) = desk.noted("revoked")
    assert note.text.startswith("the key of site/0 was revoked: it is cut off until")
    assert note.warning and note.fields == {"learner": "site/0"}
    assert desk.hello("site/0", peer="site/0:1").role is msg.Role.ADOPT, "it has a key again"
    desk.leave("site/0")
    paused = desk.status.learners["a"]
    assert (paused.state, paused.reason, paused.paused_s) == ("paused", "evaluating", 0.0)
    states = [paused.state]
    for seconds in (3.0, 27.0):
        desk.pass_(seconds, "b")
        states.append(desk.status.learners["a"].state)
    (note,) = desk.noted("lost")
    assert note.warning and "a was not heard for 30 s" in note.text and "process" in note.text
    desk.report("a", 20)
    assert desk.told(msg.Bye, "a"), "its connection is gone: it says Hello again"
    desk.leave("b")
    states.append(desk.status.learners["b"].state)
    assert states == ["paused", "silent", "lost", "left"]


def test_a_firewall_in_the_way_is_named_once() -> None:
    desk = running("a", "b")
    desk.announce("a", 0, 1)
    desk.announce("b", 0, 1)
    for chunk in range(CHUNKS - 1):
        desk.pass_(4.0, "a", "b", steps_per_s=10)
        desk.chunk("b", 0, 1, chunk)
    (hint,) = desk.noted("no_data")
    assert "a firewall close port 7071" in hint.text
    assert desk.status.learners["a"].hint and not desk.status.learners["b"].hint


@pytest.mark.parametrize(
    ("steps_per_s", "stepping", "paused", "mode", "suspected"),
    [
        (10.0, 10.0, None, msg.Mode.DECOUPLED, True),
        (10.0, 0.0, None, msg.Mode.DILOCO, True),  # It makes no step without a new version.
        (10.0, 0.05, None, msg.Mode.DECOUPLED, False),  # A step takes longer than that.
        (1 / 3, 1 / 3, None, msg.Mode.DECOUPLED, False),  # A period takes longer than that.
        (10.0, 10.0, "evaluating", msg.Mode.DECOUPLED, False),
    ],
)
def test_a_closed_downlink_is_named_once_and_nobody_blamed_for_it(
    steps_per_s: float, stepping: float, paused: str | None, mode: msg.Mode, suspected: bool
) -> None:
    """b is heard, and has not taken a version since a's first push was merged."""
    config = configure(run={"mode": mode}, merge={"quorum": 2})
    desk = running("a", "b", "c", config=config, steps_per_s=steps_per_s)
    for second in range(30):
        for name in "ac":
            desk.push(name, 0, 1 + second)
        desk.pass_(1.0, "a", "c", steps_per_s=steps_per_s)
        desk.report("b", 10 + int(stepping * second), bases=(0,) * 4, paused=paused)
    texts = [note.text for note in desk.noted("no_version") if note.warning]
    assert len(texts) == suspected
    assert all("does a firewall close port 7072 (downlink) of the broker" in each for each in texts)
    assert desk.status.learners["b"].hint.startswith("b has taken no") is suspected
    about = [line for line in desk.status.waiting_for if "b" in line.split(" to push")[0]]
    assert ("new versions to reach b" in about) is suspected
    assert not suspected or len(about) == 1, "b is not blamed"


def test_a_joiner_whose_questions_only_repeat_cannot_be_reached() -> None:
    """To one of the others the chunks come slowly; one has all of them, and is in a long step."""
    desk = running("a")
    joins = msg.Report(0, 0, None, (-1,) * 4)
    for name in ("deaf", "slow", "busy"):
        desk.hello(name)
    for second in range(14):
        for name, first in (("deaf", 0), ("slow", second), ("busy", 0)):
            ask = msg.Fetch(msg.DataKind.STATE, 0, 0, 0, ((first % 3, 2),))
            desk.send(name, joins if name == "busy" and second > 2 else ask)
        desk.pass_(1.0, "a")
    (note,) = desk.noted("no_version")
    assert note.text.startswith("deaf has taken no new version for 1")


def test_a_status_of_a_full_run_with_the_longest_texts_can_be_read() -> None:
    desk = running("a")
    longest = "\U0001f600" * msg.TEXT_CHARACTERS_MAX
    for number in range(msg.LEARNERS_MAX - 1):
        name = f"{'s' * 48}/{number:015d}"
        desk.hello(name)
        desk.report(name, 10, paused=longest)
    frames = encode_control(desk.status)
    assert longest[:80].encode() in frames[1] and len(frames[1]) < msg.CONTROL_BYTES_MAX / 2
    (left,) = [each for each in desk.send(name, msg.Bye(longest)) if isinstance(each, ev.Note)]
    assert left.text.endswith(longest[:80]) and longest[:81] not in left.text


# Rates: a share is lowered before another one is raised.


def desk_with(**wan: float) -> Desk:
    return Desk(configure(wan={name: BitRate(rate) for name, rate in wan.items()}))


def rates(desk: Desk, names: Iterable[str]) -> list[float]:
    return [desk.status.learners[name].up_bits_per_s_granted for name in names]


@pytest.mark.parametrize(
    ("wan", "rate"),
    [({}, 0.0), ({"up": 5e6}, 5e6), ({"total_up": 8e6}, 8e6), ({"up": 5e6, "total_up": 8e6}, 5e6)],
)
def test_the_rate_of_a_lone_learner(wan: dict[str, float], rate: float) -> None:
    assert desk_with(**wan).hello("a").beat.up_bits_per_s == rate


def test_a_newcomer_gets_its_share_when_the_others_have_heard_of_theirs() -> None:
    desk = desk_with(total_up=8e6)
    assert desk.hello("a").beat.up_bits_per_s == 8e6
    desk.log.clear()
    assert desk.hello("b").beat.up_bits_per_s == RATE_MIN
    assert rates(desk, "a") == [4e6]
    assert desk.told(msg.Beat, "a")[0].up_bits_per_s == 4e6
    desk.now += 0.1
    desk.report("a", 1)
    assert rates(desk, "b") == [RATE_MIN], "that Report may have been on its way"
    desk.now += 1.0
    desk.report("a", 2)
    assert rates(desk, "b") == pytest.approx([4e6])
    assert desk.told(msg.Beat, "b")[-1].up_bits_per_s == pytest.approx(4e6)
    # Two newcomers do not both get what one of the others has given back.
    desk.pass_(2.0, "a", "b")
    desk.hello("c")
    desk.hello("d")
    desk.pass_(2.0, "a")  # b has not shown that it has heard of its new rate.
    assert sum(rates(desk, "cd")) == pytest.approx(2e6, rel=0.01)


def test_a_lost_learner_gives_its_share_back_and_comes_back_as_a_newcomer() -> None:
    desk = desk_with(total_up=8e6)
    desk.hello("a")
    desk.hello("b")
    desk.pass_(3.0, "a", "b")
    assert rates(desk, "a") == [4e6]
    desk.pass_(31.0, "a")
    assert rates(desk, "a") == [8e6]
    assert desk.hello("b", peer="b:1").beat.up_bits_per_s == RATE_MIN
    desk.pass_(2.0, "a", "b")
    assert rates(desk, "ab") == pytest.approx([4e6] * 2)


def test_names_that_send_nothing_have_one_share_together() -> None:
    silent = [f"b/{number}" for number in range(50)]
    desk = running("a", "c", *silent, config=configure(wan={"total_up": BitRate(12e9)}))
    desk.pass_(3.0, "a", "c", *silent)
    assert rates(desk, ["a", "c", "b/0"]) == pytest.approx([4e9, 4e9, 8e7], rel=0.01)
    for name in ("a", "c", "b/0"):
        desk.push(name, 0, 1)
    desk.pass_(3.0, "a", "c", *silent)
    desk.hello("d")  # A newcomer has a whole share for its first push.
    desk.pass_(3.0, "a", "c", "d", *silent)
    shares = [2.4e9, 2.4e9, 2.4e9, 2.4e9, 2.4e9 / 49]
    assert rates(desk, ["a", "c", "d", "b/0", "b/1"]) == pytest.approx(shares, rel=0.01)


def test_who_sends_version_0_has_a_share_of_its_own() -> None:
    desk = desk_with(total_up=12e9)
    for name in ("a/0", "a/1", "a/2", "b"):
        desk.hello(name)
    desk.layout("a/0")
    desk.seed_chunk("a/0", 0, 0)
    desk.pass_(3.0, "a/0", "a/1", "a/2", "b")
    assert rates(desk, ["a/0", "a/1", "b"]) == pytest.approx([4e9, 2e9, 4e9], rel=0.01)


ALL, BEHIND = (0, 1, 2, 3), (0, 0, 0, 0)


def at_goal(*names: str) -> Desk:
    """The goal is reached by a push of fragment 0."""
    desk = running(*names, config=configure(run={"goal_tokens": 1000}))
    desk.take(ev.Send)
    for name in names:
        desk.push(name, 0, 1, tokens=4000 // len(names) + 1)
    assert len(desk.noted("goal")) == 1 and desk.status.phase == "ending"
    return desk


def events(desk: Desk) -> list[str]:
    return [type(e).__name__ for e in desk.log if isinstance(e, ev.CommitEnd | ev.Finish)]


def hang(desk: Desk, seconds: int) -> None:
    """Both report. a has nothing more to push; of b nothing moves, though it owes pushes."""
    for _ in range(seconds):
        desk.now += 1.0
        desk.report("a", 10, bases=BEHIND, finished=ALL)
        desk.report("b", 10, bases=BEHIND)


def test_every_fragment_gets_a_last_round_and_everybody_the_final_model() -> None:
    desk = at_goal("a", "b")
    before = desk.take(ev.MergeRound)
    for fragment in ALL:
        desk.push("a", fragment, 10 + fragment)
    desk.report("a", 30, bases=BEHIND, finished=ALL)
    assert not desk.take(ev.MergeRound), "b has pushed nothing and has not said that it is done"
    for fragment in ALL:
        desk.push("b", fragment, 10 + fragment)
    desk.report("b", 30, bases=BEHIND, finished=ALL)
    assert events(desk) == ["CommitEnd"]
    rounds = [each.round_ for each in (*before, *desk.log) if isinstance(each, ev.MergeRound)]
    usual = desk.syncer.state.config.policy
    plain_mean = replace(usual, rule="mean", outer_lr=1.0, momentum=0.0)
    assert [each.policy for each in rounds] == [usual] * len(before) + [plain_mean] * len(ALL)
    assert desk.merges() == [(fragment, ["a", "b"], "last") for fragment in ALL]
    desk.pass_(1.0, "a", "b")
    beat = desk.told(msg.Beat, "a")[-1]
    assert beat.phase is msg.Phase.ENDED and beat.heads == (2, 1, 1, 1)
    assert desk.status.awaited == ("a", "b")
    desk.leave("a")
    desk.report("b", 30)
    assert not events(desk), "b holds the heads, and may not know yet that they are final"
    desk.leave("b")
    assert desk.take(ev.Finish) == [ev.Finish(())]
    desk.pass_(5.0, "b")
    assert not desk.take(ev.Finish), "it is told once"


def test_the_end_does_not_wait_for_a_learner_whose_key_was_revoked() -> None:
    desk = at_goal("a", "b")
    desk.report("a", 30, bases=BEHIND, finished=ALL)
    assert events(desk) == [] and "b" in str(desk.status.waiting_for)
    desk.do(desk.syncer.revoked, ["b"])
    assert events(desk) == ["CommitEnd"]
    desk.leave("a")
    assert events(desk) == ["CommitEnd", "Finish"]


def test_a_learner_that_stands_still_costs_30_s_in_all_and_is_named() -> None:
    desk = at_goal("a", "b")
    hang(desk, 29)
    assert events(desk) == []
    assert desk.status.waiting_for[0] == "b to push fragment 0"
    hang(desk, 1)
    assert events(desk) == ["CommitEnd"]
    hang(desk, 29)
    assert events(desk) == ["CommitEnd"], "a is waited for anew: it owes no push"
    assert desk.status.awaited == ("a",)
    desk.leave("a")
    assert desk.take(ev.Finish) == [ev.Finish(("b (fragment 0)",))]


def test_who_waited_for_a_learner_that_stands_still_is_not_given_up_with_it() -> None:
    desk = at_goal("a", "b")
    desk.take(ev.MergeRound)
    for fragment in ALL:
        desk.push("a", fragment, 10 + fragment)
    desk.pass_(31.0, "a", "b", bases=BEHIND)
    desk.report("a", 30, bases=BEHIND, finished=(0, 1))
    assert [(fragment, names) for fragment, names, _ in desk.merges()] == [(f, ["a"]) for f in ALL]
    assert events(desk) == [], "a has not said yet whether it has more of fragments 2 and 3"
    desk.report("a", 30, bases=BEHIND, finished=ALL)
    assert events(desk) == ["CommitEnd"], "a is waited for until it has adopted the final model"


def test_a_learner_that_was_given_up_and_moves_again_gets_the_final_model() -> None:
    desk = at_goal("a", "b")
    hang(desk, 31)
    desk.send("b", msg.Fetch(msg.DataKind.STATE, 0, 1, 0, ((0, 1),)))
    desk.leave("a")
    assert events(desk) == ["CommitEnd"]
    desk.leave("b")
    assert events(desk) == ["CommitEnd", "Finish"]


def test_a_full_disk_at_the_end_takes_nobodys_time() -> None:
    desk = at_goal("a", "b", "c")
    desk.commits = False
    for second in range(80):
        if second == 35:
            desk.hello("b", peer="b:1")
        hang(desk, 1)
        desk.report("c", 10, bases=BEHIND)
    assert events(desk) == ["CommitEnd"]
    desk.do(desk.syncer.done, ev.CommitEnd())
    assert desk.status.awaited == ("a", "b")


def test_a_learner_that_is_cut_off_at_the_end_may_come_back() -> None:
    desk = at_goal("a", "b")
    desk.pass_(20.0, "a", finished=ALL)
    assert events(desk) == []
    desk.hello("b", peer="b:1")
    for fragment in ALL:
        desk.push("b", fragment, 10 + fragment)
    desk.report("b", 30, finished=ALL)
    assert events(desk)[:1] == ["CommitEnd"]


def test_a_learner_that_moves_is_waited_for_ten_minutes_and_no_longer() -> None:
    desk = at_goal("a")
    for second in range(599):
        desk.now += 1.0
        desk.report("a", 100 + second)
    assert events(desk) == []
    desk.pass_(2.0, "a", steps_per_s=10)
    assert events(desk)[:1] == ["CommitEnd"]


# After a start of the broker.


def restarted() -> Desk:
    """A start at the goal. a and b have taught the run; a third one may have joined it.

    Hellos wait at the bound sockets, and are read before anything else happens. Who is told
    `running` and has nothing left to push says Bye, and never gets the final model.
    """
    merged = {(incarnation(name), 0): 3 for name in "ab"}
    desk = Desk(configure(run={"goal_tokens": 1000}), recovered=resumed(merged=merged))
    assert len(desk.noted("goal")) == 1
    assert desk.hello("a").beat.phase is msg.Phase.ENDING
    return desk


def test_the_end_waits_no_longer_than_until_all_who_taught_are_back() -> None:
    desk = restarted()
    desk.hello("b", 2)  # Started again meanwhile: another incarnation of the same name.
    desk.pass_(RETURN_S - 0.5, "a", "b", finished=ALL)
    assert events(desk) == [], "one that has taught nothing yet may still be dialling"
    desk.pass_(1.0, "a", "b", finished=ALL)
    assert events(desk) == ["CommitEnd"]
    desk.leave("a", "b")
    assert events(desk) == ["CommitEnd", "Finish"]


def test_an_ended_run_hands_out_its_final_model() -> None:
    merged = {(incarnation("b"), 0): 3}
    desk = Desk(recovered=resumed(phase=msg.Phase.ENDED, merged=merged))
    welcome = desk.hello("a")
    assert (welcome.role, welcome.beat.phase) == (msg.Role.ADOPT, msg.Phase.ENDED)
    assert welcome.beat.digests == (99,) * 4, "or what a relay has altered would be final"
    desk.pass_(25.0, "a")
    assert events(desk) == [] and "for another 5 s" in desk.status.waiting_for[0]
    desk.report("a", 0)
    desk.pass_(6.0, "a")
    assert events(desk) == ["Finish"]
