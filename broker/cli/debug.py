"""`narrows debug`: a message of the wire in readable form."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from narrows.proto.errors import ConfigError
from narrows.proto.messages import CONTROL_BYTES_MAX
from narrows.proto.wire import ENVELOPE, decode_control, decode_header


def debug(what: Literal["frame"], file: Path, /, *, header: bool = False) -> None:
    """Print a control message, or the header of a data message, as JSON.

    Args:
        what: `frame`.
        file: File with the bytes of one frame: the body of a control message.
        header: The bytes are the header of a data message.
    """
    try:
        body = file.read_bytes()
    except OSError as error:
        expected, remedy = "a file with one frame", "Correct the path"
        raise ConfigError(f"{file}", expected=expected, got=str(error), remedy=remedy) from error
    message = decode_header(body) if header else decode_control([ENVELOPE, body], CONTROL_BYTES_MAX)
    print(msgspec.json.format(msgspec.json.encode(message)).decode())
