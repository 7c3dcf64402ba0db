"""The fixture of the acceptance tests: a folder, ports and processes of one test."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest
from acceptance.kit import Site


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failure shows the processes of the test and what they printed last."""
    report = yield
    site = getattr(item, "funcargs", {}).get("site")
    if report.failed and call.when == "call" and isinstance(site, Site):
        report.sections.append(("processes of the test", site.describe()))
    return report


@pytest.fixture
def site(tmp_path: Path) -> Generator[Site]:
    site = Site(tmp_path)
    try:
        yield site
    finally:
        site.close()
