"""A run of real processes: a broker, and learners that train or only act as if they did.

A bench sees what a user sees: commands, events files, exit codes.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from narrows.bench.kit.line import HUB_ADDRESS, Line, enter
from narrows.bench.kit.processes import Child, Processes, wait_until
from narrows.bench.reference.worker import need_torch
from narrows.broker.store import History
from narrows.proto.keys import AllowList, SiteKey, create_broker_key, new_pair, write_site_key

PATIENCE_S: Final = 120.0
"""Longest wait for anything; first copies at the lowest rates take tens of seconds."""
AT_HUB: Final = ("broker", "tell")
"""Processes that run at the hub of a line; the others run at its site."""

TENSORS: Final = 16
WIDTH: Final = 64
TOKENS: Final = 1000
"""Tokens of a toy's step."""
TELL_S: Final = 0.01
"""Time between two looks at a toy that its facts show."""
FACTS_BYTES: Final = 256

HURRY: Final = {"fragments.sync_period_steps": 4, "fragments.overlap_steps": 1}
"""Settings with a period far shorter than a round takes, so that a toy always has to push."""


@dataclass(frozen=True)
class Toy:
    """A learner whose step is a timed wait, after which a few of its TENSORS move a little.

    It costs next to nothing, so that the exchange has the machine to itself.
    """

    name: str
    params: int
    """A multiple of TENSORS * WIDTH."""
    step_s: float = 0.004
    moved: int = 1
    """Tensors that a step moves, in turn."""
    seed: int = 0


def numbered(name: str, count: int) -> list[str]:
    """NAME-0, NAME-1 and so on."""
    return [f"{name}-{index}" for index in range(count)]


class Deployment(Processes):
    """The folder and the processes of one run; leaving the block ends them all.

    With a `line` the broker runs at its hub and the learners at its site. `folder` stays when the
    block is left; without one a temporary folder serves. Raises ConfigError without PyTorch.
    """

    wait_s = PATIENCE_S

    def __init__(self, *, line: Line | None = None, folder: Path | None = None) -> None:
        need_torch()
        super().__init__(folder)
        self._line = line
        if line is not None:
            self.address = f"tcp://{HUB_ADDRESS}:7070"
        self._keys = self.folder / "keys"
        self._fragments: object = None

    # Processes.

    def make_keys(self, names: Iterable[str]) -> Path:
        """Makes keys of the broker, and NAME.key of these learners, who use them; the broker's
        folder of keys."""
        server = create_broker_key(self._keys).public
        for name in names:
            pair = new_pair()
            file = self.folder / f"{name}.key"
            write_site_key(file, SiteKey(name, pair, (server,)))
            AllowList.allow(self._keys, name, pair.public)
            self.environment[name] = {"NARROWS_KEY": str(file)}
        return self._keys

    def broker(self, settings: Mapping[str, object], *, crash_at: str = "") -> None:
        """Starts the broker, or its next life at the same address; returns once it serves.

        `crash_at` is PLACE:VISIT, where it ends itself; then this returns at once.
        """
        self._fragments = settings.get("fragments.count")
        given = [f"{key}={value}" for key, value in settings.items()]
        if self._keys.exists():
            given.append(f"broker.keys={self._keys}")
        elif self._line is not None:
            given.append("broker.insecure=true")
        self.serve(given, crash_at=crash_at)

    def learner(self, name: str, preset: str) -> None:
        """Starts a learner that trains the reference model; `summary` reads what it leaves."""
        summary = self.folder / f"{name}.json"
        self.command(
            name, "learner", "--broker", self.address, "--name", name, "--preset", preset,
            "--events", str(self.event_reader(name).path), "--json", str(summary),
        )  # fmt: skip

    def toy(self, toy: Toy) -> None:
        """Starts a toy; `facts` tells what it does."""
        self.fork(toy.name, _train, self.address, self.folder, toy)

    def toys(self, like: Toy, count: int) -> list[str]:
        """Starts toys with seeds of their own; their names, as `numbered` makes them."""
        names = numbered(like.name, count)
        for seed, name in enumerate(names):
            self.toy(replace(like, name=name, seed=seed))
        return names

    def fork(self, name: str, target: Callable[..., None], *given: Any, **more: Any) -> Child:
        """Starts a process at its end of the line."""
        if self._line is None:
            return super().fork(name, target, *given, **more)
        namespace = self._line.hub if name in AT_HUB else self._line.site
        return super().fork(name, _within, namespace, target, *given, **more)

    def kill(self, name: str) -> None:
        """Ends a process without a chance to say anything."""
        self.running.pop(name).kill()

    # What they tell.

    def summary(self, name: str) -> dict[str, Any]:
        """The summary that a learner leaves at its end; empty if it was killed."""
        return self._json(f"{name}.json")

    def facts(self, name: str) -> dict[str, Any]:
        """`steps` of a toy, and `boundary_cpu_s`: CPU seconds that the exchange took from its
        training thread. Empty before it has joined."""
        return self._json(f"{name}.facts")

    def steps(self, name: str) -> int:
        """Steps that a toy has made."""
        return int(self.facts(name).get("steps", 0))

    def account(self, toys: Sequence[str]) -> tuple[dict[str, int], Counter[tuple[str, int]]]:
        """Tokens that each of these toys has logged, and those in durable rounds by learner and
        fragment; the toys stand still from now on, and the broker has ended."""
        for name in toys:  # At one moment, else they would log what nobody can merge any more.
            self.running[name].signal(signal.SIGSTOP)
        logged = {name: TOKENS * self.steps(name) for name in toys}
        self.running["broker"].stop()
        merged: Counter[tuple[str, int]] = Counter()
        with closing(History(self.state)) as history:
            for row in history.rounds():
                for push in row.round_.contributions:
                    merged[push.learner, row.round_.fragment] += push.tokens
        return logged, merged

    def wait(self, seconds: float) -> None:
        """Lets the run go on for a while; raises NarrowsError at once if a process has ended."""
        until = time.monotonic() + seconds
        self.wait_until(lambda: time.monotonic() > until, "time to pass")

    def wait_merges(self, count: int) -> None:
        """Waits until so many rounds have been merged, in all lives of the broker."""
        self.wait_until(lambda: len(self.merges()) >= count, f"round {count}")

    def wait_joined(self, names: Sequence[str]) -> None:
        """Waits until all of them hold every fragment: no first copy is on its way any more."""

        def all_hold_all() -> bool:
            held = ({each["fragment"] for each in self.installed(name)} for name in names)
            return all(len(each) == self._fragments for each in held)

        self.wait_until(all_hold_all, "all to join")

    def wait_until(self, condition: Callable[[], object], what: str) -> None:
        """Raises NarrowsError at once if a process has ended meanwhile, unless `kill` ended it."""
        wait_until(condition, what, *self.running.values(), timeout_s=PATIENCE_S)

    def _json(self, file: str) -> dict[str, Any]:
        path = self.folder / file
        text = path.read_text() if path.exists() else ""
        return dict(json.loads(text or "{}"))


def payload_bits(merges: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Bits per parameter that a learner pushed, and that each received, in these merges."""
    pushed = sum(each["elements"] * len(each["contributors"]) for each in merges)
    published = sum(each["elements"] for each in merges)
    return (
        8 * sum(each["pushed_bytes"] for each in merges) / pushed,
        8 * sum(each["published_bytes"] for each in merges) / published,
    )


def thread_cpu_s(pid: int | None) -> dict[str, float]:
    """CPU seconds of a process so far: its `main` thread, those of `zeromq`, the `others`."""
    found = dict.fromkeys(("main", "zeromq", "others"), 0.0)
    for task in Path(f"/proc/{pid}/task").iterdir():
        head, _, tail = (task / "stat").read_text().rpartition(")")
        fields = tail.split()
        group = "zeromq" if "(ZMQ" in head else "others"
        if task.name == str(pid):
            group = "main"
        found[group] += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found


# In the children.


def _within(namespace: str, target: Callable[..., None], *given: Any, **more: Any) -> None:
    """Calls `target` inside of a network namespace."""
    enter(namespace)
    target(*given, **more)


def _train(address: str, folder: Path, toy: Toy) -> None:
    """The loop of a user, with a model that needs no data."""
    import torch
    from torch import nn

    from narrows.learner import Learner

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(toy.seed)
    shape = (toy.params // TENSORS // WIDTH, WIDTH)
    first = [0.02 * torch.randn(shape, generator=generator) for _ in range(TENSORS)]
    moves = [torch.randn(shape, generator=generator) for _ in range(TENSORS)]
    model = nn.ParameterList(nn.Parameter(each) for each in first)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    facts = os.open(folder / f"{toy.name}.facts", os.O_WRONLY | os.O_CREAT)
    pace = threading.Event()
    told_s = 0.0
    spent_s = 0.0
    own_s = dict[str, float]()
    """Thread's CPU time when the optimizer's own work in a step begins and ends."""
    optimizer.register_step_post_hook(lambda *_: own_s.update(end=time.thread_time()))
    learner = Learner(
        model, optimizer, broker=address, name=toy.name,
        events=folder / f"{toy.name}.jsonl", join_timeout_s=PATIENCE_S,
    )  # fmt: skip
    with learner:
        # The learner's hooks run before the first of these two and after the second.
        optimizer.register_step_pre_hook(lambda *_: own_s.update(begin=time.thread_time()))
        for step in learner.until_end(itertools.count()):
            pace.wait(toy.step_s)
            for index, parameter in enumerate(model):
                in_turn = (index - step * toy.moved) % TENSORS < toy.moved
                parameter.grad = moves[index] if in_turn else None
            learner.log(tokens=TOKENS, loss=1.0)
            began_s = time.thread_time()
            optimizer.step()
            spent_s += time.thread_time() - began_s - (own_s["end"] - own_s["begin"])
            if time.monotonic() > told_s + TELL_S:
                told_s = time.monotonic()
                said = {"steps": step + 1, "boundary_cpu_s": spent_s}
                os.pwrite(facts, json.dumps(said).ljust(FACTS_BYTES).encode(), 0)
