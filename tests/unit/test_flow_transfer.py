"""Transfers against loss: everything comes, and questions stay few."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrows.proto.flow import Transfer
from narrows.proto.messages import RANGES_MAX


def live(chunks: int, come: list[int]) -> Transfer:
    """A transfer that its sender began, of which these chunks came at once."""
    transfer = Transfer(chunks, 0.0, unasked=True)
    for chunk in come:
        assert transfer.add(chunk, 0.0)
    return transfer


@given(
    chunks=st.integers(1, 400),
    window=st.integers(1, 64),
    loss=st.sampled_from([0.0, 0.02, 0.3]),
    unasked=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_every_chunk_comes_however_many_are_lost(
    chunks: int, window: int, loss: float, unasked: bool, seed: int
) -> None:
    """The owner calls `ask` at `deadline` and after each arrival, as the machines do."""
    rng = random.Random(seed)
    transfer = Transfer(chunks, 0.0, unasked=unasked)
    now, heard_at, arriving, asked = 0.0, 0.0, dict[int, float](), 0

    def send(wanted: list[int]) -> None:
        for chunk in wanted:
            if rng.random() >= loss:
                arriving[chunk] = now + rng.uniform(0.01, 0.3)

    if unasked:
        send(list(range(chunks)))
    while not transfer.complete:
        for chunk in sorted(each for each, at in arriving.items() if at <= now):
            del arriving[chunk]
            heard_at = now
            transfer.add(chunk, now)
        while ranges := transfer.ask(now, heard_at, window):
            wanted = [chunk for first, count in ranges for chunk in range(first, first + count)]
            asked += len(wanted)
            assert 0 <= wanted[0] and wanted[-1] < chunks
            assert transfer.asked <= window
            send(wanted)
        if not transfer.complete:
            now = max(now, min([transfer.deadline(now), *arriving.values()]))
        assert now < 3600.0
    assert transfer.deadline(now) == float("inf") and transfer.ask(now, now, window) == ()
    assert transfer.here == chunks and transfer.asked == 0 and not transfer.add(0, now)
    if not loss:
        assert asked == (0 if unasked else chunks), "nothing was asked for twice"


def test_what_is_live_is_asked_for_after_a_second_without_progress() -> None:
    transfer = live(10, [0, 1, 2, 5, 9])
    assert not any(transfer.add(chunk, 0.0) for chunk in (1, 10, -1)), "that is no news"
    assert transfer.asked == 0 and transfer.deadline(0.5) == 1.0
    assert transfer.ask(0.99, 0.0, 32) == ()
    assert transfer.add(3, 0.99)
    assert transfer.ask(1.5, 1.4, 32) == (), "it makes progress"
    assert transfer.ask(1.99, 1.4, 32) == ((4, 1), (6, 3))
    assert transfer.asked == 4


def test_a_hole_in_a_stream_is_asked_for_at_once() -> None:
    transfer = Transfer(12, 0.0, unasked=True, streams=2)
    for chunk in (0, 1, 3, 2, 4):
        assert transfer.add(chunk, 0.0)
    assert transfer.ask(0.1, 0.1, 32) == (), "streams may overtake each other"
    assert transfer.add(8, 0.2) and transfer.deadline(0.2) == 0.2
    assert transfer.ask(0.2, 0.2, 32) == ((6, 1),) and transfer.asked == 1
    assert transfer.add(7, 0.3) and transfer.ask(0.3, 0.3, 32) == ((5, 1),)
    assert transfer.add(6, 0.4) and transfer.ask(0.4, 0.4, 32) == (), "an answer is no hole"
    for chunk in (10, 9, 11, 5):
        assert transfer.add(chunk, 0.5) and transfer.ask(0.5, 0.5, 32) == ()
    assert transfer.complete and transfer.asked == 0


def test_a_quarter_of_the_window_is_asked_for_when_a_quarter_has_come() -> None:
    transfer = Transfer(100, 0.0, unasked=False)
    assert transfer.deadline(0.5) == 0.5
    assert transfer.ask(0.5, 0.0, 32) == ((0, 32),)
    assert transfer.deadline(0.5) == 1.5, "the answer has a second"
    for chunk in range(7):
        transfer.add(chunk, 1.25)
    assert transfer.ask(1.25, 1.25, 32) == () and transfer.deadline(1.25) == 2.25
    transfer.add(7, 1.5)
    assert transfer.deadline(1.5) == 1.5
    assert transfer.ask(1.5, 1.5, 32) == ((32, 8),)


def test_a_chunk_that_comes_late_without_being_asked_for_again_frees_no_place() -> None:
    transfer = live(6, [])
    assert transfer.ask(1.0, 0.0, 2) == ((0, 2),)
    assert transfer.add(5, 1.1)
    assert transfer.asked == 2 and transfer.ask(1.1, 1.1, 2) == ()


@pytest.mark.parametrize(
    ("talks", "asked_at"), [(False, [1.0, 3.0, 7.0, 15.0, 23.0]), (True, [1.0, 2.0, 3.0, 4.0, 5.0])]
)
def test_the_wait_doubles_only_while_nothing_at_all_comes(
    talks: bool, asked_at: list[float]
) -> None:
    transfer, now, times = live(4, []), 0.0, list[float]()
    while len(times) < len(asked_at):
        now = transfer.deadline(now)
        if transfer.ask(now, now - 0.1 if talks else 0.0, 32):
            times.append(now)
    assert times == asked_at
    transfer.add(0, now)
    assert transfer.deadline(now) == now + 1.0, "progress ends the waiting"


def test_a_question_has_no_more_ranges_than_a_message_may() -> None:
    transfer = live(1000, list(range(0, 1000, 2)))
    first, second, third = (transfer.ask(1.0, 0.0, 1000) for _ in range(3))
    assert len(first) == RANGES_MAX and len(second) == 500 - RANGES_MAX and third == ()
