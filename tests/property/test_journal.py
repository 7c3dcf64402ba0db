"""The journal under any script: whatever was promised is there after any crashes and failures."""

from __future__ import annotations

import errno
from random import Random

from fake_disk import FakeDisk
from hypothesis import given, settings
from hypothesis import strategies as st
from journal_cases import (
    SEGMENT_BYTES,
    Step,
    Story,
    append,
    cut_before,
    persistent,
    reopen,
    sync,
)

from narrows.broker.storage.durable_files import StateError

SIZES_BYTES = st.integers(0, 40) | st.integers(41, 3 * SEGMENT_BYTES)
STEPS: st.SearchStrategy[Step] = st.one_of(
    st.lists(SIZES_BYTES, min_size=1, max_size=6).map(lambda sizes: append(*sizes)),
    st.just(persistent(sync)),
    st.just(reopen),
    st.integers(1, 30).map(lambda number: persistent(cut_before(number))),
)
LIVES = st.tuples(
    st.lists(STEPS, max_size=15),
    st.integers(1, 80),
    st.sets(st.integers(1, 60), max_size=4),
    st.booleans(),
)
"""A script, the call with which the power goes, those that fail before, and whether there is
preallocation."""


@settings(max_examples=300)
@given(lives=st.lists(LIVES, min_size=1, max_size=4), seed=st.integers(0, 1000))
def test_any_lives(lives: list[tuple[list[Step], int, set[int], bool]], seed: int) -> None:
    random, story = Random(seed), Story(FakeDisk())
    for script, crash_at, failures, preallocates in lives:
        story.disk.preallocates = preallocates
        story.disk.crash_at = crash_at
        story.disk.errors = {at: OSError(errno.EIO, "disk") for at in failures}
        story.crashes([patient(step) for step in script])
        files = random.choice([*story.disk.survivors(random, 30)])
        story = story.on(FakeDisk(files))
    story.follow((reopen, append(7), sync, reopen, sync))
    assert story.promised == len(story.bodies)


def patient(step: Step) -> Step:
    """The step; a start that fails is tried again."""

    def work(story: Story) -> None:
        for _ in range(10):
            try:
                return step(story)
            except StateError as error:
                assert "cannot be read" in str(error)
        raise AssertionError("there is no end to it")

    return work
