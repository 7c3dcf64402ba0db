"""What crosses the wire, and what both of its ends share: PROTOCOL.md as code."""
