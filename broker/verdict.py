"""One sentence about a run: how it is, whose fault it is, since when, and what to do. Pure.

`narrows status` and the page tell it. A cause is named once it has lasted for EVIDENCE_S: for a
moment after a start, or while a learner restarts, everything looks broken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, Literal, NamedTuple

from narrows.proto.errors import ErrorCode
from narrows.proto.messages import LearnerState, LearnerStatus, Phase, RefusalStatus, Status
from narrows.proto.timing import HEARD_S, HELLO_S
from narrows.proto.units import Size

EVIDENCE_S: Final = 30.0
"""A cause is named when it has lasted so long."""

LOST_S: Final = 3600.0
"""A learner that has been lost for longer than this is no news: it may never come back."""

STUCK_GAPS: Final = 5
"""Usual gaps between two versions without a new one, after which the run is stuck."""

LATE_PERIODS: Final = 1.5
"""A fragment whose newest version is so many periods old has its next one late."""

VERSIONS_BEHIND: Final = 2
"""A learner that lacks so many versions of one fragment gets them late."""

COMMITS_MIN: Final = 8
"""Versions of this life from which on the times of commits are believed."""

SLOW_COMMIT_S: Final = 0.1
"""A disk that writes a version faster than this is not slow, however fast the versions follow."""

BYTES_PER_PARAMETER: Final = 12
"""Bytes of a whole state of a fragment: three float32 for each parameter."""

NAMED_MAX: Final = 3
"""Most learners in one sentence."""

SESSION_CODES: Final = (
    ErrorCode.LAYOUT_DIFFERS,
    ErrorCode.PROTOCOL_VERSION,
    ErrorCode.WRONG_RUN,
    ErrorCode.KEY_REFUSED,
    ErrorCode.KEY_NAME,
    ErrorCode.BAD_NAME,
    ErrorCode.NOT_FINITE_SEED,
    ErrorCode.NAME_IN_USE,
    ErrorCode.OVER_CAPACITY,
)
"""Refusals that keep a learner out."""

RESTART_TIMES: Final = HEARD_S / HELLO_S + 1
"""Refusals that a learner gets which is started again at once: its name is still in use."""


class Verdict(NamedTuple):
    """The sentence."""

    level: Literal["ok", "warning", "bad"]
    """"bad": the run, or somebody's work, does not go on. "warning": it goes on, and not well."""
    text: str
    remedy: str = ""
    """The next thing to do; "": nothing."""


def verdict(status: Status) -> Verdict:
    """The most urgent thing that is true of a run, or that all is well."""
    rules = RUNNING if status.phase == Phase.RUNNING else OTHERWISE
    for rule in rules:
        found = rule(status)
        if found is not None:
            return found
    return _well(status)


def learner_text(learner: LearnerStatus) -> tuple[str, str]:
    """A word for how a learner is, and the same with the reason and, unless it trains, since when.
    The word is its state, unless its line is cut one way: then the state alone would look well."""
    word, since_s = learner.state, learner.since_s
    if learner.no_version_s >= EVIDENCE_S:
        word, since_s = "line down cut", learner.no_version_s
    if learner.no_data_s >= EVIDENCE_S:
        word, since_s = "line up cut", learner.no_data_s
    reason = f": {learner.reason}" if learner.reason else ""
    since = "" if word == LearnerState.TRAINING else f", {duration(since_s)}"
    return word, f"{word}{reason}{since}"


def duration(seconds: float) -> str:
    """A time for people: 40 s, 12 min, 3 h, 2 days."""
    for unit, unit_s in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.0f} {unit}"
    return f"{seconds:.0f} s"


# The broker.


def _stops(status: Status) -> Verdict | None:
    if not status.stopping:
        return None
    text = f"The broker stops: {status.stopping}"
    return Verdict("warning", text, "Start it again with the same command: nothing is lost")


def _disk_refuses(status: Status) -> Verdict | None:
    disk = status.disk
    if not disk.error or disk.error_s < EVIDENCE_S:
        return None
    text = f"The broker's disk has taken nothing for {duration(disk.error_s)}: {disk.error}"
    remedy = (
        "Make room on the disk of the state directory, or mend what the error names; learners train"
        " on, nothing is lost"
    )
    return Verdict("bad", text, remedy)


def _snapshots_fail(status: Status) -> Verdict | None:
    disk = status.disk
    if not disk.snapshot_error or disk.snapshot_error_s < EVIDENCE_S:
        return None
    since = duration(disk.snapshot_error_s)
    text = f"The broker's disk has taken no snapshot for {since}: {disk.snapshot_error}"
    remedy = (
        "Make room on the disk of the state directory, or mend what the error names; versions are "
        "written, but it fills, and the next start takes longer"
    )
    return Verdict("warning", text, remedy)


def _disk_hangs(status: Status) -> Verdict | None:
    for fragment, each in enumerate(status.fragments):
        if each.stage == "committing" and each.stage_s >= EVIDENCE_S:
            what = f"Version {each.version + 1} of fragment {fragment}"
            text = f"{what} has waited for the broker's disk for {duration(each.stage_s)}"
            return Verdict("bad", text, "See the disk of the state directory: iostat -x 1")
    return None


def _disk_is_slow(status: Status) -> Verdict | None:
    commit_s = status.disk.commit_p50_ms / 1000
    gap_s = _gap_s(status)
    if status.merges < COMMITS_MIN or status.uptime_s < EVIDENCE_S:
        return None
    if commit_s < SLOW_COMMIT_S or not 0 < gap_s <= commit_s:
        return None
    text = (
        f"The broker's disk is slow: a version takes {commit_s:.1f} s to be written, and one is "
        f"due every {gap_s:.1f} s"
    )
    return Verdict("warning", text, "Move the state directory to a faster disk")


def _disk_fills(status: Status) -> Verdict | None:
    free = status.disk.free_bytes
    needed = BYTES_PER_PARAMETER * sum(each.elements for each in status.fragments)
    if free is None or free >= needed:
        return None
    text = f"The broker's disk has {Size(free).text()} left, less than one copy of the run's state"
    return Verdict("warning", text, "Make room on the disk of the state directory")


def _workers_are_busy(status: Status) -> Verdict | None:
    process = status.process
    waiting = process.queue - process.workers  # One worker may write a snapshot for minutes.
    if process.busy_s < EVIDENCE_S or waiting <= 0:
        return None
    text = (
        f"The broker cannot keep up: its workers have not rested for {duration(process.busy_s)}, "
        f"and {waiting:,} {_verb(range(waiting), 'piece of work waits', 'pieces of work wait')}"
    )
    remedy = "Give it faster cores, or raise fragments.sync_period_steps"
    return Verdict("warning", text, remedy)


def _budget_is_used_up(status: Status) -> Verdict | None:
    """A full line is no ill by itself: its versions must come late, too."""
    line = status.line
    age_s = max((each.version_s for each in status.fragments), default=0.0)
    is_late = 0 < LATE_PERIODS * status.period_s < age_s
    training = _in_state(status, LearnerState.TRAINING).values()
    behind = max((each.versions_behind for each in training), default=0)
    up = {"wan.up": line.up_limit, "wan.total_up": line.total_up_limit}
    down = {"wan.down": line.down_limit, "wan.total_down": line.total_down_limit}
    for way, full_s, limits, is_short in (
        ("up", line.up_full_s, up, is_late),
        ("down", line.down_full_s, down, is_late or behind >= VERSIONS_BEHIND),
    ):
        if full_s >= EVIDENCE_S and is_short:
            text = f"The budget of the line {way} has been used up for {duration(full_s)}"
            keys = " or ".join(key for key, limit in limits.items() if limit)
            remedy = f"Raise {keys}, or fragments.sync_period_steps"
            return Verdict("warning", f"{text}, and versions come late", remedy)
    return None


# The learners.


def _begins(status: Status) -> Verdict | None:
    if status.phase != Phase.SEEDING:
        return None
    needed = status.quorum.at_start
    here = status.quorum.here
    if not here:
        return Verdict(
            "warning", "Nobody is here yet", "Start a learner with this broker's address"
        )
    if here < needed:
        verb = "is" if here == 1 else "are"
        text = f"The run begins with {needed} learners, and {here} of them {verb} here"
        return Verdict("warning", text, "Start the others, or lower run.learners_at_start")
    return Verdict("ok", f"The run begins: {(*status.waiting_for, 'version 0 is on its way')[0]}")


def _ends(status: Status) -> Verdict | None:
    if status.phase not in (Phase.ENDING, Phase.ENDED):
        return None
    text = "The run has ended" if status.phase == Phase.ENDED else "The goal is reached"
    if status.awaited:
        what = "take the final model" if status.phase == Phase.ENDED else "push what is left"
        text = f"{text}; {named(status.awaited)} {_verb(status.awaited, 'has', 'have')} to {what}"
    return Verdict("ok", f"{text}: {status.run_tokens:,} tokens")


def _nobody_is_here(status: Status) -> Verdict | None:
    quorum = status.quorum
    if quorum.here or quorum.idle_s < EVIDENCE_S:
        return None
    text = f"No learner has been here for {duration(quorum.idle_s)}"
    return Verdict("bad", text, "Start the learners again, with the same names")


def _nobody_trains(status: Status) -> Verdict | None:
    quorum = status.quorum
    if quorum.training or quorum.idle_s < EVIDENCE_S:
        return None
    text = f"Nobody has trained for {duration(quorum.idle_s)}"
    stalled = _in_state(status, LearnerState.STALLED)
    if stalled:  # Others may evaluate meanwhile: nobody has to look after those.
        text = f"{text}: {named(stalled)} {_verb(stalled, 'makes', 'make')} no steps"
        return Verdict("bad", text, "See what hangs there, or was stopped")
    paused = _in_state(status, LearnerState.PAUSED)
    if paused:
        reasons = ", ".join(dict.fromkeys(each.reason for each in paused.values() if each.reason))
        text = f"{text}: {named(paused)} paused ({reasons or 'no reason told'})"
        return Verdict("warning", text, "Nothing, if they evaluate; else see their training loops")
    joining = _in_state(status, LearnerState.JOINING)
    text = f"{text}: {named(joining)} still {_verb(joining, 'fetches', 'fetch')} the model"
    return Verdict("warning", text, "Wait; if it lasts, see the line down and wan.down")


def _line_up_is_cut(status: Status) -> Verdict | None:
    cut = {n: each for n, each in status.learners.items() if each.no_data_s >= EVIDENCE_S}
    if not cut:
        return None
    since_s = max(each.no_data_s for each in cut.values())
    waits = _verb(cut, "it announces pushes", "they announce pushes")
    if status.phase == Phase.SEEDING:
        waits = "it is to send version 0"
    text = f"Nothing has come up from {named(cut)} for {duration(since_s)}, though {waits}"
    remedy = (
        f"See whether a firewall closes the broker's uplink port {status.uplink_port}, and whether "
        "the line carries"
    )
    return Verdict("bad", text, remedy)


def _line_down_is_cut(status: Status) -> Verdict | None:
    cut = {n: each for n, each in status.learners.items() if each.no_version_s >= EVIDENCE_S}
    if not cut:
        return None
    since_s = max(each.no_version_s for each in cut.values())
    its = _verb(cut, "its", "their")
    text = (
        f"No version has reached {named(cut)} for {duration(since_s)}, though {its} messages come"
    )
    remedy = (
        f"See whether a firewall closes the broker's downlink port {status.downlink_port}, whether "
        "a relay runs, and whether the line carries"
    )
    return Verdict("bad", text, remedy)


def _is_stuck(status: Status) -> Verdict | None:
    last = status.last_merge
    since_s = last.ago_s if last is not None else status.uptime_s
    gap_s = _gap_s(status)
    if not gap_s or since_s < max(EVIDENCE_S, STUCK_GAPS * gap_s):
        return None
    text = f"There has been no new version for {duration(since_s)}"
    if not status.waiting_for:
        return Verdict("bad", text, "See the broker's log")
    remedy = "See that learner; if it is not to be waited for, lower merge.quorum"
    return Verdict("bad", f"{text}: the run waits for {status.waiting_for[0]}", remedy)


def _makes_no_steps(status: Status) -> Verdict | None:
    stalled = _in_state(status, LearnerState.STALLED)
    if not stalled:
        return None
    since_s = max(each.stepped_s for each in stalled.values())
    verb = _verb(stalled, "makes", "make")
    text = f"{named(stalled)} {verb} no steps for {duration(since_s)}; no round waits for that"
    return Verdict("warning", text, "See its process: a rank or its data loader hangs")


def _is_not_heard(status: Status) -> Verdict | None:
    """A fact and no cause, so it is told at once: the broker calls a learner silent after 3 s."""
    away = _in_state(status, LearnerState.SILENT) | _in_state(status, LearnerState.LOST)
    away = {name: each for name, each in away.items() if each.since_s < LOST_S}
    training = status.quorum.training
    if not away:
        return None
    since_s = max(each.heard_s for each in away.values())
    verb = _verb(away, "has", "have")
    others = _verb(range(training), "the other trains on", f"the other {training} train on")
    if not training:
        others = "nobody trains now"
    elif training < status.quorum.needed:
        others = f"{others}, fewer than the quorum of {status.quorum.needed}"
    text = f"{named(away)} {verb} not been heard for {duration(since_s)}; {others}"
    remedy = "See whether the process runs and its line carries: it comes back by itself"
    return Verdict("warning", text, remedy)


def _was_refused(status: Status) -> Verdict | None:
    refused = kept_out(status)
    if not refused:
        return None
    newest = min(refused, key=lambda each: each.ago_s)
    ago = f"{duration(newest.ago_s)} ago"
    when = ago if newest.times < 2 else f"{newest.times} times, last {ago}"
    return Verdict("warning", refusal_text(newest, f" {when}"), _capital(refusal_remedy(newest)))


def kept_out(status: Status) -> list[RefusalStatus]:
    """Refusals that keep somebody out. The broker forgets those of a learner that has joined."""
    return [
        each
        for each in status.refused
        if each.code in SESSION_CODES
        and (each.code != ErrorCode.NAME_IN_USE or each.times > RESTART_TIMES)
    ]


def refusal_remedy(refusal: RefusalStatus) -> str:
    """The remedy of its error, which tells it after a point, or that of its code."""
    _, _, rest = refusal.text.partition(" (expected ")
    return rest.partition("). ")[2] or ErrorCode(refusal.code).remedy


def refusal_text(refusal: RefusalStatus, when: str = "") -> str:
    """A refusal for people: whom it met, and why. The rest of an error's text is for programmers:
    it is `NAME: CODE: WHAT (expected ...). REMEDY`."""
    who = refusal.learner or "A peer"
    if refusal.code == ErrorCode.NAME_IN_USE:
        return f"A second process with the name {who} was refused{when}"
    said = refusal.text.removeprefix(f"{who}: ").removeprefix(f"{refusal.code}: ")
    return f"{who} was refused{when}: {said.partition(' (expected ')[0]}"


def _is_short(status: Status) -> Verdict | None:
    quorum = status.quorum
    if quorum.short_s < EVIDENCE_S:
        return None
    text = (
        f"The quorum of {quorum.needed} has not been reached for {duration(quorum.short_s)}: "
        f"{quorum.training} {_verb(range(quorum.training), 'learner trains', 'learners train')}, "
        "and rounds are merged of these alone"
    )
    return Verdict("warning", text, "Start more learners, or lower merge.quorum")


def _well(status: Status) -> Verdict:
    training = status.quorum.training
    if not training:
        return Verdict("ok", "Nobody trains at the moment; if it lasts, this line says why")
    text = f"All is well: {training} {_verb(range(training), 'learner trains', 'learners train')}"
    if status.tokens_per_s:
        text = f"{text}, {status.tokens_per_s:,.0f} tokens a second"
    if status.left_s is not None:
        text = f"{text}, {duration(status.left_s)} to the goal"
    return Verdict("ok", text)


Rule = Callable[[Status], Verdict | None]

OTHERWISE: Final[tuple[Rule, ...]] = (
    _stops,
    _disk_refuses,
    _line_up_is_cut,
    _line_down_is_cut,
    _was_refused,
    _begins,
    _ends,
)
"""The rules before a run begins and when it ends, the most urgent first."""

RUNNING: Final[tuple[Rule, ...]] = (
    _stops,
    _disk_refuses,
    _disk_hangs,
    _nobody_is_here,
    _nobody_trains,
    _line_up_is_cut,
    _line_down_is_cut,
    _is_stuck,
    _snapshots_fail,
    _disk_is_slow,
    _workers_are_busy,
    _budget_is_used_up,
    _makes_no_steps,
    _is_not_heard,
    _was_refused,
    _is_short,
    _disk_fills,
)
"""The rules while it runs. A cause comes before what follows from it."""


def _gap_s(status: Status) -> float:
    """Usual seconds between two versions, whatever their fragments; 0: not known yet."""
    return status.period_s / max(1, len(status.fragments))


def _in_state(status: Status, state: LearnerState) -> dict[str, LearnerStatus]:
    return {name: each for name, each in status.learners.items() if each.state == state}


def named(names: Iterable[str], most: int = NAMED_MAX) -> str:
    """Names in one line, not too many."""
    listed = list(names)
    text = ", ".join(listed[:most])
    more = len(listed) - most
    return f"{text} and {more} more" if more > 0 else text


def _verb(subjects: Iterable[object], one: str, several: str) -> str:
    return one if len(list(subjects)) == 1 else several


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
