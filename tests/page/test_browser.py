"""The page in a real browser (Debian's Chromium, headless), beside a real broker and learners.

`make test-page` runs it; --picture FILE keeps the picture of a run with a killed learner.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import axe_playwright_python
import pytest
from acceptance.kit import Site
from playwright.sync_api import Browser, Page, expect, sync_playwright

from narrows.bench.kit.processes import wait_until

AXE = (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text()
SIZES = {"wide": (1400, 900), "phone": (390, 844)}
FLAGS = (
    "--no-sandbox --disable-gpu --disable-background-networking --disable-component-update"
    " --disable-sync --no-first-run"
)
PATIENCE_MS = 30_000
COLOUR_SCHEMES: dict[str, Any] = {each: each for each in ("light", "dark")}


@pytest.fixture
def browser() -> Generator[Browser]:
    executable = shutil.which("chromium") or shutil.which("google-chrome")
    assert executable, "there is no Chromium: install Debian's package chromium"
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=executable, args=FLAGS.split())


class Shown:
    """The page as one viewer sees it; at the end nothing may have gone wrong in his browser."""

    def __init__(self, browser: Browser, address: str, size: str, scheme: str) -> None:
        width, height = SIZES[size]
        context = browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme=COLOUR_SCHEMES[scheme],
            bypass_csp=True,
        )
        self.page: Page = context.new_page()
        self.page.set_default_timeout(PATIENCE_MS)
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(address)
        self.address = address

    def reads(self, selector: str, *words: str) -> None:
        """Returns once the element says these words."""
        for each in words:
            expect(self.page.locator(selector)).to_contain_text(each, timeout=PATIENCE_MS)

    def check(self) -> None:
        """No error, no request to another host, nothing that axe-core finds, no sideways scroll."""
        assert self.said == []
        assert [url for url in self.asked if not url.startswith(self.address)] == []
        self.page.evaluate(AXE)
        found = self.page.evaluate("axe.run({runOnly: ['wcag2a', 'wcag2aa']})")
        assert [(each["id"], each["nodes"][0]["html"]) for each in found["violations"]] == []
        assert self.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def seconds(page: Page, happens: Callable[[], None], selector: str, word: str) -> float:
    """Seconds from an event to the moment when an element shows a word, by the browser's clock."""
    began: float = page.evaluate("performance.now()")
    happens()
    page.wait_for_function(
        "([selector, word]) => document.querySelector(selector).textContent.includes(word)",
        arg=[selector, word],
        polling="raf",
        timeout=PATIENCE_MS,
    )
    return float(page.evaluate("performance.now()") - began) / 1000


@pytest.mark.timeout(240)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_run_is_seen_from_the_first_learner_to_a_broker_that_returns(
    site: Site, browser: Browser, scheme: str
) -> None:
    broker = site.broker("wan.total_up=20 Mbit/s", "wan.total_down=20 Mbit/s")
    address = site.page()
    wide = Shown(browser, address, "wide", scheme)
    phone = Shown(browser, address, "phone", scheme)
    wide.reads("#sentence", "Nobody is here yet")
    wide.check()

    site.learner("site-a", seed=1)
    victim = site.learner("site-b", seed=2)
    site.contribute("site-a", "site-b", count=20)
    for shown in (wide, phone):
        shown.reads("#lanes", "site-a", "site-b", "steps/s")
        shown.reads("#figures", "learners training2 of 2")
        shown.check()

    lane = ".lane:nth-child(2)"
    wide.reads(lane, "site-b")
    kill_s = seconds(wide.page, victim.kill, lane, "silent")
    wide.reads("#notices", "site-b: silent")
    wide.reads("#sentence", "site-b has not been heard", "the other trains on")
    site.contribute("site-a", count=10)
    for shown in (wide, phone):
        shown.check()
    gone_s = seconds(wide.page, broker.kill, "#sentence", "has not answered")
    with pytest.raises(OSError, match="503"):
        urlopen(f"{address}/healthz")
    for shown in (wide, phone):
        shown.reads("#sentence", "has not answered")
        shown.check()
    site.broker("wan.total_up=20 Mbit/s", "wan.total_down=20 Mbit/s")
    site.contribute("site-a")
    for shown in (wide, phone):
        shown.reads("#notices", "the broker is back")
        shown.reads("#figures", "learners training1 of 1")
        shown.check()
    print(f"a killed learner is seen after {kill_s:.1f} s, a killed broker after {gone_s:.1f} s")


@pytest.mark.timeout(600)
def test_a_picture_of_the_demo_is_taken_while_a_learner_is_dead(
    site: Site, browser: Browser, request: pytest.FixtureRequest
) -> None:
    picture = request.config.getoption("--picture")
    if picture is None:
        pytest.skip("--picture FILE takes the picture of the documents, in some minutes")
    log = site.folder / "demo.log"
    with log.open("w") as output:
        # BROWSER is a program that opens nothing.
        demo = subprocess.Popen(
            [sys.executable, "-m", "narrows", "demo", "--page", "--plain"],
            stdout=output, stderr=output, env={**os.environ, "BROWSER": "true"},
        )  # fmt: skip
    try:
        wait_until(lambda: "http://" in log.read_text(), "the page's address", timeout_s=200)
        address = log.read_text().partition("The page of this run is at ")[2].split()[0]
        shown = Shown(browser, address, "wide", "light")
        sentence = shown.page.get_by_text("site-b has not been heard for 1")
        expect(sentence).to_be_visible(timeout=400_000)
        shown.page.screenshot(path=picture, full_page=True)
    finally:
        demo.send_signal(signal.SIGTERM)
        assert demo.wait(60) == 130


def test_the_page_ends_by_a_signal_while_somebody_looks(site: Site, browser: Browser) -> None:
    site.broker()
    address = site.page()
    shown = Shown(browser, address, "wide", "light")
    shown.reads("#sentence", "Nobody is here yet")
    site.running["page"].signal(signal.SIGTERM)
    shown.reads("#sentence", "The server of this page does not answer")
    site.running["page"].ends(0, -signal.SIGTERM)


def test_metrics_are_served_in_the_format_of_prometheus(site: Site) -> None:
    site.broker()
    address = site.page()

    def text() -> Any:
        return urlopen(f"{address}/metrics").read().decode()

    wait_until(lambda: "narrows_up 1.0" in text(), "an answer of the broker")
    assert "narrows_goal_tokens" in text() and "# HELP narrows_up " in text()
