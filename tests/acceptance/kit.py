"""A broker and learners as real processes, for tests that look at public surfaces only.

The surfaces are the command line with its exit codes, `narrows.learner.Learner`,
`narrows status --json`, and the files that a run leaves. Of the product nothing is imported but
that, and the harness that starts processes (`narrows.bench.kit.processes`), so the same tests
judge any implementation.

A test starts things with `site.broker`, `site.learner` and `site.shell`; waits with `wait_until`,
`site.contribute`, `site.adopt` and `site.steps_on`; looks with `site.status`, `site.merges`,
`site.adopted` and `site.journal`; and judges with `site.check_...`.
"""

import json
import resource
import shlex
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import psutil
from acceptance import toy
from safetensors.torch import load_file, save
from torch import Tensor

from narrows.bench.kit.processes import LOOPBACK, Child, Processes, wait_until

OTHER_LOOPBACK: Final = "127.0.0.2"
"""A second address of this machine, at which a test may listen on a broker's port numbers."""

LOSSLESS: Final = ("codec.push=f32-blosc2", "codec.publish=f32-blosc2")
"""Settings for a run whose messages have the same size whatever they say, and lose no bit."""


TAIL: Final = 4000
"""Characters that a failed test shows of each process."""


class Site(Processes):
    """The folder, the ports and the processes of one test; its end kills what still runs."""

    hosts = (LOOPBACK, OTHER_LOOPBACK)

    def broker(self, *settings: str, crash_at: str = "", **flags: object) -> Child:
        """Starts the broker, or starts it again at the same address, and waits until it serves.

        settings: KEY=VALUE each. flags: those of `narrows broker`. crash_at: a place of a round
        and the visit at which the broker ends there, PLACE:VISIT; then nobody waits for it.
        """
        given: list[str] = []
        for flag, value in flags.items():
            given += [f"--{flag.replace('_', '-')}", str(value)]
        all_settings = ("fragments.sync_period_steps=4", *settings)
        return self.serve(all_settings, *given, crash_at=crash_at)

    def learner(self, name: str, **options: Any) -> Child:
        """Starts a learner with these options of `toy.learn`."""
        return self.fork(name, toy.learn, self.folder, name, **{"broker": self.address, **options})

    def type(self, folder: Path, command: str) -> Child:
        """Runs a command line of `narrows` in this folder."""
        script, *arguments = shlex.split(command)
        assert script == "narrows", command
        return self.command(arguments[0], *arguments, folder=folder)

    def shell(self, name: str, *command: str) -> Child:
        """Starts a program, such as an example, or the script `narrows` as it is installed."""
        return self.fork(name, toy.execute, self.folder, command)

    def status(self, *flags: str) -> dict[str, Any]:
        """The run as `narrows status --json` shows it."""
        return dict(self.ask("status", self.address, "--json", *flags))

    def contributions(self, name: str) -> int:
        """Merged pushes of a learner in all lives of the broker, by its event file."""
        return sum(merge["contributors"].count(name) for merge in self.merges())

    def contributors(self) -> set[str]:
        """Names of the learners of which a push was merged."""
        return {name for merge in self.merges() for name in merge["contributors"]}

    def adopted(self, name: str) -> set[tuple[int, int, str]]:
        """(fragment, version, digest) of what a learner has adopted, in all its lives."""
        return {versioned(one) for one in self.installed(name)}

    def steps_on(self, count: int, *names: str) -> None:
        """Returns once each of these toy learners has made `count` more steps."""
        self._rises(lambda name: toy.steps(self.folder, name), count, "steps", *names)

    def contribute(self, *names: str, count: int = 1) -> None:
        """Returns once the broker has merged `count` more pushes of each of these learners."""
        self._rises(self.contributions, count, "contributions", *names)

    def adopt(self, *names: str, count: int = 2) -> None:
        """Returns once each of these learners has adopted `count` more versions."""
        self._rises(lambda name: len(self.installed(name)), count, "adoptions", *names)

    def merge(self, count: int) -> None:
        """Returns once the broker has made `count` more versions."""
        self._rises(lambda _: len(self.merges()), count, "versions", "broker")

    def _rises(self, get: Callable[[str], int], count: int, what: str, *names: str) -> None:
        goals = {name: get(name) + count for name in names}
        watched = [self.running[name] for name in ("broker", *names) if name in self.running]
        wait_until(
            lambda: all(get(name) >= goals[name] for name in names),
            f"{count} more {what} of {', '.join(names)}",
            *watched,
        )

    def journal(self) -> dict[tuple[int, int], str]:
        """(fragment, version) -> digest of each durable round. The broker must not be running."""
        lines = self.tell("journal", "show", str(self.state), "--json").splitlines()
        rows = [json.loads(line) for line in lines]
        return {(row["fragment"], row["version"]): row["published"] for row in rows}

    def check_durable(self, *names: str) -> None:
        """Every version that a learner ever adopted is in the journal, bit for bit: one that was
        lost may have been made again, with other bits. The broker must not be running."""
        self.check_copies(*names, made={(*key, digest) for key, digest in self.journal().items()})

    def check_copies(self, *names: str, made: set[tuple[int, int, str]] | None = None) -> None:
        """Every version that a learner adopted is, bit for bit, one of these, or else of those that
        the broker made."""
        # First what was adopted: the run goes on, and a merge stands in its file before it is sent.
        adopted = {name: {one for one in self.adopted(name) if one[1] > 0} for name in names}
        if made is None:
            made = {versioned(merge) for merge in self.merges()}
        for name, own in adopted.items():
            assert own, f"{name} has adopted nothing"
            assert own <= made, f"{name} has adopted what is not there: {sorted(own - made)}"

    def check_run(self, *names: str) -> None:
        """The copies of these learners are equal, the journal is in order, and replaying it gives
        the model that the broker left. The broker must not be running."""
        self.check_copies(*names)
        for part in ("audit", "replay"):
            self.tell("journal", part, str(self.state))

    def export(self) -> dict[str, Tensor]:
        """The tensors that `narrows export` writes, by name."""
        to = self.folder / "export.safetensors"
        self.tell("export", str(self.state), "--to", str(to))
        return load_file(to)

    def saved(self, name: str) -> dict[str, Tensor]:
        """The tensors that a learner has saved at its end, by name."""
        return load_file(self.folder / f"{name}.safetensors")

    def close(self) -> None:
        """Kills what still runs, which prints where its threads stand before. A test that fails
        shows what this prints."""
        for child in self.children:
            if child.exitcode is None:
                print(f"--- {child.name} still runs")
                child.signal(signal.SIGCONT)
                child.signal(signal.SIGABRT)
                child.process.join(5.0)
            if child.name != "tell" or child.exitcode != 0:
                print(f"--- {child.name}, exit code {child.exitcode}", child.log[-TAIL:], sep="\n")
        super().close()


def versioned(event: dict[str, Any]) -> tuple[int, int, str]:
    """Fragment, version and digest of a merge or an adoption."""
    return event["fragment"], event["version"], event["digest"]


def limit_files(child: Child, size: int) -> None:
    """No file of a process grows beyond `size` bytes from now on; -1: all may grow. With 0 it
    writes nothing more, as on a full disk."""
    _, most = resource.prlimit(child.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(child.pid, resource.RLIMIT_FSIZE, (size, most))


def resident_bytes(child: Child) -> int:
    """Memory that a process has now."""
    return int(psutil.Process(child.pid).memory_info().rss)


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """True if two models have the same names, types, shapes and bits."""
    return save(one) == save(other)
