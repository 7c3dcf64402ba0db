"""Records of the events file."""

from __future__ import annotations

from narrows.broker.merging import Outcome
from narrows.broker.syncer import RunState
from narrows.broker.syncer import events as ev


def merge_record(run: RunState, effect: ev.StartMerge, outcome: Outcome) -> dict[str, object]:
    """Record of a merge that is done."""
    return {
        "event": "merged",
        "fragment": effect.fragment,
        "version": effect.version,
        "digest": f"{outcome.state.digest:016x}",
        "contributors": [each.learner for each in effect.contributions],
        "tokens": sum(each.tokens for each in effect.contributions),
        "live": len(run.roster.ready()),
        "run_tokens": run.clock.run_tokens,
        "reason": effect.reason,
    }
