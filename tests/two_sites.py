"""Two sites walked as a new user would; `python tests/two_sites.py` writes it into a document.

Each command is typed into a shell, in the folder of its site. Nothing else passes between the sites
than the file with the invitation.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from running import wait_until

from narrows.bench.kit.processes import environment, free_ports

DOCUMENT: Final = Path(__file__).resolve().parent.parent / "docs/two-sites.md"
BLOCK: Final = re.compile(r"(<!-- walk: ([a-z]+) -->\n```console\n).*?(?=```\n)", re.DOTALL)
REMEDY: Final = "narrows keys allow site-a"


@dataclass
class Walk:
    """The commands of both sites with what they print. Leaving the block ends their processes."""

    folder: Path
    learner_options: str = ""
    port: int = field(default_factory=free_ports)
    commands: list[str] = field(default_factory=list[str])
    blocks: dict[str, str] = field(default_factory=dict[str, str])
    """For the document: what stands in the terminal, by name."""
    _running: list[subprocess.Popen[bytes]] = field(default_factory=list[subprocess.Popen[bytes]])

    @property
    def broker_site(self) -> Path:
        return self.folder / "broker-site"

    @property
    def learner_site(self) -> Path:
        return self.folder / "learner-site"

    def __enter__(self) -> Walk:
        self.broker_site.mkdir()
        self.learner_site.mkdir()
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._running):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def go(self) -> None:
        """The walk from nothing to a revoked learner that has printed the remedy."""
        address = f"tcp://127.0.0.1:{self.port}"
        self._run("new", self.broker_site, "narrows keys new")
        self._run(
            "invite",
            self.broker_site,
            f"narrows keys invite site-a --address {address} > site-a.invite",
        )
        broker = self._start(
            "broker",
            self.broker_site,
            f"narrows broker --keys keys --founder site-a --listen {address}",
        )
        self._wait(broker, "serving on")
        shutil.move(self.broker_site / "site-a.invite", self.learner_site)
        self._run("accept", self.learner_site, "narrows keys accept site-a.invite --to site-a.key")
        learner = self._start(
            "learner",
            self.learner_site,
            f"narrows learner --key site-a.key {self.learner_options}".strip(),
        )
        self._wait(learner, "tokens/s")
        self._keep("learner", learner)
        self._run("revoke", self.broker_site, "narrows keys revoke site-a")
        self._wait(broker, "out of the ring")
        self._wait(learner, REMEDY)
        # Training goes on.
        told = len(self.log(learner).partition(REMEDY)[0])
        wait_until(lambda: "  joining" in self.log(learner)[told:], "another step")
        self._keep("broker", broker)
        self._keep("revoked", learner, after=len(self.blocks["learner"].splitlines()) - 1)

    def log(self, name: str) -> str:
        """All that a command has printed."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def _run(self, name: str, site: Path, command: str) -> None:
        process = self._spawn(name, site, command)
        assert process.wait() == 0, self.log(name)
        self._keep(name, name)

    def _start(self, name: str, site: Path, command: str) -> str:
        self._running.append(self._spawn(name, site, command))
        return name

    def _spawn(self, name: str, site: Path, command: str) -> subprocess.Popen[bytes]:
        self.commands.append(command)
        here = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        with (self.folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen(
                ["bash", "-c", command],
                cwd=site,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**environment(), "PATH": here, "NARROWS_KEY": "", "PYTHONPATH": ""},
                start_new_session=True,
            )

    def _wait(self, name: str, text: str) -> None:
        wait_until(
            lambda: text in self.log(name) or any(p.poll() is not None for p in self._running),
            f"{text!r} of {name}",
        )
        assert text in self.log(name), self.log(name)

    def _keep(self, block: str, name: str, after: int = 0) -> None:
        """Keeps what stands in the terminal of a command now, but for its first lines."""
        lines = self.log(name).splitlines()
        if after:
            self.blocks[block] = "\n".join([*lines[after:], ""])
            return
        (typed,) = [each for each in self.commands if _kind(each) == name]
        self.blocks[block] = "\n".join([f"$ {typed}", *lines, ""])


def _kind(command: str) -> str:
    """The name of a command: `narrows keys new` is `new`, `narrows broker` is `broker`."""
    words = command.split()
    return words[2] if words[1] == "keys" else words[1]


def main() -> None:
    """Walks, and puts what was printed into the document."""
    with tempfile.TemporaryDirectory() as folder, Walk(Path(folder)) as walk:
        walk.go()
    text = DOCUMENT.read_text(encoding="utf-8")
    found = {match[2] for match in BLOCK.finditer(text)}
    assert found == walk.blocks.keys(), (found, walk.blocks.keys())
    DOCUMENT.write_text(
        BLOCK.sub(lambda match: match[1] + walk.blocks[match[2]], text), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
