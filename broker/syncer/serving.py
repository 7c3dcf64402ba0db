"""Checks what learners fetch: publications that they missed, and states."""

from __future__ import annotations

from narrows.broker.syncer.state import State, fault
from narrows.proto import messages as msg
from narrows.proto.errors import RemoteProtocolError


def check(state: State, fetch: msg.Fetch) -> None:
    """Raises RemoteProtocolError for what cannot be answered.

    A publication that is no longer kept is the host's business: it answers with the state.
    """
    is_state = fetch.kind is msg.DataKind.STATE
    if not is_state and fetch.kind is not msg.DataKind.PUBLICATION:
        raise _bad("kind", "PUBLICATION or STATE", fetch.kind.name, "push and seed go up only")
    if not state.is_open:
        raise _bad("time", "a Fetch after version 0", "one before it", "wait for role adopt")
    count, asked = len(state.heads), sum(count for _, count in fetch.chunks)
    if fetch.fragment >= count:
        raise _bad("fragment", f"0 to {count - 1}", str(fetch.fragment), "cut as Welcome tells")
    head, least = state.heads[fetch.fragment], 0 if is_state else 1
    if not least <= fetch.version <= head:
        expected = f"{least} to {head}" if head >= least else "a STATE: nothing is published yet"
        raise _bad("version", expected, str(fetch.version), "ask for what the last Beat names")
    chunks = (state.state_chunks if is_state else state.push_chunks)[fetch.fragment]
    end = max(first + count for first, count in fetch.chunks)
    if end > chunks:
        raise _bad("chunks", f"0 to {chunks - 1}", f"up to {end - 1}", "cut as Welcome tells")
    if asked > (window := state.settings.window_messages):
        raise _bad("chunks", f"at most {window} at a time", str(asked), "ask again as they come")


def _bad(field: str, expected: str, got: str, remedy: str) -> RemoteProtocolError:
    return fault(f"Fetch: {field}", expected, got, remedy)
