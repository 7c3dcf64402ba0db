"""The JSON of a bench: its rows, and the commit and the machine that they come from."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

_ABOVE = Path(__file__).resolve().parents
CHECKOUT = next((each for each in _ABOVE if (each / "pyproject.toml").exists()), _ABOVE[0])
"""The checkout that this file lies in; an installed package has none, and names no commit."""


def write(path: Path, name: str, rows: Sequence[Mapping[str, Any]], seed: int) -> None:
    """Writes {"bench", "commit", "machine", "seed", "rows"}, a row on each line; makes the folder,
    so that no long run is lost for the lack of one. Keys of rows carry units."""
    head = {"bench": name, "commit": commit(), "machine": machine(), "seed": seed}
    lines = ",\n".join(json.dumps(row) for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{json.dumps(head)[:-1]}, "rows": [\n{lines}\n]}}\n')


def commit() -> str:
    """As `git describe --always --dirty` says it; "" outside a checkout."""
    command = ["git", "describe", "--always", "--dirty"]
    if (CHECKOUT / ".git").exists():  # Else it is installed, perhaps inside another repository.
        with suppress(OSError):
            done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True)
            return done.stdout.strip()
    return ""


def machine() -> dict[str, Any]:
    """Processor, cores, versions: what figures depend on."""
    described = Path("/proc/cpuinfo")
    text = described.read_text() if described.exists() else ""
    name = re.search("^model name\\s*: (.*)$", text, re.MULTILINE)
    return {
        "processor": name[1] if name else platform.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "system": platform.platform(),
    }
