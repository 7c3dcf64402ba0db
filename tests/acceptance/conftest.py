"""The fixture of the acceptance tests: a folder, ports and processes of one test."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest
from acceptance.kit import Site


@pytest.fixture
def site(tmp_path: Path) -> Generator[Site]:
    site = Site(tmp_path)
    yield site
    site.close()
