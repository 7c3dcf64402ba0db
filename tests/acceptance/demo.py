"""`narrows demo` as a process, the processes that it starts, and what it leaves."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
from acceptance.kit import Site, wait_until

LEARNERS = ("site-a", "site-b")
VICTIM = LEARNERS[1]
"""The learner that the demo kills."""

PATIENCE_S = 60.0
"""The demo starts programs one by one, none of which has imported torch before."""


@dataclass(frozen=True)
class Result:
    """The results that `--json` writes."""

    victim_merged_again: bool
    """The demo killed a learner, which came back, and a push of its new life was merged."""
    copies_compared: int
    copies_differing: int
    loss: float
    """Validation loss of the global model, nats per byte."""
    bytes_moved: int
    data_parallel_bytes: int

    @classmethod
    def of(cls, said: dict[str, Any]) -> Result:
        return cls(
            said["killed"] and said["rejoin_s"] is not None, said["digests_compared"],
            said["digests_differing"], said["loss_global"], said["up_bytes"] + said["down_bytes"],
            said["data_parallel_bytes"],
        )  # fmt: skip


class Demo:
    """A demo with two learners and plain output."""

    def __init__(self, site: Site, steps: int) -> None:
        self.run = replace(site, folder=site.folder / "demo")
        """Reads the event files that the demo keeps."""
        self._results, self.picture = site.folder / "results.json", site.folder / "demo.svg"
        self.child = site.narrows(
            "demo", "demo", "--learners", str(len(LEARNERS)), "--steps", str(steps), "--plain",
            "--keep", str(self.run.folder), "--json", str(self._results),
            "--picture", str(self.picture),
        )  # fmt: skip

    def wait_until(self, condition: Callable[[], object], what: str) -> None:
        wait_until(condition, what, self.child, timeout_s=PATIENCE_S)

    def goal_tokens(self) -> int:
        """Goal of the run, as its broker says. It must be serving."""
        address = re.search(r"serving on (tcp://[\d.:]+)", log_of(self.run.folder, "broker"))
        assert address is not None
        key = self.run.folder / f"{LEARNERS[0]}.key"
        answer = self.run.ask("status", address[1], "--key", str(key), "--json")
        assert answer.code == 0, answer.err
        return int(json.loads(answer.out)["goal_tokens"])

    def run_tokens(self) -> int:
        """Tokens of the run's clock at the newest merge."""
        merged = self.run.merged()
        return int(merged[-1]["run_tokens"]) if merged else 0

    def living(self, name: str) -> list[psutil.Process]:
        """The process of this learner; none while it is dead."""
        found: list[psutil.Process] = []
        with suppress(psutil.NoSuchProcess):  # The demo itself has ended.
            for one in psutil.Process(self.child.pid).children(recursive=True):
                with suppress(psutil.Error):
                    if name == one.name():
                        found.append(one)
        return found

    def freeze(self, *names: str) -> None:
        for name in names:
            for one in self.living(name):
                with suppress(psutil.NoSuchProcess):  # The demo kills it at this moment.
                    one.suspend()

    def thaw(self, *names: str) -> None:
        for name in names:
            for one in self.living(name):
                with suppress(psutil.NoSuchProcess):
                    one.resume()

    def result(self) -> Result:
        (row,) = json.loads(self._results.read_text())["rows"]
        return Result.of(row)


def log_of(folder: Path, name: str) -> str:
    """Output of a process of the demo."""
    return (folder / f"{name}.log").read_text()
