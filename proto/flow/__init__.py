"""The flow of data messages: what the line may carry, what leaves next, what is missing."""

from narrows.proto.flow.budget import Budget, wire_bytes
from narrows.proto.flow.quota import Quota
from narrows.proto.flow.sender import Entry, Sender
from narrows.proto.flow.transfer import Transfer

__all__ = ["Budget", "Entry", "Quota", "Sender", "Transfer", "wire_bytes"]
