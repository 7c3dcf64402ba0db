"""Start of each system of `narrows bench peers`, and its results."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from narrows.bench.demo.results import evaluate_global
from narrows.bench.kit.processes import Processes, free_ports
from narrows.bench.kit.rows import read_rows
from narrows.bench.peers.envs import SCRIPTS, environment
from narrows.bench.peers.member import START
from narrows.learner.reference.gpt import preset
from narrows.proto.errors import NarrowsError

HOST: Final = "127.0.0.1"
COORDINATOR: Final = "coordinator"
BROKER_READY_S: Final = 30.0


@dataclass(frozen=True)
class PeerPlan:
    """The run that every system makes."""

    members: int
    steps: int
    """Inner steps of each member."""
    sync_steps: int
    """H."""
    preset: str
    step_wait_s: float

    @property
    def step_tokens(self) -> int:
        """Tokens of one inner step of all members together."""
        config = preset(self.preset)
        return self.members * config.batch * config.context


@dataclass(frozen=True)
class PeerExchange:
    """One completed exchange; for a decoupled system the merge of one fragment."""

    time_s: float
    """Unix time."""
    step: int
    """Inner steps per member that the run has made."""
    members: int
    """Number of members that took part."""


class System(Protocol):
    """One system in one run; every process is a child of `processes`."""

    def start_coordinator(self, start_step: int) -> None:
        """Starts the coordinator, or starts it again at the same address."""
        ...

    def start_member(self, rank: int, start_step: int) -> None:
        """`start_step` > 0: the member returns to a run that stands there."""
        ...

    def release(self) -> None:
        """Lets the members begin if all are ready; called again and again."""
        ...

    def exchanges(self) -> list[PeerExchange]:
        """The exchanges so far, in order of time."""
        ...

    def finished(self, rank: int) -> bool:
        """True if this member has made all of its steps."""
        ...

    def loss(self) -> float | None:
        """Validation loss, in nats per byte, of the model that the survivors hold at the end."""
        ...


def member_name(rank: int) -> str:
    return f"member-{rank}"


class Scripted:
    """A system behind a script in bench/peers/scripts."""

    def __init__(self, name: str, plan: PeerPlan, processes: Processes, python: Path) -> None:
        self.name, self.plan, self.processes, self.python = name, plan, processes, python
        self.port = free_ports()

    def start_coordinator(self, start_step: int) -> None:
        self._start(COORDINATOR, 0, start_step, "--coordinator")

    def start_member(self, rank: int, start_step: int) -> None:
        self._start(member_name(rank), rank, start_step)

    def _start(self, process: str, rank: int, start_step: int, *more: str) -> None:
        plan = self.plan
        self.processes.start_command(
            process, str(self.python), "-P", str(SCRIPTS / f"{self.name}_train.py"),
            "--rank", str(rank),
            "--world", str(plan.members),
            "--host", HOST,
            "--port", str(self.port),
            "--preset", plan.preset,
            "--steps", str(plan.steps),
            "--sync-steps", str(plan.sync_steps),
            "--start-step", str(start_step),
            "--step-wait-s", str(plan.step_wait_s),
            "--folder", str(self.processes.folder),
            *more,
        )  # fmt: skip

    def release(self) -> None:
        folder = self.processes.folder
        if all((folder / f"{name}.ready").exists() for name in self.processes.running):
            (folder / START).touch()

    def exchanges(self) -> list[PeerExchange]:
        # A coordinator that reports the exchanges knows best. Otherwise each member reports its
        # own; the same step means the same exchange.
        folder = self.processes.folder
        reported = read_rows(folder / f"{COORDINATOR}.jsonl")
        if reported:
            return [PeerExchange(**record) for record in reported]
        every = [record for path in folder.glob("member-*.jsonl") for record in read_rows(path)]
        first: dict[int, PeerExchange] = {}
        for record in sorted(every, key=lambda record: record["time_s"]):
            first.setdefault(record["step"], PeerExchange(**record))
        return list(first.values())

    def finished(self, rank: int) -> bool:
        folder = self.processes.folder
        names = (member_name(rank), COORDINATOR)
        return any((folder / f"{name}.json").exists() for name in names)

    def loss(self) -> float | None:
        folder = self.processes.folder
        paths = [folder / f"{COORDINATOR}.json"]
        if not paths[0].exists():
            paths = sorted(folder.glob("member-*.json"))
        losses = [json.loads(path.read_text())["loss"] for path in paths]
        return sum(losses) / len(losses) if losses else None


class Ours:
    """Broker and reference workers, with the defaults of both except for H."""

    def __init__(self, plan: PeerPlan, processes: Processes) -> None:
        self.plan, self.processes = plan, processes
        self.address = f"tcp://{HOST}:{free_ports()}"

    def start_coordinator(self, start_step: int) -> None:
        plan, folder = self.plan, self.processes.folder
        self.processes.start_broker(
            "--listen", self.address,
            "--state-dir", str(folder / "broker"),
            "--events", str(folder / "broker.jsonl"),
            "--goal-tokens", str(plan.steps * plan.step_tokens),
            "--set", f"run.learners_at_start={plan.members}",
            "--set", f"fragments.sync_period_steps={plan.sync_steps}",
            "--set", f"run.tokens_per_run_step={plan.step_tokens}",
            name=COORDINATOR,
        )  # fmt: skip

    def start_member(self, rank: int, start_step: int) -> None:
        self.processes.start(
            member_name(rank), "learner",
            "--broker", self.address,
            "--name", f"learner-{rank}",
            "--preset", self.plan.preset,
            "--step-wait-s", str(self.plan.step_wait_s),
            "--json", str(self.processes.folder / f"{member_name(rank)}.json"),
        )  # fmt: skip

    def release(self) -> None:
        pass  # `run.learners_at_start` does it.

    def exchanges(self) -> list[PeerExchange]:
        return [
            PeerExchange(
                record["time_s"],
                record["run_tokens"] // self.plan.step_tokens,
                len(record["contributors"]),
            )
            for record in read_rows(self.processes.folder / "broker.jsonl")
            if record["event"] == "merged"
        ]

    def finished(self, rank: int) -> bool:
        return (self.processes.folder / f"{member_name(rank)}.json").exists()

    def loss(self) -> float | None:
        if self.processes.wait(COORDINATOR, BROKER_READY_S):
            return None
        try:
            return evaluate_global(self.processes.folder, self.plan.preset)[0]
        except NarrowsError:
            return None


def system_of(name: str, plan: PeerPlan, processes: Processes) -> System:
    """The system of this name. Raises PeerAbsent if it cannot be had here."""
    if name == "narrows":
        return Ours(plan, processes)
    return Scripted(name, plan, processes, environment(name))
