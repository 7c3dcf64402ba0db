"""The end of a run with real processes: which learners get the final model, and the log about
others.

`python end_of_run.py CASE [PARAMETERS] [LOST_S]` for each of the CASES. Without numbers it is the
literal case: 1.5 million parameters, and the broker's own limits.
"""

from __future__ import annotations

import itertools
import json
import logging
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn

from narrows.bench.kit.processes import Processes, free_ports
from narrows.bench.kit.proxy import Proxy
from narrows.broker.storage.checkpoint import StateDir
from narrows.learner import Learner, Unfinished
from narrows.proto import timing
from narrows.proto.fragments import build_table

HANG_S = 900.0
LATE_SHARE = 0.7
"""Share of the goal from which on a step is long, or a line bad."""

WIDTH = 100


@dataclass(frozen=True)
class Member:
    """One learner of a case."""

    step_s: float = 0.05
    long_step_s: float = 0.0
    """Extra length of its first step after LATE_SHARE; infinity: it hangs."""
    trickles: bool = False
    """From LATE_SHARE on its data ports pass one byte a second."""


@dataclass(frozen=True)
class Case:
    """A run whose goal is `steps` steps of one token of each of its members."""

    members: dict[str, Member]
    steps: int = 60
    rate: str = ""
    """Rate of every line, both ways, as soon as all have joined."""
    ends: tuple[str, ...] = ()
    """Learners that end by themselves. The others would stay for ever."""


CASES: dict[str, Callable[[float], Case]] = {
    "slow-line": lambda long_s: Case(
        {"a": Member(step_s=0.3)}, steps=50, rate="100kbit/s", ends=("a",)
    ),
    "long-step": lambda long_s: Case(
        {"a": Member(), "b": Member(), "slow": Member(long_step_s=long_s)},
        ends=("a", "b", "slow"),
    ),
    "hung": lambda long_s: Case(
        {"a": Member(), "b": Member(), "hung": Member(long_step_s=1e6)}, ends=("a", "b")
    ),
    "trickle": lambda long_s: Case(
        {"a": Member(), "b": Member(), "narrow": Member(trickles=True)},
        ends=("a", "b", "narrow"),
    ),
}


@dataclass
class Outcome:
    """Results of a case."""

    log: str = ""
    """The broker's log."""
    versions: tuple[int, ...] = ()
    exit_codes: dict[str, int] = field(default_factory=dict[str, int])
    said: dict[str, str] = field(default_factory=dict[str, str])
    """Error that each learner raised; "" for none."""
    final: dict[str, str] = field(default_factory=dict[str, str])
    """`narrows.final` of the file that it saved."""
    same: dict[str, bool] = field(default_factory=dict[str, bool])
    """True if the file has the bits of the broker's last publication."""
    left_s: dict[str, float] = field(default_factory=dict[str, float])
    """Seconds from the end of the loop until the learner was gone."""
    seconds: float = 0.0


def run(case: Case, folder: Path, *, parameters: int, lost_s: float, broker_s: float) -> Outcome:
    """Runs a case; its processes leave their logs in `folder`.

    `lost_s`: liveness.lost; `broker_s`: in place of `timing.BROKER_GONE_S`.
    """
    started, outcome = time.monotonic(), Outcome()
    with Processes(folder) as processes, ExitStack() as stack:
        port = free_ports()
        _write_settings(folder, case, rate="")
        processes.start_broker(
            "--listen", f"tcp://127.0.0.1:{port}", "--state-dir", str(folder / "state"),
            "--config", str(folder / "broker.toml"),
            "--set", f"liveness.lost={lost_s}s", "--set", f"liveness.late={lost_s / 2}s",
        )  # fmt: skip
        proxy = stack.enter_context(Proxy("127.0.0.2", "127.0.0.1", range(port, port + 3)))
        for name, member in case.members.items():
            host = "127.0.0.2" if member.trickles else "127.0.0.1"
            processes.start_command(
                name, sys.executable, __file__, "learn", name, f"tcp://{host}:{port}",
                str(folder), str(parameters), str(member.step_s), str(member.long_step_s),
                str(broker_s),
            )  # fmt: skip
        _wait_for([folder / f"{name}.joined" for name in case.members])
        if case.rate:
            _write_settings(folder, case, rate=case.rate)
            processes.kill("broker", signal.SIGHUP)
        _wait_for([folder / f"{name}.late" for name in case.members])
        for way in (proxy.up, proxy.down):
            way.trickles = {port + 1, port + 2}
        for name in (*case.ends, "broker"):
            outcome.exit_codes[name] = processes.wait(name, HANG_S)
    outcome.log = (folder / "broker.log").read_text()
    _compare(outcome, case, folder)
    outcome.seconds = time.monotonic() - started
    return outcome


def _write_settings(folder: Path, case: Case, *, rate: str) -> None:
    goal = case.steps * len(case.members)
    wan = f'[wan]\nup = "{rate}"\ndown = "{rate}"\n' if rate else ""
    (folder / "broker.toml").write_text(
        f"[run]\ngoal_tokens = {goal}\nlearners_at_start = {len(case.members)}\n"
        f"[fragments]\ncount = 4\nsync_period_steps = 10\n{wan}"
    )


def _wait_for(paths: list[Path]) -> None:
    deadline, pause = time.monotonic() + HANG_S, threading.Event()
    while missing := [path.name for path in paths if not path.exists()]:
        assert time.monotonic() < deadline, f"waited in vain for {missing}"
        pause.wait(0.02)


def _compare(outcome: Outcome, case: Case, folder: Path) -> None:
    with StateDir.open(folder / "state") as state:
        snapshot = state.load()
    assert snapshot is not None
    outcome.versions = tuple(part.version for part in snapshot.fragments)
    published = np.zeros(snapshot.layout[0].shape, np.float32).reshape(-1)
    table = build_table(snapshot.layout, snapshot.fragment_count)
    for part, newest in zip(table, snapshot.fragments, strict=True):
        for piece in part.pieces:
            values = newest.published[piece.offset : piece.offset + piece.count]
            published[piece.start : piece.start + piece.count] = values
    for name in case.ends:
        path = folder / f"{name}.safetensors"
        weight = load_file(path)["weight"].numpy().reshape(-1)
        outcome.final[name] = metadata(path)["narrows.final"]
        outcome.same[name] = bool(np.array_equal(weight, published))
        told = json.loads((folder / f"{name}.json").read_text())
        outcome.said[name], outcome.left_s[name] = told["said"], told["left_s"]


def metadata(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return dict(header["__metadata__"])


def learn(
    name: str, broker: str, folder: Path, parameters: int, step_s: float, long_step_s: float
) -> None:
    """One learner. Its steps are timed waits; the rest is the code of a user."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, parameters // WIDTH, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    said, over_at, late = "", time.monotonic(), folder / f"{name}.late"
    pace = threading.Event()
    learner = Learner(model, optimizer, broker=broker, name=name)
    try:
        with learner:
            (folder / f"{name}.joined").touch()
            for _ in learner.until_end(itertools.repeat(None)):
                loss = (model(torch.randn(4, WIDTH)) - 1).square().mean()
                loss.backward()
                learner.log(tokens=1, loss=loss)
                optimizer.step()
                optimizer.zero_grad()
                pace.wait(step_s)
                if learner.progress >= LATE_SHARE and not late.exists():
                    late.touch()
                    pace.wait(long_step_s)
            over_at = time.monotonic()
    except Unfinished as error:
        said = str(error)
    left_s = time.monotonic() - over_at
    learner.save(folder / f"{name}.safetensors")
    (folder / f"{name}.json").write_text(json.dumps({"said": said, "left_s": left_s}))
    sys.exit(said or 0)


def _main(case: str, parameters: float = 1.5e6, lost_s: float = 10.0) -> None:
    with tempfile.TemporaryDirectory(prefix="narrows-end-") as folder:
        outcome = run(
            CASES[case](3 * lost_s), Path(folder),
            parameters=int(parameters), lost_s=lost_s, broker_s=timing.BROKER_GONE_S,
        )  # fmt: skip
    print(outcome.log)
    print(f"{case}: {parameters:,.0f} parameters, {outcome.seconds:.0f} s")
    print(f"the broker ended with {outcome.exit_codes['broker']}, versions {outcome.versions}")
    for name, code in outcome.exit_codes.items():
        if name != "broker":
            print(
                f"{name}: exit code {code} after {outcome.left_s[name]:.1f} s, narrows.final = "
                f"{outcome.final[name]}, the broker's bits: {outcome.same[name]}"
                f"  {outcome.said[name]}"
            )


if __name__ == "__main__":
    if sys.argv[1] == "learn":
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
        timing.BROKER_GONE_S = float(sys.argv[8])  # type: ignore[misc]
        learn(
            sys.argv[2], sys.argv[3], Path(sys.argv[4]), int(sys.argv[5]),
            float(sys.argv[6]), float(sys.argv[7]),
        )  # fmt: skip
    else:
        _main(sys.argv[1], *map(float, sys.argv[2:]))
