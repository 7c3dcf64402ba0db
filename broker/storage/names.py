"""The names in a state directory: a generation of a checkpoint is a folder, a segment a file."""

from __future__ import annotations

import os
import re
import stat
from contextlib import suppress
from typing import Final

from narrows.broker.storage.durable_files import directory

_GENERATION: Final = re.compile(r"checkpoint-([0-9]{8,18})")
_SEGMENT: Final = re.compile(r"journal-([0-9]{8,18})\.log")
_LEFTOVER: Final = re.compile(r"\.(new|old)-[a-z0-9.-]+")
_OWN_FILE: Final = re.compile(r"manifest\.json|seal\.json|fragment-[0-9]{5,}\.safetensors")
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


def segment_name(number: int) -> str:
    """Name of a segment's file."""
    return f"journal-{number:08d}.log"


def segment_number(name: str) -> int:
    """The inverse of `segment_name`; 0: not a segment's name."""
    match = _SEGMENT.fullmatch(name)
    return int(match[1]) if match and segment_name(int(match[1])) == name else 0


def remove_leftovers(directory_fd: int) -> None:
    """Removes the remains of an interrupted save. Files with odd names stay: they do no harm."""
    for name in filter(_LEFTOVER.fullmatch, os.listdir(directory_fd)):
        with suppress(OSError):
            if not stat.S_ISDIR(os.lstat(name, dir_fd=directory_fd).st_mode):
                os.unlink(name, dir_fd=directory_fd)
                continue
            with directory(directory_fd, name) as fd:
                for file in filter(_OWN_FILE.fullmatch, os.listdir(fd)):
                    os.unlink(file, dir_fd=fd)
            os.rmdir(name, dir_fd=directory_fd)
