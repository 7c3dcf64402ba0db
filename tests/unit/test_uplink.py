"""Pushes: the values that are sent, and the time at which the rest is carried over."""

from __future__ import annotations

import numpy as np
from msgspec import structs

from narrows.broker.config import BrokerConfig
from narrows.broker.shared_settings import settings
from narrows.learner.transport.push import PushWork, Residuals, encode_push, rounded_base
from narrows.proto.codec import F32
from narrows.proto.codec.transfer import EncodedChunk, decode_chunk, values_of
from narrows.proto.fragments import build_table
from narrows.proto.messages import DtypeName, LayoutEntry


def layout_of(dtype: DtypeName) -> tuple[LayoutEntry, ...]:
    return (LayoutEntry("weight", (40, 25), dtype, "rda"),)


LAYOUT = layout_of("float32")
FRAGMENT = build_table(LAYOUT, 1)[0]
SETTINGS = settings(BrokerConfig())


def vector(seed: int, scale: float = 1.0) -> F32:
    rng = np.random.default_rng(seed)
    return (scale * rng.standard_normal(FRAGMENT.elements)).astype(np.float32)


def pushed(work: PushWork) -> F32:
    chunks: list[EncodedChunk] = []
    encode_push(work, SETTINGS, LAYOUT, chunks.append)
    codec = SETTINGS.push_codec
    return values_of(
        FRAGMENT,
        [(c.offset, decode_chunk(FRAGMENT, codec, c.offset, c.count, c.payload)) for c in chunks],
    )


def test_sent_and_unsent_add_up_to_the_outer_gradient() -> None:
    base, local = vector(1), vector(2)
    work = PushWork(1, FRAGMENT, 0, base, local, residual=None, codec=SETTINGS.push_codec, rho=0.5)
    sent = pushed(work)
    assert work.next_residual is not None
    np.testing.assert_allclose(sent + work.next_residual, base - local, atol=1e-6)
    assert np.abs(work.next_residual).max() > 0


def test_what_is_left_unsent_is_known_with_the_last_chunk() -> None:
    """The push may be merged from then on."""
    base, local = vector(1), vector(2)
    work = PushWork(1, FRAGMENT, 0, base, local, residual=None, codec=SETTINGS.push_codec, rho=0.5)
    settings = structs.replace(SETTINGS, chunk_elements=300)
    seen: list[tuple[EncodedChunk, F32]] = []

    def ready(chunk: EncodedChunk) -> None:
        assert isinstance(work.next_residual, np.ndarray)
        seen.append((chunk, work.next_residual.copy()))

    encode_push(work, settings, LAYOUT, ready)
    assert len(seen) > 1
    assert work.next_residual is not None
    np.testing.assert_array_equal(seen[-1][1], work.next_residual)


def test_the_residual_is_part_of_the_next_push() -> None:
    base, residual = vector(3), vector(4, 0.1)
    work = PushWork(1, FRAGMENT, 0, base, base.copy(), residual, codec=SETTINGS.push_codec, rho=0.5)
    sent = pushed(work)
    assert work.next_residual is not None
    np.testing.assert_allclose(sent + work.next_residual, residual, atol=1e-6)


def test_only_a_merged_push_replaces_the_residual() -> None:
    residuals = Residuals(enabled=True)
    first = PushWork(
        1,
        FRAGMENT,
        0,
        vector(1),
        vector(2),
        None,
        next_residual=vector(5),
        codec=SETTINGS.push_codec,
        rho=0.5,
    )
    residuals.settle(first, merged=True)
    lost = PushWork(
        2,
        FRAGMENT,
        1,
        vector(1),
        vector(2),
        residuals.of(0),
        next_residual=vector(6),
        codec=SETTINGS.push_codec,
        rho=0.5,
    )
    residuals.settle(lost, merged=False)
    kept = residuals.of(0)
    assert kept is not None
    assert np.array_equal(kept, vector(5))


def test_without_error_feedback_nothing_is_carried_over() -> None:
    residuals = Residuals(enabled=False)
    work = PushWork(
        1,
        FRAGMENT,
        0,
        vector(1),
        vector(2),
        None,
        next_residual=vector(5),
        codec=SETTINGS.push_codec,
        rho=0.5,
    )
    residuals.settle(work, merged=True)
    assert residuals.of(0) is None


def test_the_rounding_of_bfloat16_parameters_does_not_travel() -> None:
    layout = layout_of("bfloat16")
    base = vector(7)
    held = rounded_base(FRAGMENT, base, layout)
    assert not np.array_equal(held, base)
    work = PushWork(1, FRAGMENT, 0, base, held.copy(), None, codec=SETTINGS.push_codec, rho=0.5)
    chunks: list[EncodedChunk] = []
    encode_push(work, SETTINGS, layout, chunks.append)
    assert work.next_residual is not None
    assert not work.next_residual.any()


def test_a_settled_push_stops_being_encoded() -> None:
    work = PushWork(
        1, FRAGMENT, 0, vector(1), vector(2), None, settled=True, codec=SETTINGS.push_codec, rho=0.5
    )
    chunks: list[EncodedChunk] = []
    encode_push(work, SETTINGS, LAYOUT, chunks.append)
    assert not chunks
