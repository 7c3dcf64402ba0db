"""Short runs as readable transcripts: who says what to whom, and what comes of it.

The expected text lies in transcripts/. After a change of the protocol write it anew with
`pytest tests/protocol/test_transcripts.py --rewrite` and review the difference.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from narrows.bench.sim.broker import SimulatedRound
from narrows.bench.sim.learner import LearnerSpec
from narrows.bench.sim.simulation import Simulation
from narrows.bench.sim.virtual import Faults, Noted
from narrows.broker.config import BrokerConfig, preset
from narrows.proto import messages as msg
from narrows.proto.config import override

FOLDER = Path(__file__).parent / "transcripts"
TWO = (LearnerSpec("a", step_s=0.5), LearnerSpec("b", step_s=0.5))


class Transcript:
    """Writes a simulation down while it runs; reports and unchanged beats are left out."""

    def __init__(self, *learners: LearnerSpec, mode: str = "decoupled", **settings: object) -> None:
        values = {
            "fragments.count": 1 if mode == "diloco" else 2,
            "fragments.sync_period_steps": 8,
            "fragments.overlap_steps": 0 if mode == "diloco" else 1,
            **{name.replace("__", "."): value for name, value in settings.items()},
        }
        config = override(override(BrokerConfig(), preset(mode)), values)
        self.lines: list[str] = []
        self._beat: tuple[object, ...] = ()
        self._records = 0
        self.simulation = Simulation(config, 7, Faults(), learners, on_message=self._message)

    def run(self, until_s: float) -> None:
        self.simulation.run(until_s)
        self._flush()

    def say(self, text: str) -> None:
        """A line of the story."""
        self.lines.append(f"\n{self.simulation.clock.now:7.3f}  *** {text}\n")

    def _message(
        self, at_s: float, sender: str, receiver: str, message: msg.ControlMessage
    ) -> None:
        self._flush()
        if isinstance(message, msg.Report):
            return
        if isinstance(message, msg.Beat):
            beat = (message.epoch, message.phase, message.versions, message.rounds)
            if beat == self._beat:
                return
            self._beat, receiver = beat, "all"
        self.lines.append(f"{at_s:7.3f}  {sender:>6} -> {receiver:6}  {describe(message)}")

    def _flush(self) -> None:
        """Notes and merges since the last line."""
        trace = self.simulation.trace
        for record in trace[self._records :]:
            if isinstance(record, Noted):
                text = f"{record.process:>6}            {record.level}: {record.text}"
                self.lines.append(f"{record.at_s:7.3f}  {text}")
            elif isinstance(record, SimulatedRound):
                who = ", ".join(f"{c.learner}/{c.push_id}" for c in record.contributors)
                text = f"merged fragment {record.fragment} version {record.version} from {who}"
                self.lines.append(f"{record.at_s:7.3f}  broker            {text} ({record.reason})")
        self._records = len(trace)


def describe(message: msg.ControlMessage) -> str:
    match message:
        case msg.LayoutPart(index, count, _, entries):
            return f"LayoutPart {index} of {count}, {len(entries)} tensors"
        case msg.Hello(run_id=run_id, epoch=epoch, step=step):
            known = f"of run {run_id!r} epoch {epoch[0]}.{epoch[1]}, step {step}" if run_id else ""
            return f"Hello {known or 'for the first time'}"
        case msg.Welcome():
            heads = [head.version for head in message.fragments]
            return f"Welcome, {message.role}; {message.phase}, versions {heads}"
        case msg.Beat():
            rounds = [describe_round(r) for r in message.rounds]
            return (
                f"Beat {message.phase}, versions {list(message.versions)}, "
                f"rounds: {', '.join(rounds) or 'none'}"
            )
        case msg.Push():
            return (
                f"Push {message.push_id}: fragment {message.fragment} on version "
                f"{message.base_version}, {message.tokens} tokens in {message.steps} steps"
            )
        case msg.Missing():
            return f"Missing {message.kind.name} fragment {message.fragment}: {message.ranges}"
        case _:
            fields = {name: getattr(message, name) for name in message.__struct_fields__}
            shown = ", ".join(f"{k} {v}" for k, v in fields.items() if v not in ("", -1))
            return f"{type(message).__name__} {shown}"


def describe_round(open_round: msg.OpenRound) -> str:
    text = f"fragment {open_round.fragment} on {open_round.base_version}"
    return text + (f" at step {open_round.at_step}" if open_round.at_step >= 0 else "")


def join_and_founding() -> Transcript:
    """Two learners found a run; the first round is merged and adopted."""
    story = Transcript(*TWO, run__learners_at_start=2)
    story.run(4.0)
    return story


def round_with_grace() -> Transcript:
    """The slow learner c is waited for as long as it pays, then left out."""
    story = Transcript(*TWO, LearnerSpec("c", step_s=2.5), run__learners_at_start=3)
    story.run(5.0)
    return story


def kill_and_rejoin() -> Transcript:
    """SIGKILL of a; a new process claims its name while the broker still believes in the old."""
    story = Transcript(*TWO, run__learners_at_start=2)
    story.run(3.5)
    story.say("a is killed, and started again after 0.3 s")
    story.simulation.kill_learner("a", 0.3)
    story.run(7.0)
    return story


def broker_restart() -> Transcript:
    """SIGKILL of the broker; its checkpoint is older than what the learners hold."""
    story = Transcript(*TWO, run__learners_at_start=2, broker__checkpoint_versions=3)
    story.run(10.0)
    story.say("the broker is killed, and started again after 1 s")
    story.simulation.kill_broker(1.0)
    story.run(15.0)
    return story


def backup_restored() -> Transcript:
    """A life of the broker is lost: the next one begins from a backup, under the same number."""
    story = Transcript(*TWO, run__learners_at_start=2, broker__checkpoint_versions=1)
    story.run(6.0)
    story.say("the broker is killed, its state directory copied; it is started again after 1 s")
    story.simulation.kill_broker(1.0)
    story.run(11.0)
    story.say("the broker is killed, and started from the copy after 1 s")
    story.simulation.restore_broker(1, 1.0)
    story.run(17.0)
    return story


def goal_and_end() -> Transcript:
    """At the goal every fragment gets a last round, everybody adopts it and says Bye."""
    story = Transcript(*TWO, run__learners_at_start=2, run__goal_tokens=1500)
    story.run(30.0)
    story.say(f"the broker ends: {story.simulation.finished}")
    return story


def diloco() -> Transcript:
    """The classic method: rounds name a step, learners wait for the merge of all."""
    slow = LearnerSpec("b", step_s=0.8)
    story = Transcript(TWO[0], slow, mode="diloco", run__learners_at_start=2)
    story.run(15.0)
    return story


@pytest.mark.parametrize(
    "story",
    [
        join_and_founding,
        round_with_grace,
        kill_and_rejoin,
        broker_restart,
        backup_restored,
        goal_and_end,
        diloco,
    ],
    ids=lambda story: story.__name__,
)
def test_transcript(story: Callable[[], Transcript], request: pytest.FixtureRequest) -> None:
    assert story.__doc__ is not None
    text = f"# {story.__doc__}\n\n" + "\n".join(story().lines) + "\n"
    path = FOLDER / f"{story.__name__}.txt"
    if request.config.getoption("--rewrite"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")
