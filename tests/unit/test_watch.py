"""The watch over learners, and what the syncer makes of it."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from machines import Desk
from merge_cases import contribution, one_fragment

from narrows.broker.merging.evidence import PushEvidence
from narrows.broker.merging.history import EMPTY
from narrows.broker.merging.merge import merge_vectors
from narrows.broker.merging.watch import (
    COSINES_KEPT,
    ROUNDS_BAD,
    ROUNDS_WATCHED,
    UNWATCHED,
    Watch,
)
from narrows.broker.syncer import events as ev
from narrows.broker.syncer.status import status_of
from narrows.proto import messages as msg
from narrows.proto.errors import ErrorCode
from narrows.proto.limits import LEARNERS_MAX


def seen(**cosines: float | None) -> list[PushEvidence]:
    """Evidence of a round; None: clipped, and as the others else."""
    return [
        PushEvidence(
            name, cosine is None, 0.4 if cosine is None else cosine, abs(cosine or 1.0) < 0.002
        )
        for name, cosine in sorted(cosines.items())
    ]


def after(watch: Watch, rounds: int, **cosines: float | None) -> Watch:
    for _ in range(rounds):
        watch = watch.after(seen(**cosines))
    return watch


def suspects(watch: Watch, **cosines: float | None) -> set[str]:
    return set(watch.suspects(seen(**cosines)))


# Evidence.


def test_evidence_of_a_sign_that_is_flipped() -> None:
    piece = one_fragment((1000, "mean"))
    rng = np.random.default_rng(1)
    shared = rng.normal(size=1000)
    honest = [(shared + rng.normal(size=1000)).astype(np.float32) for _ in range(2)]
    found = [*honest, (-shared - rng.normal(size=1000)).astype(np.float32)]
    ones = [contribution(name, piece, each) for name, each in zip("abc", found, strict=True)]
    evidence = merge_vectors(piece, ones, [1 / 3] * 3).evidence
    # Between the honest ones the liar is left out, so each is compared with the other one.
    expected = float(honest[0] @ honest[1] / np.linalg.norm(honest[0]) / np.linalg.norm(honest[1]))
    assert evidence[0].cosine == pytest.approx(expected, abs=1e-4)
    assert evidence[1].cosine == pytest.approx(expected, abs=1e-4)
    both = honest[0] + honest[1]
    expected = float(found[2] @ both / np.linalg.norm(found[2]) / np.linalg.norm(both))
    assert evidence[2].cosine == pytest.approx(expected, abs=1e-4)


def test_evidence_of_two_and_of_one() -> None:
    piece = one_fragment((2, "mean"))
    ones = [
        contribution("a", piece, np.array([1, 0], np.float32)),
        contribution("b", piece, np.array([-1, 1], np.float32)),
        contribution("c", piece, np.array([0, 0], np.float32)),
    ]
    two = merge_vectors(piece, ones[:2], [0.001, 0.999]).evidence
    assert [each.cosine for each in two] == [pytest.approx(-np.sqrt(0.5), rel=1e-3)] * 2
    assert merge_vectors(piece, ones[:1], [1.0]).evidence == (PushEvidence("a", False, None),)
    zeros = merge_vectors(piece, ones, [1 / 3] * 3).evidence
    assert zeros[2].cosine is None and zeros[0].cosine is not None


def test_only_what_loses_half_of_its_length_counts_as_clipped() -> None:
    piece = one_fragment((1, "mean"), (1, "mean"))
    history = EMPTY
    for version in (1, 2):
        history = history.after(version, [("a", "0"), ("b", "0")], np.ones((2, 2), np.float32))
    for length, is_clipped in ((2.9, False), (3.1, True)):
        one = contribution("b", piece, np.array([length, length], np.float32))
        result = merge_vectors(piece, [one], [1.0], norm_limit=1.5, history=history)
        assert result.clipped == 2 and result.evidence[0].is_clipped == is_clipped


# The rule.


def test_who_is_clipped_again_and_again_is_named_within_ten_rounds() -> None:
    watch = after(UNWATCHED, ROUNDS_BAD - 1, a=0.4, b=0.4, c=None)
    assert not suspects(watch, a=0.4, b=0.4, c=None)
    watch = after(watch, 1, a=0.4, b=0.4, c=None)
    assert suspects(watch, a=0.4, b=0.4, c=None) == {"c"}
    assert (
        "clipped by the norm bound in 8 of its last 8 rounds" in watch.suspects(seen(c=None))["c"]
    )


def test_who_points_away_from_learners_that_agree_is_named() -> None:
    watch = after(UNWATCHED, ROUNDS_WATCHED, a=0.4, b=0.3, c=-0.3)
    assert suspects(watch, a=0.4, b=0.3, c=-0.3) == {"c"}


def test_learners_that_have_little_in_common_are_not_named() -> None:
    watch = after(UNWATCHED, 100, a=-0.15, b=0.05, c=0.02)
    assert not suspects(watch, a=-0.15, b=0.05, c=0.02)


def test_noise_is_named_even_among_learners_that_differ() -> None:
    watch = after(UNWATCHED, ROUNDS_WATCHED, a=0.05, b=0.06, c=0.0005)
    assert suspects(watch, a=0.05, b=0.06, c=0.0005) == {"c"}


def test_only_a_minority_is_blamed_for_a_direction() -> None:
    watch = after(UNWATCHED, ROUNDS_WATCHED, a=0.001, b=0.0005, c=0.0001)
    assert suspects(watch, a=0.001, b=0.0005, c=0.0001) == {"c"}


def test_with_two_learners_both_are_named() -> None:
    watch = after(UNWATCHED, ROUNDS_BAD, a=0.4, b=None)
    assert suspects(watch, a=0.4, b=None) == {"a", "b"}


def test_a_round_of_two_of_a_larger_run_says_nothing_of_directions() -> None:
    watch = after(UNWATCHED, 1, a=0.4, b=0.4, c=0.4)
    watch = after(watch, ROUNDS_WATCHED, a=0.001, b=0.001)
    assert not suspects(watch, a=0.001, b=0.001)
    watch = after(watch, ROUNDS_BAD, a=0.4, b=None)
    assert suspects(watch, a=0.4, b=None) == {"b"}, "clipped is clipped"


def test_good_rounds_forgive() -> None:
    watch = after(UNWATCHED, ROUNDS_WATCHED, a=0.4, b=0.4, c=None)
    watch = after(watch, 1, a=0.4, b=0.4, c=0.4)
    assert not suspects(watch, a=0.4, b=0.4, c=0.4), "its newest round is a good one"
    assert "c" not in watch.forgiven(seen(a=0.4, b=0.4, c=0.4))
    watch = after(watch, 5, a=0.4, b=0.4, c=0.4)
    assert "c" in watch.forgiven(seen(a=0.4, b=0.4, c=0.4))


def test_the_state_is_bounded_and_survives_a_file() -> None:
    watch = UNWATCHED
    for number in range(LEARNERS_MAX + 10):
        watch = watch.after(seen(**{f"l{number}": 0.1, "steady": 0.2}))
    assert len(watch.names) == LEARNERS_MAX and watch.names[-1].learner == "steady"
    assert len(watch.cosines) == COSINES_KEPT
    assert all(len(each.bad) <= ROUNDS_WATCHED for each in watch.names)
    assert msgspec.json.decode(msgspec.json.encode(watch), type=Watch) == watch
    assert watch.after([]) is watch


# The syncer.


def merged(desk: Desk, *contributors: str, **suspected: str) -> list[ev.Effect]:
    for name in contributors:
        desk.contribute(name)
    version = desk.state.heads[0].version + 1
    return desk.do(ev.Merged(0, version, 7, 0, suspected, frozenset(contributors) - set(suspected)))


def notes(effects: list[ev.Effect]) -> list[str]:
    return [effect.text for effect in effects if isinstance(effect, ev.Note)]


def states(desk: Desk) -> dict[str, str]:
    return {each.name: each.state for each in status_of(desk.syncer, {}, desk.now).learners}


def test_a_suspect_is_named_once_and_stays_in() -> None:
    desk = Desk().running("a", "b", "c")
    (text,) = notes(merged(desk, "a", "b", "c", c="clipped"))
    assert "c may poison the model (c: clipped)" in text and "quarantine" in text
    assert states(desk) == {"a": "live", "b": "live", "c": "suspected"}
    assert not desk.state.is_excluded("c")


def test_an_excluded_learner_is_refused_and_nobody_waits_for_it() -> None:
    desk = Desk(merge__quarantine="exclude").running("a", "b", "c")
    (text,) = notes(merged(desk, "a", "b", "c", c="clipped"))
    assert "until the broker restarts" in text
    assert states(desk)["c"] == "quarantined"
    while not desk.state.rounds:
        desk.wait(1.0)
        for name in "abc":
            desk.say(name, msg.Alive(0))
    assert desk.round.expected == {"a", "b"}
    effects = desk.push("c", desk.round.fragment, push_id=2)
    refusals = [e.message for e in effects if isinstance(e, ev.Send)]
    codes = [each.code for each in refusals if isinstance(each, msg.Refuse)]
    assert codes == [ErrorCode.QUARANTINED]
    fates = [e for e in effects if isinstance(e, ev.LogFate)]
    assert [(e.what, e.learner, e.reason) for e in fates] == [("refused", "c", "quarantined")]


def test_of_two_nobody_is_excluded() -> None:
    desk = Desk(merge__quarantine="exclude").running("a", "b")
    (text,) = notes(merged(desk, "a", "b", a="clipped", b="clipped"))
    assert text.startswith("a and b may poison the model") and "nobody can say" in text
    assert not desk.state.is_excluded("a") and not desk.state.is_excluded("b")
