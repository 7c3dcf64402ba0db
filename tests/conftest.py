"""The rules of the gate for every test, and options of the suite.

A test may not outlast its time limit, and may leave no process or network namespace behind.
A test over real processes (marker `real`), but for those of ranks, may run once more after a
failure; the summary names it as FLAKY, and more than FLAKY_MAX of them make the run red.
"""

import ctypes
import os
import re
import signal
import sys
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from typing import Any

import hypothesis
import psutil
import pytest

SEEDS_PER_TEST = 10
FLAKY_MAX = 2
NEVER_BY_CHANCE = (r"^Failed: Timeout \(", r"^AssertionError: the test left ")
"""Failures after which a test does not run again. The time limit holds once for both runs of it."""

PR_SET_CHILD_SUBREAPER = 36
SERVERS = ("multiprocessing.forkserver", "multiprocessing.resource_tracker")
ENDING_S = 5.0
"""A process that has got its signal may need this long to go."""
NAMESPACES = Path("/run/netns")


def pytest_configure(config: pytest.Config) -> None:
    # A shell starts what runs in the background with SIGINT ignored, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Whatever a process of ours starts and abandons becomes our child, so that we find it.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    if config.getoption("numprocesses", default=None) and not hasattr(config, "workerinput"):
        from narrows.broker.merging import warm_up

        warm_up()  # Else the workers would compile the same kernels at once, for a minute.
    # No limit on the time of an example: a busy machine does not decide. The gate has the same
    # examples in every run: random numbers do not decide, either.
    too_slow = [hypothesis.HealthCheck.too_slow]
    both = hypothesis.settings(deadline=None, suppress_health_check=too_slow)
    hypothesis.settings.register_profile("gate", both, derandomize=True, max_examples=50)
    hypothesis.settings.register_profile("nightly", both, max_examples=5000, print_blob=True)
    hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "gate"))


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """A worker that died could not clean up: nothing outlives the session."""
    if not hasattr(config, "workerinput"):
        kill(started())


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seeds", type=int, default=100, help="simulated runs with faults")
    parser.addoption("--minutes", type=float, default=0.05, help="minutes of random frames")
    parser.addoption("--write-golden", action="store_true", help="of test_codec.py, from the code")
    parser.addoption("--picture", help="file for the picture of the page while a learner is dead")
    parser.addoption("--first-seed", type=int, default=0, help="seed of the first of them")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests that take `seeds` get them in blocks."""
    if "seeds" in metafunc.fixturenames:
        first = int(str(metafunc.config.getoption("--first-seed")))
        count = int(str(metafunc.config.getoption("--seeds")))
        seeds = range(first, first + count)
        blocks = [seeds[i : i + SEEDS_PER_TEST] for i in range(0, count, SEEDS_PER_TEST)]
        metafunc.parametrize("seeds", blocks, ids=[f"{b[0]}-{b[-1]}" for b in blocks])


REAL_S_MAX = 120
"""Several processes on a busy machine may take twice as long as everything else may."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    limit_s = REAL_S_MAX + 60 * float(config.getoption("--minutes"))
    for item in items:
        if "site" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.real)
        if item.get_closest_marker("real"):
            # A second run would hide a deadlock of ranks, which may come once in many runs.
            if "ranks" not in item.path.parts:
                item.add_marker(pytest.mark.flaky(reruns=1, rerun_except=list(NEVER_BY_CHANCE)))
            if not item.get_closest_marker("timeout"):
                item.add_marker(pytest.mark.timeout(limit_s))


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    reruns = reporter.stats.get("rerun", []) if reporter else []
    if len(reruns) > FLAKY_MAX and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reruns = terminalreporter.stats.get("rerun", [])
    for report in reruns:
        reason = re.search(r"^E +(.*)$", report.longreprtext, re.MULTILINE)
        text = f"FLAKY {report.nodeid} -- {reason[1] if reason else 'no reason'}"
        terminalreporter.write_line(text, yellow=True)
    if len(reruns) > FLAKY_MAX:
        text = f"{len(reruns)} flaky tests, at most {FLAKY_MAX} are allowed"
        terminalreporter.write_line(text, red=True)


@pytest.fixture
def site(tmp_path: Path) -> Generator[Any]:
    """The folder, ports and processes of one acceptance test."""
    from acceptance.kit import Site

    with Site(tmp_path) as site:
        yield site


@pytest.fixture
def narrows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Generator[Any]:
    """The command line in an empty folder, without variables of the user's environment."""
    from cli_cases import Narrows

    from narrows.broker.process.service import log

    monkeypatch.chdir(tmp_path)
    for name in ("NARROWS_BROKER", "NARROWS_KEY"):
        monkeypatch.delenv(name, raising=False)
    yield Narrows(capsys, monkeypatch)
    log.filters.clear()


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Generator[None]:
    """Fails a test that leaves a process or a network namespace behind."""
    yield
    _, left = psutil.wait_procs([one for one in started() if not is_server(one)], ENDING_S)
    told = [f"{one.pid}: {' '.join(one.cmdline())[:160]}" for one in left]
    kill(left)
    assert not left, f"the test left processes behind: {told}"
    namespaces = [path.name for path in NAMESPACES.glob(f"narrows-{os.getpid()}-*")]
    assert not namespaces, f"the test left network namespaces behind: {namespaces}"


def started(pid: int | str = "self") -> list[psutil.Process]:
    """Living processes that a process has started, directly or not. psutil would look at all
    processes of the machine, which takes too long around every test."""
    found: list[psutil.Process] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # The thread has just ended.
            for child in path.read_text().split():
                with suppress(psutil.Error):
                    process = psutil.Process(int(child))
                    found += [process] if process.status() != psutil.STATUS_ZOMBIE else []
                found += started(child)
    return found


def is_server(process: psutil.Process) -> bool:
    """True for a helper of Python's multiprocessing, which stays for the whole session. What the
    server of forks has forked has the same command line."""
    with suppress(psutil.Error):
        command = " ".join(process.cmdline())
        return process.ppid() == os.getpid() and any(server in command for server in SERVERS)
    return False


def kill(processes: list[psutil.Process]) -> None:
    for one in processes:
        with suppress(psutil.NoSuchProcess):
            one.kill()
