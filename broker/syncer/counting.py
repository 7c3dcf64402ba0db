"""The tokens of a round that the run's clock counts. [pure]"""

from __future__ import annotations

import math
from dataclasses import replace

from narrows.broker.syncer import events as ev
from narrows.broker.syncer.clock import Claim
from narrows.broker.syncer.rounds import Round
from narrows.broker.syncer.run import RunState
from narrows.proto.units import format_count


def count_tokens(state: RunState, round_: Round, now: float) -> list[ev.Effect]:
    """Gives each contribution the tokens of it that the clock counts; tells the operator of
    learners of which most does not."""
    contributions = round_.contributions()
    claims = [Claim(c.learner, c.tokens, round_.seconds[c.learner]) for c in contributions]
    ready = {member.name for member in state.roster.ready()}
    counted = state.clock.count(round_.fragment, claims, ready, now, state.suspects.keys())
    round_.contributed = {
        each.learner: replace(each, counted=tokens)
        for each, tokens in zip(contributions, counted, strict=True)
    }
    held_back = state.clock.held_back(round_.contributed.keys())
    return [ev.Note("warning", _text(name, rate)) for name, rate in held_back.items()]


def _text(name: str, tokens_per_s: float) -> str:
    return (
        f"goal and schedules count less than half of what {name} trains: it claims "
        f"{format_count(tokens_per_s)} tokens/s, more than its limit or than is usual here. If it "
        f"is right, set merge.tokens_per_s_max = {math.ceil(tokens_per_s)} or more"
    )
