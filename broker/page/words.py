"""Words and figures of the page, made of a Status; the browser only places them."""

from __future__ import annotations

from narrows.broker.verdict import duration, learner_text
from narrows.proto.messages import LearnerState, LearnerStatus, Status
from narrows.proto.units import Size, counted


def figures(
    status: Status, *, down_wire_bits_per_param: float | None
) -> list[tuple[str, str, str]]:
    """(what, its value, what belongs to it) for each figure at the head of the page."""
    line = status.line
    quorum = status.quorum
    learners = status.learners.values()
    logged = sum(each.logged_tokens for each in learners)
    merged = sum(each.merged_tokens for each in learners)
    return [
        ("tokens in the model", short(status.run_tokens), _of_goal(status)),
        ("tokens a second", short(status.tokens_per_s), _time_left(status)),
        (
            "learners training",
            f"{quorum.training} of {len(status.learners)}",
            f"a merge waits for {quorum.needed or 'all'} of them",
        ),
        ("last merge", *_last_merge(status)),
        ("work in the model", _percent(merged, logged), "of the tokens that learners trained on"),
        (
            "bits per parameter",
            f"{_bits(up_wire_bits_per_param(status))} up",
            f"{_bits(down_wire_bits_per_param)} down, headers included",
        ),
        (
            "Mbit/s up, down",
            f"{line.up_bits_per_s / 1e6:.1f}, {line.down_bits_per_s / 1e6:.1f}",
            f"budget {_limit(line.total_up_limit)}, {_limit(line.total_down_limit)}",
        ),
        (
            "disk of the broker",
            "not known" if status.disk.free_bytes is None else Size(status.disk.free_bytes).text(),
            f"free; 99% of versions are written in {status.disk.commit_p99_ms:.0f} ms",
        ),
    ]


def up_wire_bits_per_param(status: Status) -> float | None:
    """Bits on the line to the broker for each parameter of a merged push; None: no push yet."""
    elements = sum(each.elements for each in status.fragments)
    if not status.contributions or not elements:
        return None
    pushed = status.contributions * elements / len(status.fragments)
    return 8 * status.line.up_bytes / pushed


def run_line(status: Status) -> str:
    """One line on which run this is."""
    life = status.epoch.partition("-")[0]
    return (
        f"run {status.run_id}, {status.phase}, {status.settings.mode}; broker {status.narrows},"
        f" life {life}, up for {duration(status.uptime_s)}"
    )


def lane_text(learner: LearnerStatus) -> str:
    """A learner's doing now, in a few words. Seconds are rounded, so that the words of a learner
    that is away for long change rarely."""
    word, told = learner_text(learner)
    if word != LearnerState.TRAINING:
        return told
    text = f"{learner.steps_per_s:.3g} steps/s"
    if learner.loss is not None:
        text += f", loss {learner.loss:.2f}"
    if learner.versions_behind > 1:
        text += f", {learner.versions_behind} versions behind"
    return text


def short(value: float) -> str:
    """1234567 -> "1.23 M"."""
    for size, name in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= size:
            return f"{value / size:.3g}{name}"
    return f"{value:.3g}"


def _of_goal(status: Status) -> str:
    if not status.goal_tokens:
        return "no goal is set"
    share = 100 * status.run_tokens / status.goal_tokens
    return f"of {short(status.goal_tokens)}, {share:.1f}%"


def _time_left(status: Status) -> str:
    if status.left_s is None:
        return ""
    return f"{duration(status.left_s)} to the goal"


def _last_merge(status: Status) -> tuple[str, str]:
    merge = status.last_merge
    if merge is None:
        return "none yet", "since the broker started"
    pushes = status.contributions / max(1, status.merges)
    return (
        f"{merge.ago_s:.1f} s ago",
        f"of {counted(len(merge.contributors), 'learner')}; {pushes:.1f} in the mean",
    )


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f}%" if whole else "nothing yet"


def _bits(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _limit(bits_per_s: float) -> str:
    return f"{bits_per_s / 1e6:.3g}" if bits_per_s else "none"
