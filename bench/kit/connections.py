"""TCP connections of a process, as the kernel lists them (Linux)."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_ESTABLISHED: Final = "01"


def established(pid: int) -> set[tuple[str, str]]:
    """(near end, far end) of the established IPv4 connections of a process."""
    inodes: set[str] = set()
    for each in Path(f"/proc/{pid}/fd").iterdir():
        try:
            name = str(each.readlink())
        except FileNotFoundError:  # It was closed meanwhile.
            continue
        if name.startswith("socket:["):
            inodes.add(name[8:-1])
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {(row[1], row[2]) for row in rows if row[3] == _ESTABLISHED and row[9] in inodes}
