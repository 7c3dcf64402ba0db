"""The usual container: an installation that is read only, and no home that can be written."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from running import HANG_S, wait_until
from test_architecture import ROOT

LIKE_ANYBODY = ("setpriv", "--bounding-set=-dac_override")
"""A command under which permissions hold for root as well."""

WARNING = "compiled code is not kept"
ADVICE = "from narrows.proto.codec.compiled import uncached_advice; print(uncached_advice())"
CODED = "from narrows.proto.codec.kernels import *; all_finite(NOTHING)"
ABLE = 'import os, sys; sys.exit(os.access(".", os.W_OK))'


@dataclass
class Container:
    """The paths inside the container."""

    install: Path
    scratch: Path
    """The only folder that can be written."""

    def run(self, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        command, environment = self._command(arguments), self._environment | more
        return subprocess.run(
            command, env=environment, cwd=self.install, capture_output=True, text=True, check=False
        )

    @contextmanager
    def running(self, log: Path, *arguments: str) -> Generator[subprocess.Popen[bytes]]:
        command = self._command(arguments)
        with (
            log.open("w") as file,
            subprocess.Popen(
                command, env=self._environment, cwd=self.install, stderr=file
            ) as process,
        ):
            try:
                yield process
            finally:
                process.kill()

    def _command(self, arguments: Sequence[str]) -> list[str]:
        return [*(LIKE_ANYBODY if os.geteuid() == 0 else ()), sys.executable, *arguments]

    @property
    def _environment(self) -> dict[str, str]:
        return {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(self.install),
            "HOME": str(self.install),
            "OMP_NUM_THREADS": "1",
        }


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> Container:
    if os.geteuid() == 0 and shutil.which(LIKE_ANYBODY[0]) is None:
        pytest.skip("root may write everywhere, and setpriv is missing")
    container = Container(tmp_path_factory.mktemp("install"), tmp_path_factory.mktemp("scratch"))
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "src/narrows", container.install / "narrows", ignore=ignored)
    for path in (container.install, *container.install.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    if container.run("-c", ABLE).returncode:
        pytest.skip("what is read only can be written all the same")
    return container


def test_kernels_compile_without_a_cache(container: Container) -> None:
    done = container.run("-c", f"{CODED}; import narrows.broker.process.service; {ADVICE}")
    assert done.returncode == 0, done.stderr
    assert WARNING in done.stdout and "NUMBA_CACHE_DIR" in done.stdout


def test_a_folder_for_the_cache_is_used(container: Container) -> None:
    cache = container.scratch / "cache"
    done = container.run("-c", f"{CODED}; {ADVICE}", NUMBA_CACHE_DIR=str(cache))
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr
    assert any(cache.rglob("*.nbi"))


@pytest.mark.slow
def test_a_run_says_so_once(container: Container, data: Path) -> None:
    scratch = container.scratch
    ready, text = scratch / "ready", scratch / "data"
    shutil.copytree(data, text)
    logs = scratch / "broker.log", scratch / "learner.log"
    broker = ("-m", "narrows", "broker", "--listen", "tcp://127.0.0.1:0",
              "--state-dir", str(scratch / "state"), "--ready-file", str(ready))  # fmt: skip
    with container.running(logs[0], *broker) as process:
        wait_until(lambda: ready.exists() or process.poll() is not None, "the broker")
        assert process.poll() is None, logs[0].read_text()
        learner = ("-m", "narrows", "learner", "--broker", ready.read_text().strip(), "--name", "a",
                   "--preset", "nano", "--steps-max", "20", "--data", str(text))  # fmt: skip
        with container.running(logs[1], *learner) as worker:
            assert worker.wait(HANG_S) == 0, logs[1].read_text()
        process.send_signal(signal.SIGTERM)
        assert process.wait(HANG_S) == 0, logs[0].read_text()
    assert [log.read_text().count(WARNING) for log in logs] == [1, 1]
