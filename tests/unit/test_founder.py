"""Founding a run: the layout in parts, the named founder, and what others may not send."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import pytest
from machines import (
    LAYOUT,
    Desk,
    Seat,
    config,
    hello,
    incarnation_of,
    one,
    only,
)

from narrows.broker.syncer import events as ev
from narrows.broker.syncer.founding import check_founder
from narrows.broker.syncer.layouts import PARTS_BURST, PARTS_PER_S, TOLD_MAX
from narrows.broker.syncer.machine import Resumed
from narrows.learner.session import events as lev
from narrows.proto import messages as msg
from narrows.proto.codec.transfer import STATE_CODEC
from narrows.proto.errors import ConfigError, ErrorCode, Refused, RemoteProtocolError
from narrows.proto.flow import chunks_max
from narrows.proto.layout import JoinedLayout, fingerprint, split_layout
from narrows.proto.limits import (
    CONTROL_UP_BYTES_MAX,
    LAYOUT_PART_BYTES_MAX,
    LAYOUT_PARTS_MAX,
    TENSORS_MAX,
)
from narrows.proto.timing import ASK_LAYOUT_S, LAYOUT_GONE_S

#: A layout of three parts.
LARGE = (
    *LAYOUT,
    *(msg.LayoutEntry(f"{n:04}".ljust(490, "x"), (1,), "float32", "mean") for n in range(250)),
)
#: A layout of more parts than may travel, although each part of 60 tensors is small enough.
TOO_LARGE = tuple(
    msg.LayoutEntry(f"{n:06}".ljust(506, "é"), (1,), "float32", "mean")
    for n in range(60 * LAYOUT_PARTS_MAX)
)
OTHER = (msg.LayoutEntry("weight", (25, 41), "bfloat16", "rda"), LAYOUT[1])
FOUND: dict[str, Any] = {"kind": msg.DataKind.FOUND, "codec": STATE_CODEC}


def silent() -> Desk:
    """A desk whose learners do not tell their layouts by themselves."""
    desk = Desk()
    desk.silent = True
    return desk


def tell(desk: Desk, name: str, part: msg.LayoutPart) -> list[ev.Effect]:
    return desk.say(name, part)


# Parts of a layout.


def test_a_layout_is_told_in_parts_that_fit_into_a_message() -> None:
    parts = split_layout(LARGE, 7)
    assert len(parts) == 3 and [(p.index, p.count, p.frozen_digest) for p in parts] == [
        (0, 3, 7), (1, 3, 7), (2, 3, 7),
    ]  # fmt: skip
    sizes = [len(msgspec.msgpack.encode(part)) for part in parts]
    assert LAYOUT_PART_BYTES_MAX // 2 < sizes[0] <= LAYOUT_PART_BYTES_MAX + 100
    assert max(sizes) < CONTROL_UP_BYTES_MAX
    joined = JoinedLayout()
    assert [joined.take(part) for part in parts] == [True, True, True]
    assert joined.complete and (tuple(joined.entries), joined.frozen_digest) == (LARGE, 7)


def test_a_layout_of_too_many_parts_is_not_told() -> None:
    names = [f"{n:06}".ljust(512, "x") for n in range(TENSORS_MAX)]
    layout = tuple(msg.LayoutEntry(name, (1,), "float32", "mean") for name in names)
    with pytest.raises(RemoteProtocolError) as caught:
        split_layout(layout, 0)
    assert caught.value.code is ErrorCode.TOO_LARGE
    assert f"at most {LAYOUT_PARTS_MAX} parts" in caught.value.expected


def test_parts_that_come_again_or_too_early_are_not_wanted() -> None:
    first, second, third = split_layout(LARGE, 0)
    joined = JoinedLayout()
    assert not joined.take(second) and joined.take(first) and not joined.take(first)
    assert not joined.take(third) and joined.take(second) and joined.next_part == 2
    assert joined.take(third) and not joined.take(third)
    assert tuple(joined.entries) == LARGE


PART = split_layout(LARGE, 0)[1]


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (msg.LayoutPart(1, 4, 0, PART.entries), "3 of one layout"),
        (msg.LayoutPart(1, 3, 1, PART.entries), "3 of one layout"),
        (msg.LayoutPart(1, 3, 0, ()), "a tensor at least"),
    ],
)
def test_a_part_that_contradicts_those_before(part: msg.LayoutPart, expected: str) -> None:
    joined = JoinedLayout()
    joined.take(split_layout(LARGE, 0)[0])
    with pytest.raises(RemoteProtocolError) as caught:
        joined.take(part)
    assert caught.value.code is ErrorCode.BAD_MESSAGE and expected in caught.value.expected
    assert joined.next_part == 1


def test_a_layout_that_never_ends_is_bounded() -> None:
    entries = (LAYOUT[0],) * 4096
    joined = JoinedLayout()
    with pytest.raises(RemoteProtocolError, match=f"at most {TENSORS_MAX}"):
        for index in range(LAYOUT_PARTS_MAX):
            joined.take(msg.LayoutPart(index, LAYOUT_PARTS_MAX, 0, entries))
    assert len(joined.entries) <= TENSORS_MAX
    joined = JoinedLayout()
    with pytest.raises(RemoteProtocolError, match="at most 1"):
        joined.take(msg.LayoutPart(0, 1, 0, (LAYOUT[0],)))
        joined.next_part, joined._count = 1, 0
        joined.take(msg.LayoutPart(1, 1, 0, (LAYOUT[0],)))


def test_a_fingerprint_is_of_everything_that_learners_share() -> None:
    told = fingerprint(LAYOUT, 0)
    assert told == fingerprint(tuple(LAYOUT), 0) and len(told) == 32
    changed = [
        msgspec.structs.replace(LAYOUT[0], **change)
        for change in ({"name": "w"}, {"shape": (40, 25)}, {"dtype": "float16"}, {"rule": "mean"})
    ]
    others = {fingerprint((entry, LAYOUT[1]), 0) for entry in changed}
    others |= {fingerprint(LAYOUT, 1), fingerprint(LAYOUT[::-1], 0), fingerprint(LAYOUT[:1], 0)}
    assert len(others) == 7 and told not in others


# The broker's side.


def test_the_founder_is_asked_part_by_part_and_welcomed_after_the_last_one() -> None:
    desk = silent()
    parts = split_layout(LARGE, 0)
    effects = desk.say("a", hello("a", layout=LARGE))
    assert not only(effects, msg.Welcome) and one(effects, msg.AskLayout).first == 0
    for index in (0, 1):
        effects = tell(desk, "a", parts[index])
        assert one(effects, msg.AskLayout).first == index + 1 and not desk.state.layout
    assert one(tell(desk, "a", parts[2]), msg.Welcome).role is msg.Role.FOUND
    assert desk.state.layout == LARGE and len(desk.state.table) == 2
    assert tell(desk, "a", parts[2]) == [], "a part that was asked for twice"


def test_parts_out_of_order_and_repeated_ones_change_nothing() -> None:
    desk = silent()
    first, second, third = split_layout(LARGE, 0)
    desk.say("a", hello("a", layout=LARGE))
    for part in (third, second):
        assert tell(desk, "a", part) == []
    assert one(tell(desk, "a", first), msg.AskLayout).first == 1
    assert tell(desk, "a", first) == [] and tell(desk, "a", third) == []
    tell(desk, "a", second)
    assert one(tell(desk, "a", third), msg.Welcome).role is msg.Role.FOUND


def test_a_founder_that_says_hello_again_is_asked_again() -> None:
    desk = silent()
    parts = split_layout(LARGE, 0)
    desk.say("a", hello("a", layout=LARGE))
    tell(desk, "a", parts[0])
    assert one(desk.say("a", hello("a", layout=LARGE)), msg.AskLayout).first == 1
    # On a new connection, too: the process is the same.
    assert one(desk.say("x", hello("a", layout=LARGE)), msg.AskLayout).first == 1


def test_a_founder_that_keeps_silent_is_asked_again_with_back_off() -> None:
    desk = silent()
    desk.say("a", hello("a"))
    times: list[float] = []
    for _ in range(40):
        begun = desk.now
        effects = desk.wait(0.5)
        desk.report("a", step=0, tokens=0)
        times += [begun] * len(only(effects, msg.AskLayout))
    pauses = [b - a for a, b in pairwise(times)]
    assert len(times) >= 3 and pauses == sorted(pauses) and pauses[-1] <= 9


@pytest.mark.parametrize(
    ("layout", "code"),
    [
        (LAYOUT[::-1], ErrorCode.BAD_MESSAGE),
        (OTHER, ErrorCode.BAD_MESSAGE),
        ((*LAYOUT, LAYOUT[0]), ErrorCode.BAD_MESSAGE),
        (
            (msg.LayoutEntry("w", (1 << 40, 1 << 40), "float32", "rda"), LAYOUT[1]),
            ErrorCode.BAD_MESSAGE,
        ),
        ((msg.LayoutEntry("w", (), "float32", "rda"),), ErrorCode.CONFIG),
    ],
    ids=["another order", "another one", "a name twice", "wrapping sizes", "cannot be cut"],
)
def test_a_layout_that_cannot_be_the_run_s_refuses_the_founder(
    layout: tuple[msg.LayoutEntry, ...], code: ErrorCode
) -> None:
    """The next learner founds."""
    desk = silent()
    told = fingerprint(layout, 0) if code is ErrorCode.CONFIG or len(layout) != 2 else None
    desk.say("a", hello("a", fingerprint=told or fingerprint(LAYOUT, 0)))
    (part,) = split_layout(layout, 0)
    assert one(tell(desk, "a", part), msg.Refuse).code == code
    assert not desk.state.layout and not desk.state.fingerprint
    desk.silent = False
    assert one(desk.say("b", hello("b")), msg.Welcome).role is msg.Role.FOUND


def test_the_next_learner_brings_the_layout_if_the_founder_is_lost() -> None:
    desk = silent()
    parts = split_layout(LARGE, 0)
    desk.say("a", hello("a", layout=LARGE))
    assert one(desk.say("b", hello("b", layout=LARGE)), msg.Welcome).role is msg.Role.WAIT
    tell(desk, "a", parts[0])
    effects = desk.do(ev.PeerLost(b"a"))
    (send,) = [each for each in only(effects, ev.Send) if isinstance(each.message, msg.AskLayout)]
    assert (send.peer, one(effects, msg.AskLayout).first) == (b"b", 0)
    for part in parts:
        effects = tell(desk, "b", part)
    assert one(effects, msg.Welcome).role is msg.Role.FOUND


def test_nobody_is_held_to_the_layout_of_a_founder_that_is_gone() -> None:
    desk = silent()
    desk.say("a", hello("a", layout=LARGE))
    desk.do(ev.PeerLost(b"a"))
    assert one(desk.say("b", hello("b", layout=OTHER)), msg.AskLayout).first == 0


def test_who_does_not_found_may_send_no_layout_and_no_version_0() -> None:
    desk = Desk()
    desk.say("a", hello("a"))
    desk.say("b", hello("b"))
    before = desk.state.layout, desk.state.founder
    refuse = one(tell(desk, "b", split_layout(OTHER, 0)[0]), msg.Refuse)
    assert refuse.code == ErrorCode.NOT_FOUNDER and "--founder NAME" in refuse.remedy
    effects = desk.chunk("b", 0, **FOUND)
    assert one(effects, msg.Refuse).code == ErrorCode.NOT_FOUNDER
    assert one(effects, ev.Drop).handles and not only(effects, ev.Unpack)
    assert (desk.state.layout, desk.state.founder) == before
    assert desk.state.tally.refused == {ErrorCode.NOT_FOUNDER: 2}
    member = desk.state.roster.get("b")
    assert member is not None and member.uplink.positions[0] == 1000, "its credit moves on"
    # A learner that goes on without this message is none the worse for it.
    seat = Seat().joined()
    assert not only(seat.hear(refuse), lev.Fail)


def test_a_run_that_stands_takes_no_version_0() -> None:
    desk = Desk().running("a", "b")
    assert one(desk.chunk("b", 0, **FOUND), msg.Refuse).code == ErrorCode.NOT_FOUNDER
    effects = desk.chunk("a", 0, **FOUND)
    assert not only(effects, msg.Refuse), "a late copy of its own chunk"
    assert not only(effects, ev.Unpack) and only(effects, ev.Drop)


def test_a_founder_s_flood_is_not_queued_for_decoding() -> None:
    """Chunks that are dropped are asked for again, once the decoder has caught up."""
    desk = Desk()
    assert one(desk.say("a", hello("a")), msg.Welcome).role is msg.Role.FOUND
    most = chunks_max(1000, desk.state.least_chunk_elements)
    headers = [
        desk.header("a", 0, count=1, offset=0, payload_digest=n, **FOUND) for n in range(3 * most)
    ]
    queued = [h for h in headers if only(desk.do(ev.ChunkArrived(h, 1000)), ev.Unpack)]
    assert len(queued) == most
    assert only(desk.do(ev.ChunkArrived(desk.header("a", 1, **FOUND), 1)), ev.Unpack)
    assert not desk.state.tally.refused
    desk.do(ev.ChunkUnpacked(queued[0], 1000))
    assert only(desk.do(ev.ChunkArrived(queued[0], 1000)), ev.Unpack)


# The named founder.


def named() -> Desk:
    return Desk(run__founder="f")


def test_others_wait_for_the_named_founder() -> None:
    desk = named()
    for name in ("a", "b"):
        assert one(desk.say(name, hello(name)), msg.Welcome).role is msg.Role.WAIT
    assert not desk.state.layout
    assert one(desk.say("f", hello("f")), msg.Welcome).role is msg.Role.FOUND
    assert desk.state.founder == "f"


def test_another_model_than_the_named_founder_s_is_refused_when_it_comes() -> None:
    desk = named()
    desk.say("a", hello("a"))
    desk.say("b", hello("b", layout=OTHER))
    effects = desk.say("f", hello("f"))
    (refused,) = [e for e in only(effects, ev.Send) if isinstance(e.message, msg.Refuse)]
    assert (refused.peer, one(effects, msg.Refuse).code) == (b"b", ErrorCode.LAYOUT_MISMATCH)
    assert one(desk.say("b", msg.AskLayout(0)), msg.LayoutPart).entries == LAYOUT
    assert [member.name for member in desk.state.roster.connected()] == ["a", "f"]


def test_nobody_takes_the_named_founder_s_place() -> None:
    desk = named()
    desk.say("a", hello("a"))
    desk.say("f", hello("f"))
    effects = desk.do(ev.PeerLost(b"f"))
    assert not only(effects, msg.Welcome) and not desk.state.founder
    assert not desk.state.fingerprint, "it may come back with another model"
    again = hello("f", incarnation=incarnation_of("f", 2))
    assert one(desk.say("g", again), msg.Welcome).role is msg.Role.FOUND


def test_with_a_file_the_named_founder_brings_the_layout() -> None:
    desk = named()
    desk.syncer.founding.from_file = True
    assert not only(desk.say("a", hello("a", layout=OTHER)), ev.Found)
    found = one(desk.say("f", hello("f")), ev.Found)
    assert (found.layout, found.handles) == (LAYOUT, None)


def test_a_layout_that_cannot_be_told_in_parts_refuses_the_founder() -> None:
    """The founder's own parts are smaller than the run's would be."""
    desk = silent()
    told = fingerprint(TOO_LARGE, 0)
    desk.say("a", hello("a", fingerprint=told))
    effects: list[ev.Effect] = []
    for index in range(LAYOUT_PARTS_MAX):
        entries = TOO_LARGE[60 * index :][:60]
        effects += tell(desk, "a", msg.LayoutPart(index, LAYOUT_PARTS_MAX, 0, entries))
    refuse = one(effects, msg.Refuse)
    assert refuse.code == ErrorCode.TOO_LARGE and "at most" in refuse.expected
    assert not desk.state.layout and not desk.state.fingerprint
    desk.silent = False
    assert one(desk.say("b", hello("b")), msg.Welcome).role is msg.Role.FOUND


def test_a_run_that_stands_on_such_a_layout_goes_on() -> None:
    """A broker before this one may have taken it."""
    heads = (msg.FragmentHead(3, 1), msg.FragmentHead(3, 2))
    desk = Desk(resumed=Resumed(TOO_LARGE, 0, heads, 1000, msg.Phase.RUNNING))
    assert one(desk.say("x", hello("x")), msg.Refuse).code == ErrorCode.LAYOUT_MISMATCH
    refuse = one(desk.say("x", msg.AskLayout(0)), msg.Refuse)
    assert refuse.code == ErrorCode.TOO_LARGE and "at most" in refuse.expected
    # It is told once. Whoever asks on gets nothing, as one whose questions are used up.
    assert not only(desk.say("x", msg.AskLayout(0)), ev.Send)


def test_keys_need_a_founder() -> None:
    with pytest.raises(ConfigError) as caught:
        check_founder(config(security__keys="keys"))
    assert "--founder NAME" in caught.value.remedy
    check_founder(config())
    check_founder(config(security__keys="keys", run__founder="a"))
    # The file has neither merge rules nor an order: the first key would decide them.
    with pytest.raises(ConfigError, match="founder"):
        check_founder(config(security__keys="keys", broker__init="model.safetensors"))
    check_founder(config(security__keys="keys", run__founder="a", broker__init="m.safetensors"))
    check_founder(config(broker__init="model.safetensors"))


@pytest.mark.parametrize("name", ["../a", "a b", "-a", "n" * 65])
def test_a_founder_has_a_learner_s_name(name: str) -> None:
    with pytest.raises(ConfigError, match="founder"):
        check_founder(config(run__founder=name))


# The run's layout for who was refused.


def test_who_was_refused_gets_each_part_twice_and_no_more() -> None:
    desk = Desk()
    desk.say("a", hello("a", layout=LARGE))
    desk.say("x", hello("x"))
    got = [one(desk.say("x", msg.AskLayout(n)), msg.LayoutPart) for n in (0, 1, 2, 0, 1, 2)]
    assert tuple(got) == split_layout(LARGE, 0) * 2
    assert not only(desk.say("x", msg.AskLayout(0), 5.0), msg.LayoutPart)
    assert only(desk.say("x", hello("x")), msg.Refuse)
    assert not only(desk.say("x", msg.AskLayout(0)), msg.LayoutPart)


def test_a_part_that_the_layout_has_not_is_not_told() -> None:
    desk = Desk().running("a")
    desk.say("x", hello("x", layout=OTHER))
    assert desk.say("x", msg.AskLayout(1)) == []


@pytest.mark.parametrize("peer", ["stranger", "a"])
def test_who_was_not_refused_may_not_ask(peer: str) -> None:
    desk = Desk().running("a")
    refuse = one(desk.say(peer, msg.AskLayout(0)), msg.Refuse)
    assert refuse.code in (ErrorCode.UNKNOWN_SESSION, ErrorCode.BAD_MESSAGE)


def test_a_flood_of_refused_connections_gets_few_parts_a_second() -> None:
    desk = Desk().running("a")
    told = 0
    for number in range(400):
        name = f"x{number}"
        desk.say(name, hello(name, layout=OTHER), 0.01)
        told += len(only(desk.say(name, msg.AskLayout(0)), msg.LayoutPart))
    assert told <= PARTS_BURST + 4 * PARTS_PER_S + 1
    told_names = desk.syncer.admission.layouts._told
    assert len(told_names) <= TOLD_MAX


# The learner's side.


def refused(seat: Seat, **fields: object) -> list[lev.Effect]:
    values: dict[str, object] = {
        "code": "layout_mismatch",
        "message": "the model of 'a' is not the run's model",
        "got": seat.session.identity.fingerprint,
        "remedy": "start every learner with the same model",
    }
    return seat.hear(msg.Refuse(**{**values, **fields}))  # type: ignore[arg-type]


def failed(effects: list[lev.Effect]) -> Refused:
    return one(effects, lev.Fail).error  # type: ignore[return-value]


def test_a_learner_names_the_tensors_that_differ() -> None:
    seat = Seat()
    seat.wait(0.1)
    parts = split_layout((OTHER[0], LARGE[1], *LARGE[2:]), 0)
    effects = refused(seat)
    for part in parts:
        assert one(effects, msg.AskLayout).first == part.index
        effects = seat.hear(part)
    error = failed(effects)
    assert error.code is ErrorCode.LAYOUT_MISMATCH and "same model" in error.remedy
    assert error.expected == "the run's layout of 252 tensors"
    assert "'weight': shape (25, 40), expected (25, 41)" in error.got
    assert len(error.got.split("; ")) == 5


def test_a_learner_says_that_frozen_parameters_differ() -> None:
    seat = Seat()
    refused(seat)
    assert "frozen" in failed(seat.hear(split_layout(LAYOUT, 7)[0])).got


def test_a_learner_asks_again_and_ends_when_nothing_comes() -> None:
    seat = Seat()
    assert one(refused(seat), msg.AskLayout).first == 0
    effects = seat.wait(LAYOUT_GONE_S - 0.1)
    asks = len(only(effects, msg.AskLayout))
    assert abs(asks - LAYOUT_GONE_S / ASK_LAYOUT_S) <= 2 and not only(effects, msg.Hello)
    error = failed(seat.wait(0.2))
    assert error.got == seat.session.identity.fingerprint


def test_a_joined_learner_that_is_refused_compares_too() -> None:
    seat = Seat().joined()
    assert one(refused(seat), msg.AskLayout).first == 0 and not seat.session.online
    assert "'weight'" in failed(seat.hear(split_layout(OTHER, 0)[0])).got


@pytest.mark.parametrize(
    "part",
    [
        msg.LayoutPart(0, 1, 0, ()),
        msg.LayoutPart(0, 1, 0, (LAYOUT[0], LAYOUT[0])),
    ],
    ids=["no tensor", "a name twice"],
)
def test_a_layout_that_is_none_leaves_the_refusal_as_it_came(part: msg.LayoutPart) -> None:
    seat = Seat()
    refused(seat)
    assert failed(seat.hear(part)).got == seat.session.identity.fingerprint


def test_other_refusals_are_final_at_once() -> None:
    seat = Seat()
    assert failed(refused(seat, got="version 0 is not finite")).got == "version 0 is not finite"
    assert failed(refused(Seat(), code="wrong_run")).code is ErrorCode.WRONG_RUN


def test_parts_that_nobody_asked_for_do_nothing() -> None:
    seat = Seat().joined()
    assert seat.hear(split_layout(OTHER, 0)[0]) == []
    assert seat.session.online


def test_a_learner_tells_its_layout_when_it_is_asked() -> None:
    seat = Seat()
    assert one(seat.hear(msg.AskLayout(0)), msg.LayoutPart).entries == LAYOUT
    assert not only(seat.hear(msg.AskLayout(1)), msg.LayoutPart)
