"""Any message within the bounds of its types, and damage to its bytes: for tests of frames."""

from __future__ import annotations

from typing import Any, get_args

from hypothesis import strategies as st
from msgspec import inspect

from narrows.proto import messages as msg
from narrows.proto.frames import MAGIC, digest
from narrows.proto.limits import PROTOCOL

WORDS = 20
"""Longest generated text and sequence: small messages find the same bugs sooner."""


def values(kind: inspect.Type) -> st.SearchStrategy[Any]:
    """All values of a field of this type, within its bounds; no NaN, which equals nothing."""
    match kind:
        case inspect.IntType(ge=least, le=most):
            return st.integers(-(2**63) if least is None else least, most or 2**64 - 1)
        case inspect.FloatType(ge=least, le=most):
            return st.floats(least, most, allow_nan=False)
        case inspect.StrType(pattern=str(pattern)):
            return st.from_regex(pattern)
        case inspect.StrType():
            return st.text(max_size=WORDS)
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
        case inspect.UnionType(types=types):
            return st.one_of(*map(values, types))
        case inspect.EnumType(cls=cls):
            return st.sampled_from(list(cls))
        case inspect.LiteralType(values=literals):
            return st.sampled_from(literals)
        case inspect.TupleType(item_types=items):
            return st.tuples(*map(values, items))
        case inspect.VarTupleType(item_type=item):
            return st.lists(values(item), max_size=4).map(tuple)
        case inspect.DictType():
            return st.dictionaries(st.text(max_size=WORDS), st.integers(0, 9), max_size=4)
        case inspect.StructType(cls=cls):
            return any_of(cls)
        case _:
            raise AssertionError(kind)


def any_of(struct: type[Any]) -> st.SearchStrategy[Any]:
    info = inspect.type_info(struct)
    assert isinstance(info, inspect.StructType)
    return st.builds(struct, **{field.name: values(field.type) for field in info.fields})


CONTROL: tuple[type[Any], ...] = get_args(msg.ControlMessage)
controls: st.SearchStrategy[msg.ControlMessage] = st.one_of(*map(any_of, CONTROL))


@st.composite
def mutated(draw: st.DrawFn, source: st.SearchStrategy[bytes]) -> bytes:
    """A few places where bytes are taken out and others put in; perhaps cut off."""
    data = bytearray(draw(source))
    for _ in range(draw(st.integers(1, 4))):
        at, removed = draw(st.integers(0, len(data))), draw(st.integers(0, 9))
        data[at : at + removed] = draw(st.binary(max_size=3) | source.map(lambda other: other[:9]))
    return bytes(data[: draw(st.none() | st.integers(0, len(data)))])


def seal(body: bytes, version: int = PROTOCOL) -> bytes:
    """An envelope around a body, as PROTOCOL.md describes it."""
    return MAGIC + bytes([version]) + digest(body).to_bytes(8, "little") + body
