"""The rules of the gate for every test, options of the suite, and data for its processes.

A test may not outlast its time limit, and may leave no process, port or network namespace behind.
A test over real processes (marker `real`) may run once more after a failure; the summary names it
as FLAKY, and more than FLAKY_MAX of them make the run red.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from contextlib import suppress
from functools import partial
from pathlib import Path

import hypothesis
import leftovers
import pytest

SEEDS_PER_TEST = 10
FLAKY_MAX = 2
NEVER_BY_CHANCE = (r"^Failed: Timeout \(", r"^AssertionError: the test left ")
"""Failures after which a test does not run again. The time limit holds once for both runs of it."""


def pytest_configure(config: pytest.Config) -> None:
    # A shell starts what runs in the background with SIGINT ignored, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(FlakyTests(), "flaky-tests")
        if config.getoption("numprocesses", default=None):
            compile_kernels()
        leftovers.mark(leftovers.SESSION)
    leftovers.mark(leftovers.WORKER)
    # The same examples in every run, and no limit on the time of one: neither the random numbers
    # nor a busy machine decide.
    hypothesis.settings.register_profile(
        "gate",
        derandomize=True,
        deadline=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.register_profile("random", deadline=None)
    hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "gate"))


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """A worker that died could not clean up: nothing outlives the session."""
    if not hasattr(config, "workerinput"):
        for pid in leftovers.marked(leftovers.SESSION, with_servers=True):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def compile_kernels() -> None:
    """Fills numba's cache before the workers start: three would compile the same kernels at once,
    and the first tests would take a minute."""
    from narrows.broker.merging import warm_up

    warm_up()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seeds", type=int, default=100, help="simulated runs with faults")
    parser.addoption("--first-seed", type=int, default=0, help="seed of the first of them")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests that take `seeds` get them in blocks."""
    if "seeds" in metafunc.fixturenames:
        first = int(str(metafunc.config.getoption("--first-seed")))
        count = int(str(metafunc.config.getoption("--seeds")))
        seeds = range(first, first + count)
        blocks = [seeds[i : i + SEEDS_PER_TEST] for i in range(0, count, SEEDS_PER_TEST)]
        metafunc.parametrize("seeds", blocks, ids=[f"{b[0]}-{b[-1]}" for b in blocks])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "site" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.real)
        if item.get_closest_marker("real"):
            item.add_marker(pytest.mark.flaky(reruns=1, rerun_except=list(NEVER_BY_CHANCE)))


class FlakyTests:
    """Counts the tests that failed once and then passed."""

    def __init__(self) -> None:
        self.reruns: dict[str, str] = {}
        """First failure of each test that ran once more, by test."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome == "rerun":  # type: ignore[comparison-overlap]
            lines = report.longreprtext.splitlines()
            reasons = [line[1:].strip() for line in lines if line.startswith("E ")]
            self.reruns[report.nodeid] = reasons[0] if reasons else "no reason"

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if len(self.reruns) > FLAKY_MAX and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for test, reason in self.reruns.items():
            terminalreporter.write_line(f"FLAKY {test} -- {reason}", yellow=True)
        if len(self.reruns) > FLAKY_MAX:
            terminalreporter.write_line(
                f"{len(self.reruns)} flaky tests, at most {FLAKY_MAX} are allowed", red=True
            )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that outlasts its time limit shows the processes that it had started."""
    report = yield
    if report.failed and "Timeout" in report.longreprtext:
        report.sections.append(("processes at the time limit", _started()))
    return report


def _started() -> str:
    return leftovers.describe(leftovers.marked(leftovers.WORKER)) or "  none"


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Generator[None]:
    """Fails a test that leaves a process, a listening port or a network namespace behind."""
    is_real = request.node.get_closest_marker("real") is not None
    look = partial(leftovers.marked, leftovers.WORKER) if is_real else leftovers.children
    processes, namespaces = look(), leftovers.namespaces()
    ports = leftovers.listening() if is_real else set[str]()
    yield
    left = leftovers.staying(look() - processes)
    told = leftovers.describe(left)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert not left, f"the test left processes behind:\n{told}"
    new_ports = leftovers.listening() - ports if is_real else set()
    assert not new_ports, f"the test left listening ports behind: {sorted(new_ports)}"
    new = leftovers.namespaces() - namespaces
    assert not new, f"the test left network namespaces behind: {sorted(new)}"


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small text that is quick to load, the same for all learners."""
    folder = tmp_path_factory.mktemp("data")
    for index in range(40):
        lines = (f"{index} times {n} is {index * n}, says file {index}." for n in range(400))
        (folder / f"table-{index}.txt").write_text("\n".join(lines))
    return folder
