"""`narrows debug frame`: a message of the wire in readable form, and whether Narrows accepts it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgpack

from narrows.proto.errors import ConfigError, fault
from narrows.proto.messages import CONTROL_BYTES_MAX
from narrows.proto.wire import ENVELOPE, decode_control, decode_header


def frame(file: Path, /, *, header: bool = False) -> None:
    """Print a control message, or the header of a data message, as JSON.

    Another decoder than that of the wire reads it, so also what is no message of Narrows is shown.
    The reason why Narrows refuses it follows as an error, with exit code 1.

    Args:
        file: File with the bytes of one frame: the body of a control message.
        header: The bytes are the header of a data message.
    """
    try:
        body = file.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{file}",
            expected="a file with one frame",
            got=error.strerror or str(error),
            remedy="correct the path",
        ) from error
    try:
        shown = msgpack.unpackb(body, strict_map_key=False, object_pairs_hook=_named)
        print(json.dumps(shown, indent=2, default=repr))
    # RecursionError: arrays within arrays, which JSON nests less deeply.
    except (ValueError, RecursionError, msgpack.UnpackException) as error:
        raise fault("frame", expected="one MessagePack value", got=error) from error
    if header:
        decode_header(body)
    else:
        decode_control([ENVELOPE, body], CONTROL_BYTES_MAX)


def _named(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
    """A map as JSON has it: a key that is no text becomes one."""
    return {key if isinstance(key, str) else repr(key): value for key, value in pairs}
