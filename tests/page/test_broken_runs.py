"""Broken runs, of which the page's one sentence says what is wrong and what to do.

A real broker and real learners; the page needs 30 s of evidence. A line is cut by a proxy that
carries nothing more in one direction of one port, as a firewall does that drops packets.
"""

import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Final, NamedTuple

import pytest
from acceptance import toy
from acceptance.kit import Site
from acceptance.test_line import PUBLICATIONS, PUSHES, Direction, Proxy
from page.test_browser import Shown
from playwright.sync_api import Browser, expect

SETTLED_MS: Final = 90_000
"""30 s of evidence, and what a busy machine takes for the rest."""

STEP_S: Final = 0.05
PERIOD: Final = "fragments.sync_period_steps=10"
"""A version of one of the four fragments is due each 0.13 s."""

SLOW_S: Final = 1
SLOW_C: Final = f"""
#include <unistd.h>
#include <sys/syscall.h>
int fdatasync(int file) {{ sleep({SLOW_S}); return syscall(SYS_fdatasync, file); }}
int fsync(int file) {{ sleep({SLOW_S}); return syscall(SYS_fsync, file); }}
"""
"""A disk that takes its time, for a process that loads this before the C library."""


def start(site: Site, *names: str, **options: object) -> None:
    """Starts these learners, and waits until each has contributed."""
    for seed, name in enumerate(names):
        site.learner(name, seed=seed, step_s=STEP_S, **options)
    site.contribute(*names)


def line_is_cut(site: Site, port: int, direction: Direction) -> None:
    """One of three learners stands behind a line of which one direction brings nothing more."""
    site.broker(PERIOD)
    proxy = site.stack.enter_context(Proxy(site.port))
    site.learner("site-b", broker=proxy.address, step_s=STEP_S)
    start(site, "site-a", "site-c")
    site.contribute("site-b")
    site.adopt("site-b")
    proxy.held.add((port, direction))


def line_up_is_cut(site: Site) -> None:
    line_is_cut(site, PUSHES, "up")


def line_down_is_cut(site: Site) -> None:
    line_is_cut(site, PUBLICATIONS, "down")


def disk_is_slow(site: Site) -> None:
    source = site.folder / "slow.c"
    source.write_text(SLOW_C)
    library = source.with_suffix(".so")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    site.shell(
        "broker", "env", f"LD_PRELOAD={library}", sys.executable, "-m", "narrows", "broker",
        "--listen", site.address, "--state-dir", str(site.state),
        "--events", str(site.folder / "broker.jsonl"), "--set", PERIOD,
    )  # fmt: skip
    for seed, name in enumerate(("site-a", "site-b")):
        site.learner(name, seed=seed, step_s=STEP_S)


def budget_is_too_small(site: Site) -> None:
    site.broker(PERIOD, "wan.total_up=200 kbit/s")
    start(site, "site-a", "site-b", width=240)


def model_is_another(site: Site) -> None:
    """A supervisor starts it again and again."""
    site.broker(PERIOD)
    start(site, "site-a", "site-b")
    options = {"broker": site.address, "width": 64}
    site.fork("site-c", toy.insist, site.folder, "site-c", **options)


def everybody_evaluates(site: Site) -> None:
    site.broker(PERIOD)
    start(site, "site-a", "site-b", pause_at=40)


def quorum_is_out_of_reach(site: Site) -> None:
    site.broker(PERIOD, "merge.quorum=3")
    start(site, "site-a", "site-b")


def one_of_a_quorum_is_gone(site: Site) -> None:
    site.broker(PERIOD, "merge.quorum=3")
    start(site, "site-a", "site-b", "site-c")
    site.running["site-c"].kill()


def budget_down_is_too_small(site: Site) -> None:
    site.broker(PERIOD, "wan.total_down=200 kbit/s")
    start(site, "site-a", "site-b", width=240)


class Broken(NamedTuple):
    """A way to break a run, and the decisive words of the sentence and of the remedy."""

    breaks: Callable[[Site], None]
    sentence: tuple[str, ...]
    remedy: str
    lane: str = ""
    """Words of a lane and of what happened."""


CASES: Final = {
    "up": Broken(
        line_up_is_cut, ("Nothing has come up from site-b for",), "uplink port", "line up cut"
    ),
    "down": Broken(
        line_down_is_cut, ("No version has reached site-b for",), "downlink port", "line down cut"
    ),
    "disk": Broken(disk_is_slow, ("disk is slow",), "faster disk"),
    "budget": Broken(
        budget_is_too_small, ("budget of the line up has been used up",), "wan.total_up"
    ),
    "model": Broken(
        model_is_another, ("site-c was refused", "model is not the run's"), "same model"
    ),
    "down budget": Broken(
        budget_down_is_too_small, ("line down has been used up",), "wan.total_down"
    ),
    "gone": Broken(
        one_of_a_quorum_is_gone, ("site-c has not been heard", "fewer than the quorum"), "process"
    ),
    "evaluating": Broken(
        everybody_evaluates, ("Nobody has trained", "(evaluating)"), "Nothing, if"
    ),
    "quorum": Broken(quorum_is_out_of_reach, ("quorum of 3",), "lower merge.quorum"),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_the_page_says_what_is_wrong_and_what_to_do(
    site: Site, browser: Browser, case: Broken
) -> None:
    if case.breaks is disk_is_slow and not shutil.which("cc"):
        pytest.skip("a slow disk needs a C compiler")
    case.breaks(site)
    shown = Shown(browser, site.page(), "wide", "light")
    sentence = shown.page.locator("#sentence")
    for words in case.sentence:
        expect(sentence).to_contain_text(words, timeout=SETTLED_MS)
    shown.reads("#remedy", case.remedy)
    for place in ("#lanes", "#notices"):
        shown.reads(place, case.lane)
    shown.check()
