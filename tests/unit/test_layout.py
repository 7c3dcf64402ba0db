"""Layouts: the refusals, and the text of differences."""

from __future__ import annotations

import msgspec
import pytest

from narrows.proto.errors import ErrorCode, RemoteProtocolError
from narrows.proto.layout import check_layout, differences, element_count
from narrows.proto.limits import DIMENSIONS_MAX, ELEMENTS_MAX, TENSOR_NAME_CHARACTERS_MAX
from narrows.proto.messages import LayoutEntry

EMBEDDING = LayoutEntry("embedding.weight", (16, 8), "bfloat16", "mean")
WEIGHT = LayoutEntry("block.0.weight", (8, 8), "bfloat16", "rda")
BIAS = LayoutEntry("block.0.bias", (8,), "float32", "mean")
SCALAR = LayoutEntry("temperature", (), "float32", "mean")
LAYOUT = (EMBEDDING, WEIGHT, BIAS, SCALAR)


def entry(name: str = "w", shape: tuple[int, ...] = (2, 3)) -> LayoutEntry:
    return LayoutEntry(name, shape, "float32", "rda")


def test_a_scalar_has_one_element() -> None:
    assert [element_count(each) for each in LAYOUT] == [128, 64, 8, 1]


def test_element_counts_do_not_wrap() -> None:
    assert element_count(entry(shape=(1 << 33, 1 << 33))) == 1 << 66


@pytest.mark.parametrize(
    "layout",
    [
        LAYOUT,
        (SCALAR,),
        (entry("a" * TENSOR_NAME_CHARACTERS_MAX),),
        (entry(shape=(1,) * DIMENSIONS_MAX),),
        (entry(shape=(ELEMENTS_MAX,)),),
        (entry("módulo.weight"),),
    ],
)
def test_accepted(layout: tuple[LayoutEntry, ...]) -> None:
    check_layout(layout)


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        ((), "tensors"),
        ((entry(""),), "tensor name"),
        ((entry("a" * (TENSOR_NAME_CHARACTERS_MAX + 1)),), "tensor name"),
        ((entry("a\nb"),), "tensor name"),
        ((entry("a\x1b[31m"),), "tensor name"),
        ((entry("a"), entry("b"), entry("a")), "'a' twice"),
        ((entry(shape=(2, 0)),), "sizes of at least 1"),
        ((entry(shape=(2, -1)),), "sizes of at least 1"),
        ((entry(shape=(1,) * (DIMENSIONS_MAX + 1)),), "dimensions"),
        ((entry(shape=(ELEMENTS_MAX + 1,)),), "elements"),
        ((entry("a", (ELEMENTS_MAX,)), entry("b", (1,))), "elements"),
        ((entry(shape=(1 << 63,) * DIMENSIONS_MAX),), "elements"),
    ],
)
def test_refused(layout: tuple[LayoutEntry, ...], text: str) -> None:
    with pytest.raises(RemoteProtocolError, match=text) as caught:
        check_layout(layout)
    assert caught.value.code is ErrorCode.BAD_MESSAGE
    assert len(str(caught.value)) < 1024


def test_too_many_tensors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("narrows.proto.layout.TENSORS_MAX", 3)
    check_layout(LAYOUT[:3])
    with pytest.raises(RemoteProtocolError, match="tensors"):
        check_layout(LAYOUT)


def test_equal_layouts_have_no_differences() -> None:
    assert differences(LAYOUT, list(LAYOUT)) == []


def test_differences_name_tensor_field_and_both_values() -> None:
    theirs = (
        msgspec.structs.replace(EMBEDDING, shape=(17, 8), rule="rda"),
        msgspec.structs.replace(WEIGHT, dtype="float16"),
        SCALAR,
        entry("extra"),
    )
    assert differences(LAYOUT, theirs) == [
        "'embedding.weight': shape (17, 8), expected (16, 8)",
        "'embedding.weight': rule rda, expected mean",
        "'block.0.weight': dtype float16, expected bfloat16",
        "'block.0.bias' is missing",
        "'extra' is not in the run",
    ]


def test_another_order_is_a_difference() -> None:
    found = differences(LAYOUT, (WEIGHT, EMBEDDING, BIAS, SCALAR))
    assert found == [
        "tensor 0 is 'block.0.weight', expected 'embedding.weight'",
        "tensor 1 is 'embedding.weight', expected 'block.0.weight'",
    ]


def test_only_the_first_differences_are_listed() -> None:
    assert len(differences(LAYOUT, ())) == 4
    assert differences(LAYOUT, (), limit=2) == [
        "'embedding.weight' is missing",
        "'block.0.weight' is missing",
    ]
