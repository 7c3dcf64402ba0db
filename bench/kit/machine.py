"""The JSON that a bench writes: its results, and the commit and machine of the run."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_result(path: Path | None, bench: str, fields: Mapping[str, Any]) -> None:
    """Writes the results of a bench to `path`, if there is one. Makes the folder, so that no run is
    lost."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        result = {"bench": bench, **describe(), **fields}
        path.write_text(json.dumps(result, indent=1) + "\n")


def describe() -> dict[str, Any]:
    """`commit` ("" outside a checkout) and `machine`."""
    return {
        "commit": _commit(),
        "machine": {
            "processor": _processor(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "system": platform.platform(),
        },
    }


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    folder = Path(__file__).resolve().parents[2]
    if not (folder / ".git").exists():  # Installed, perhaps inside of another repository.
        return ""
    try:
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return result.stdout.strip()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
