"""Shows a learner that joins what its data connections do."""

from __future__ import annotations

from narrows.learner.session import DataConnection, DataConnections
from narrows.learner.transport.datapath import DataPath
from narrows.learner.transport.sockets import LearnerSockets
from narrows.proto.codec import STATE_CODEC
from narrows.proto.flow import chunk_elements


def connections_of(
    wires: LearnerSockets, data_path: DataPath, *, waits: bool
) -> DataConnections | None:
    """The data connections, None before they are dialled; `waits`: something is to come down."""
    settings, sender = data_path.settings, data_path.sender
    if settings is None:
        return None
    up_port, down_port = wires.ports
    came_bytes = data_path.counters.data_down_bytes
    return DataConnections(
        DataConnection(up_port, wires.uplink_open, not sender.is_idle, sender.told_bytes),
        DataConnection(down_port, wires.downlink_open, waits, came_bytes),
        4 * chunk_elements(settings, STATE_CODEC),
    )
