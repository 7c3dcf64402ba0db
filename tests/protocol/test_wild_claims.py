"""One of three learners claims absurd tokens and steps in each push: clock and pace hold."""

from __future__ import annotations

import pytest
from msgspec import structs

from narrows.bench.sim.learner import LearnerSpec
from narrows.bench.sim.simulation import Simulation
from narrows.bench.sim.virtual import Faults, Noted
from narrows.broker.config import load_config
from narrows.broker.syncer import RunPhase, RunState
from narrows.broker.syncer import events as ev
from narrows.broker.syncer.member import Member
from narrows.broker.syncer.pushes import Intake
from narrows.proto import messages as msg


def state(run: Simulation) -> RunState:
    assert run.broker is not None
    return run.broker.syncer.state


@pytest.mark.parametrize(("tokens", "steps"), [(1 << 40, 1), (1 << 62, 1 << 62)])
def test_a_minute_of_wild_claims(tokens: int, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = {"run.goal_tokens": 10**6, "run.learners_at_start": 3, "fragments.count": 4}
    learners = [LearnerSpec(name, step_s=0.5) for name in ("a", "b", "insider")]
    run = Simulation(load_config(None, flags), 1, Faults(until_s=0.0), learners)
    run.run(60.0)
    before, usual_s = state(run).clock.run_tokens, state(run).step_s()
    honest_push = Intake.push

    def push(self: Intake, member: Member, message: msg.Push, now: float) -> list[ev.Effect]:
        if member.name == "insider":
            message = structs.replace(message, tokens=tokens, steps=steps)
        return honest_push(self, member, message, now)

    monkeypatch.setattr(Intake, "push", push)
    run.run(120.0)
    # 200 tokens a second of each honest learner, four times as many of the other; and what was
    # under way.
    assert state(run).clock.run_tokens - before <= (200 + 200 + 800) * 70
    told = [n.text for n in run.trace if isinstance(n, Noted) and "merge.tokens_per_s" in n.text]
    assert [text.partition(" trains")[0].rpartition(" ")[2] for text in told] == ["insider"]
    assert usual_s / 4 <= state(run).step_s() <= 4 * usual_s
    assert state(run).phase is RunPhase.RUNNING
    run.kill_broker(2.0)
    run.run(180.0)
    assert state(run).clock.run_tokens - before <= (200 + 200 + 800) * 130
    assert state(run).phase is RunPhase.RUNNING
