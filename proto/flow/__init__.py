"""The pace of a sender, and the reassembly at the other end. [pure]

`Budget` says when the next message may leave under a bit rate, and `wire_bytes` what it costs.
`Outbox` orders the messages to one peer and limits them by credit. `Assembly` notes which elements
of a transfer have arrived. `Patience`, `Way` and `Flow` say how long to wait for a peer, by what is
usual for it. Both sides import these names from here; the modules are their own business. Nothing
in here reads a clock: every `now` is an argument, in seconds of the caller's monotonic clock.
"""

from narrows.proto.flow.assembly import Arrival, Assembly, chunks_max, touches
from narrows.proto.flow.budget import (
    SEGMENT_BYTES,
    SEGMENT_OVERHEAD_BYTES,
    SHARE_USED,
    Budget,
    chunk_elements,
    least_chunk_elements,
    message_bytes,
    wire_bytes,
)
from narrows.proto.flow.hub import Hub
from narrows.proto.flow.path import ACKNOWLEDGE_BYTES
from narrows.proto.flow.patience import (
    STATE_BYTES,
    USUAL_RATIO_MAX,
    Flow,
    Patience,
    Way,
    push_bytes_max,
)
from narrows.proto.flow.sender import Datagram, Parcel, Sender

__all__ = [
    "ACKNOWLEDGE_BYTES",
    "SEGMENT_BYTES",
    "SEGMENT_OVERHEAD_BYTES",
    "SHARE_USED",
    "STATE_BYTES",
    "USUAL_RATIO_MAX",
    "Arrival",
    "Assembly",
    "Budget",
    "Datagram",
    "Flow",
    "Hub",
    "Parcel",
    "Patience",
    "Sender",
    "Way",
    "chunk_elements",
    "chunks_max",
    "least_chunk_elements",
    "message_bytes",
    "push_bytes_max",
    "touches",
    "wire_bytes",
]
