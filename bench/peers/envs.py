"""Virtual environments of the other systems: pinned, built once, kept.

Their scripts and pinned requirements lie beside this file in a checkout. A wheel does not have
them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from narrows.bench.kit.failures import reason_of
from narrows.bench.kit.names import check_names
from narrows.proto.errors import ErrorCode, NarrowsError

PEERS: Final = ("torchft", "hivemind", "flwr", "ddp")
"""Names of the systems, each also the module that it imports. The exception is `ddp`: it needs only
torch and has no environment of its own."""

CACHE_VARIABLE: Final = "NARROWS_PEER_CACHE"
INDEX_VARIABLE: Final = "TORCH_INDEX"
"""Environment variable with the index for torch alone, as in the Makefile."""

SCRIPTS: Final = Path(__file__).resolve().parent / "scripts"
REQUIREMENTS: Final = Path(__file__).resolve().parent / "requirements"
BUILD_TIMEOUT_S: Final = 1800.0
IMPORT_TIMEOUT_S: Final = 120.0


class PeerAbsent(NarrowsError):
    """Another system cannot be had here; a bench leaves it out and says why."""

    def __init__(self, name: str, reason: str, *, remedy: str = "") -> None:
        self.name = name
        super().__init__(ErrorCode.CONFIG, f"no environment for {name}", got=reason, remedy=remedy)


def environment(name: str, cache: Path | None = None) -> Path:
    """Python of the environment of one of PEERS; builds it if it is missing or out of date.

    `cache`: folder of all environments, by default $NARROWS_PEER_CACHE or ~/.cache/narrows/peers.
    Raises ConfigError for an unknown name, PeerAbsent if it cannot be built or does not import.
    """
    check_names("system", [name], PEERS)
    if not SCRIPTS.is_dir():
        raise _no_checkout(name, SCRIPTS)
    if name == "ddp":
        _check(name, Path(sys.executable), "torch.distributed")
        return Path(sys.executable)
    folder = (cache or cache_folder()) / name
    python, ready = folder / "bin" / "python", folder / ".ready"
    pinned = requirements(name)
    wanted = pinned.read_text()
    if not ready.exists() or ready.read_text() != wanted:
        _build(name, folder, pinned)
        _check(name, python, name)
        # Last, so that an interrupted build is done again.
        ready.write_text(wanted)
    return python


def requirements(name: str) -> Path:
    """The pinned requirements of one system. Raises PeerAbsent outside a checkout."""
    path = REQUIREMENTS / f"{name}.txt"
    if not path.exists():
        raise _no_checkout(name, path)
    return path


def _no_checkout(name: str, missing: Path) -> PeerAbsent:
    remedy = "other systems are measured from a checkout: git clone, then make venv"
    return PeerAbsent(name, f"{missing} is not there", remedy=remedy)


def cache_folder() -> Path:
    """Folder of the environments, unless the caller names another."""
    named = os.environ.get(CACHE_VARIABLE)
    return Path(named) if named else Path.home() / ".cache" / "narrows" / "peers"


def install_commands(python: Path, pinned: Path, torch_index: str) -> list[list[str]]:
    """Commands that install torch first and alone, because `torch_index` may have little else, and
    then the rest."""
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    index = ["--index-url", torch_index] if torch_index else []
    torch = next(line for line in pinned.read_text().splitlines() if line.startswith("torch=="))
    return [
        [*pip, "--no-deps", *index, torch],
        [*pip, "--requirement", str(pinned)],
    ]


def _build(name: str, folder: Path, pinned: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    print(f"building the environment of {name} in {folder}", file=sys.stderr, flush=True)
    _run(name, [sys.executable, "-m", "venv", "--clear", str(folder)], BUILD_TIMEOUT_S)
    index = os.environ.get(INDEX_VARIABLE, "")
    for command in install_commands(folder / "bin" / "python", pinned, index):
        _run(name, command, BUILD_TIMEOUT_S)


def _check(name: str, python: Path, module: str) -> None:
    # -P as everywhere: at the root of a checkout `proto` is not the module of that name.
    _run(name, [str(python), "-P", "-c", f"import torch, {module}"], IMPORT_TIMEOUT_S)


def _run(name: str, command: list[str], timeout_s: float) -> None:
    """Runs a command. Raises PeerAbsent with the end of its output."""
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    try:
        result = subprocess.run(
            command, env=variables, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerAbsent(name, str(error), remedy=_REMEDY) from None
    if result.returncode:
        said = result.stdout + result.stderr
        log = Path(tempfile.mkdtemp(prefix="narrows-failed-")) / f"{name}.log"
        log.write_text(said)
        raise PeerAbsent(name, f"{reason_of(said)}; its log: {log}", remedy=_REMEDY)


_REMEDY: Final = (
    "a package index must be in reach and have wheels for this Python and platform; TORCH_INDEX"
    " names one for torch, NARROWS_PEER_CACHE a folder with environments built elsewhere"
)
