"""The JSON of a bench: its rows, and the commit and the machine that they come from."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_ABOVE = Path(__file__).resolve().parents
CHECKOUT = next((each for each in _ABOVE if (each / "pyproject.toml").exists()), _ABOVE[0])
"""The checkout that this file lies in; an installed package has none, and names no commit."""


def write(path: Path, bench: str, rows: Sequence[Mapping[str, Any]], seed: int) -> None:
    """Writes {"bench", "commit", "machine", "seed", "rows"}, a row on each line; makes the folder,
    so that no long run is lost for the lack of one. Keys of rows carry units."""
    head = {"bench": bench, "commit": commit(), "machine": machine(), "seed": seed}
    lines = ",\n".join(json.dumps(row) for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{json.dumps(head)[:-1]}, "rows": [\n{lines}\n]}}\n')


def commit() -> str:
    """As `git describe --always --dirty` says it; "" outside a checkout."""
    command = ["git", "describe", "--always", "--dirty"]
    if not (CHECKOUT / ".git").exists():  # Installed, perhaps inside of another repository.
        return ""
    try:
        done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()


def machine() -> dict[str, Any]:
    """Processor, cores, versions: what figures depend on."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "system": platform.platform(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
