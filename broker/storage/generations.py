"""The names of checkpoints: each is a generation with a number, in a folder of its own."""

from __future__ import annotations

import os
import re
from typing import Final

_GENERATION: Final = re.compile(r"checkpoint-([0-9]{8,18})")
_NUMBER: Final = re.compile(r"\bcheckpoint-([0-9]{8,18})\b")


def generations_in(directory_fd: int) -> list[int]:
    """Numbers of the generations in a state directory, newest first."""
    matches = map(_GENERATION.fullmatch, os.listdir(directory_fd))
    return sorted((int(match[1]) for match in matches if match), reverse=True)


def next_generation(directory_fd: int) -> int:
    """A number above those of all generations, unfinished and removed ones too."""
    return max(map(int, _NUMBER.findall(" ".join(os.listdir(directory_fd)))), default=0) + 1


def generation_name(number: int) -> str:
    """Name of a generation's folder."""
    return f"checkpoint-{number:08d}"
