"""The header of a data message as a frozen struct.

PROTOCOL.md is the specification; this file is its Python form and changes with it.
"""

from __future__ import annotations

from msgspec import Struct

from narrows.proto.terms import (
    Codec,
    Count,
    DataKind,
    Elements,
    Epoch,
    Stream,
    Text,
    Version,
)


class Header(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Header of a data message, a msgpack array in this order."""

    protocol: int
    run_id: Text
    epoch: Epoch
    kind: DataKind
    learner: Text
    incarnation: Text
    """The learner's, on the uplink and on the downlink."""
    fragment: Count
    version: Version
    """PUSH: base version. FOUND: 0. PUBLICATION, STATE: the version that results."""
    push_id: Count
    """PUSH: its id. PUBLICATION, STATE: the addressee's last merged push of the fragment."""
    offset: Elements
    """First element of this chunk within the fragment."""
    count: Elements
    """Elements in this chunk."""
    codec: Codec
    payload_digest: int
    """xxh3_64 of the payload frame."""
    result_digest: int
    """PUBLICATION, STATE: xxh3_64 of the published copy at `version`; else 0."""
    stream: Stream
    position: Count
    """Payload bytes sent on this stream so far, this message included."""
