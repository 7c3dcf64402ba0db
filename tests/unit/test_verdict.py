"""The sentence about a run: one case for each, causes before what follows from them, and none
that is named without evidence."""

from typing import Any

import pytest
from msgspec import structs

from narrows.broker.verdict import OTHERWISE, RUNNING, duration, learner_text, verdict
from narrows.proto import messages as msg

QUORUM = msg.QuorumStatus(needed=1, at_start=1, here=3, ready=3, training=3)
LEARNER = msg.LearnerStatus(state="training", steps_per_s=2.0, merged_s=1.0)
WELL = msg.Status(
    phase="running", uplink_port=7071, uptime_s=600.0, run_tokens=5000, tokens_per_s=1234.0,
    period_s=8.0, merges=300, quorum=QUORUM, last_merge=msg.MergeStatus(ago_s=1.0),
    fragments=(msg.FragmentStatus(1000, 75, 1.0),) * 4,
    disk=msg.DiskStatus(free_bytes=10**9, commit_p50_ms=5.0, commit_p99_ms=20.0),
    learners={name: LEARNER for name in "abc"},
)  # fmt: skip


def learners(**changed: dict[str, Any]) -> dict[str, Any]:
    """The learners a, b, c, some of them with other fields."""
    return {
        "learners": {
            name: structs.replace(LEARNER, **changed.get(name, {})) for name in ("a", "b", "c")
        }
    }


def part(name: str, **fields: Any) -> dict[str, Any]:
    """A part of the status with other fields."""
    return {name: structs.replace(getattr(WELL, name), **fields)}


LATE = {"fragments": (*WELL.fragments[1:], msg.FragmentStatus(1000, 75, 13.0))}
"""A fragment whose last version is more than a period old."""

SECONDS = (29.0, 31.0)
"""Too short for evidence, and long enough."""

EVIDENCED: dict[str, tuple[Any, str, str, str]] = {
    "disk full": (
        lambda s: part("disk", error="No space left on device", error_s=s),
        "bad", "disk has taken nothing for 31 s: No space left", "Make room",
    ),
    "snapshots": (
        lambda s: part("disk", snapshot_error="File too large", snapshot_error_s=s),
        "warning", "disk has taken no snapshot for 31 s: File too large", "Make room",
    ),
    "disk hangs": (
        lambda s: {"fragments": (msg.FragmentStatus(1000, 75, 40.0, "committing", s),) * 4},
        "bad", "Version 76 of fragment 0 has waited for the broker's disk for 31 s", "iostat",
    ),
    "nobody here": (
        lambda s: part("quorum", here=0, ready=0, training=0, idle_s=s) | {"learners": {}},
        "bad", "No learner has been here for 31 s", "Start the learners again",
    ),
    "everybody evaluates": (
        lambda s: part("quorum", training=0, idle_s=s)
        | learners(**{name: {"state": "paused", "reason": "evaluating"} for name in "abc"}),
        "warning", "Nobody has trained for 31 s: a, b, c paused (evaluating)", "if they evaluate",
    ),
    "all join": (
        lambda s: part("quorum", ready=0, training=0, idle_s=s)
        | learners(**{name: {"state": "joining"} for name in "abc"}),
        "warning", "Nobody has trained for 31 s: a, b, c still fetch the model", "Wait",
    ),
    "seeder": (
        lambda s: learners(b={"state": "joining", "no_data_s": s})
        | {"phase": "seeding", "waiting_for": ("version 0 from b: 0% is here",)},
        "bad", "Nothing has come up from b for 31 s, though it is to send version 0", "uplink port",
    ),
    "line up cut": (
        lambda s: learners(b={"no_data_s": s}),
        "bad", "Nothing has come up from b for 31 s", "uplink port 7071",
    ),
    "line down cut": (
        lambda s: learners(b={"no_version_s": s}, c={"no_version_s": s - 5.0}),
        "bad", "No version has reached b", "downlink port",
    ),
    "stuck": (
        lambda s: part("last_merge", ago_s=s) | {"waiting_for": ("c to push fragment 2",)},
        "bad", "no new version for 31 s: the run waits for c to push fragment 2", "merge.quorum",
    ),
    "workers": (
        lambda s: part("process", busy_s=s, queue=4321),
        "warning", "workers have not rested for 31 s, and 4,321 pieces of work", "faster cores",
    ),
    "budget up": (
        lambda s: part("line", up_full_s=s, total_up_limit=1e6) | LATE,
        "warning", "line up has been used up for 31 s, and versions", "Raise wan.total_up, or frag",
    ),
    "budget down": (
        lambda s: part("line", down_full_s=s, down_limit=1e6) | learners(b={"versions_behind": 2}),
        "warning", "budget of the line down has been used up for 31 s", "Raise wan.down, or frag",
    ),
    "quorum": (
        lambda s: part("quorum", needed=4, short_s=s),
        "warning", "quorum of 4 has not been reached for 31 s: 3 learners train, and rounds are",
        "merge.quorum",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", EVIDENCED.values(), ids=list(EVIDENCED))
def test_a_cause_is_named_once_it_has_lasted(case: tuple[Any, str, str, str]) -> None:
    """Holds `verdict`."""
    fields, level, text, remedy = case
    early, late = (verdict(structs.replace(WELL, **fields(seconds))) for seconds in SECONDS)
    assert early.level == "ok" and early.text.startswith(
        ("All is well", "Nobody trains at", "The run")
    )
    assert late.level == level and text in late.text and remedy in late.remedy


REFUSED = msg.RefusalStatus(
    "site-c", "layout_differs",
    "site-c: layout_differs: another model (expected layout 1f, got layout 2e). start every learner"
    " with one model", 12.0, 3,
)  # fmt: skip


def refused(**changed: Any) -> dict[str, Any]:
    """That refusal with other fields."""
    return {"refused": (structs.replace(REFUSED, **changed),)}


FACTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "well": ({}, "ok", "All is well: 3 learners train, 1,234 tokens a second"),
    "goal": ({"left_s": 7300.0}, "ok", "2 h to the goal"),
    "one": (part("quorum", training=1) | {"tokens_per_s": 0.0}, "ok", "well: 1 learner trains"),
    "full, and not late": (part("line", up_full_s=99.0, down_full_s=99.0), "ok", "All is well"),
    "late, and not full": (LATE, "ok", "All is well"),
    "stops": ({"stopping": "maintenance"}, "warning", "The broker stops: maintenance"),
    "slow disk": (
        part("disk", commit_p50_ms=2500.0),
        "warning", "a version takes 2.5 s to be written, and one is due every 2.0 s",
    ),
    "fast disk, faster run": (
        part("disk", commit_p50_ms=20.0) | {"period_s": 0.04}, "ok", "All is well"
    ),
    "disk fills": (part("disk", free_bytes=40_000), "warning", "40kB left"),
    "hangs": (
        learners(b={"state": "no steps", "stepped_s": 125.0}),
        "warning", "b makes no steps for 2 min; no round waits for that",
    ),
    "all hang": (
        part("quorum", training=0, idle_s=31.0)
        | learners(**{name: {"state": "no steps"} for name in "abc"}),
        "bad", "Nobody has trained for 31 s: a, b, c make no steps",
    ),
    "another model": (
        refused(),
        "warning", "site-c was refused 3 times, last 12 s ago: another model",
    ),
    "a second process": (
        refused(code="name_in_use", learner="a", times=9),
        "warning", "A second process with the name a was refused 9 times, last 12 s ago",
    ),
    "started again": (refused(code="name_in_use", learner="a"), "ok", "All is well"),
    "one push": (refused(code="not_finite"), "ok", "All is well"),
    "silent": (
        learners(b={"state": "silent", "since_s": 1.0, "heard_s": 4.0}),
        "warning", "b has not been heard for 4 s; the other 3 train on",
    ),
    "silent, and a quorum lacks it": (
        learners(b={"state": "silent", "since_s": 1.0, "heard_s": 4.0}) | part("quorum", needed=4),
        "warning", "for 4 s; the other 3 train on, fewer than the quorum of 4",
    ),
    "lost": (
        learners(b={"state": "lost", "since_s": 31.0, "heard_s": 35.0}),
        "warning", "b has not been heard for 35 s; the other 3 train on",
    ),
    "one hangs, one evaluates": (
        part("quorum", training=0, idle_s=31.0)
        | learners(a={"state": "paused"}, b={"state": "no steps"}, c={"state": "paused"}),
        "bad", "Nobody has trained for 31 s: b makes no steps",
    ),
    "cut off at the end": (
        {"phase": "ending", "awaited": ("a",)} | learners(a={"no_data_s": 31.0}),
        "bad", "Nothing has come up from a for 31 s",
    ),
    "version 0 comes": (
        {
            "phase": "seeding", "quorum": msg.QuorumStatus(at_start=1, here=1),
            "waiting_for": ("version 0 from a: 7% is here",),
        },
        "ok", "The run begins: version 0 from a: 7% is here",
    ),
    "the only one": (
        part("quorum", training=0, idle_s=4.0)
        | learners(b={"state": "silent", "since_s": 1.0, "heard_s": 4.0}),
        "warning", "b has not been heard for 4 s; nobody trains now",
    ),
    "nobody trains yet": (
        part("quorum", training=0, idle_s=4.0), "ok", "Nobody trains at the moment"
    ),
    "a snapshot of minutes": (part("process", busy_s=99.0, queue=2, workers=2), "ok", "well"),
    "one waits": (
        part("process", busy_s=99.0, queue=3, workers=2), "warning", "and 1 piece of work waits",
    ),
    "the newest refusal": (
        {"refused": (structs.replace(REFUSED, learner="new", ago_s=1.0), REFUSED)},
        "warning", "new was refused 3 times, last 1 s ago",
    ),
    "lost for good": (learners(b={"state": "lost", "since_s": 4000.0}), "ok", "All is well"),
    "first": (
        {"phase": "seeding", "quorum": msg.QuorumStatus(at_start=1)},
        "warning", "Nobody is here yet",
    ),
    "too few": (
        {"phase": "seeding", "quorum": msg.QuorumStatus(at_start=3, here=2)},
        "warning", "The run begins with 3 learners, and 2 of them are here",
    ),
    "seeding": (
        {"phase": "seeding", "quorum": msg.QuorumStatus(at_start=1, here=1)},
        "ok", "version 0 is on its way",
    ),
    "nobody, for he was refused": (
        {"phase": "seeding", "quorum": msg.QuorumStatus(at_start=1), "refused": (REFUSED,)},
        "warning", "site-c was refused",
    ),
    "goal reached": ({"phase": "ending", "awaited": ("a", "b", "c", "d")}, "ok",
        "The goal is reached; a, b, c and 1 more have to push what is left: 5,000 tokens"),
    "ended": ({"phase": "ended"}, "ok", "The run has ended: 5,000 tokens"),
    "last": ({"phase": "ended", "awaited": ("a",)}, "ok", "a has to take the final model"),
}  # fmt: skip


@pytest.mark.parametrize("case", FACTS.values(), ids=list(FACTS))
def test_what_is_certain_is_told_at_once(case: tuple[dict[str, Any], str, str]) -> None:
    fields, level, text = case
    found = verdict(structs.replace(WELL, **fields))
    assert (found.level, text in found.text) == (level, True), found
    assert (found.remedy == "") == (level == "ok")


def test_the_cause_comes_before_what_follows_from_it() -> None:
    """One sentence: with everything wrong at once it is that of the disk."""
    fields: dict[str, Any] = {}
    for make, *_ in reversed(EVIDENCED.values()):
        fields |= make(31.0)
    assert "disk has taken nothing" in verdict(structs.replace(WELL, **fields)).text
    assert len({*RUNNING, *OTHERWISE}) == len(RUNNING) + 2, "each rule stands where it can speak"


def test_a_refusal_is_told_in_the_words_of_its_error() -> None:
    """Holds `verdict`: the error's own remedy, else that of its code."""
    found = verdict(structs.replace(WELL, **refused()))
    assert found.remedy == "Start every learner with one model"
    found = verdict(structs.replace(WELL, **refused(text="site-c: the key of another", times=1)))
    assert found.text == "site-c was refused 12 s ago: the key of another"
    assert found.remedy.startswith("The run's model code")


def test_an_empty_status_has_a_sentence() -> None:
    assert verdict(msg.Status(phase="running")).level == "ok"
    assert [duration(s) for s in (40.0, 119.0, 120.0, 7200.0, 2e5)] == [
        "40 s", "119 s", "2 min", "2 h", "2 days",
    ]  # fmt: skip
    assert learner_text(msg.LearnerStatus(state="training", since_s=1e4))[1] == "training"
