"""The exchange that PROTOCOL.md shows: what its messages say, and what its round computes."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from narrows.broker.merging.merge import merge_vectors
from narrows.broker.merging.outer import outer_optimizer
from narrows.broker.merging.sums import DecodedVector
from narrows.broker.merging.weights import token_weights
from narrows.proto import messages as msg
from narrows.proto.codec import transfer
from narrows.proto.codec.chunk import DecodedChunk
from narrows.proto.codec.codecs import codec_names
from narrows.proto.fragments import build_table
from narrows.proto.layout import fingerprint
from narrows.proto.limits import PAYLOAD_BYTES_MAX, PROTOCOL

F32: TypeAlias = NDArray[np.float32]

RUN_ID, INCARNATION = "5f2a9c01b3d4e6f7", "0123456789abcdef0123456789abcdef"
EPOCH: msg.Epoch = (1, 1, 77)
LAYOUT = (
    msg.LayoutEntry("w", (2, 3), "float32", "mean"),
    msg.LayoutEntry("b", (1,), "float32", "mean"),
)
CODEC, RHO = "int4-zstd", 0.5
FRAGMENT = build_table(LAYOUT, 1)[0]
BASE = np.array([0.5, -1.0, 0.25, 2.0, 0.0, -0.0, 1.5], np.float32)
LOCAL = np.array([0.25, -0.5, 0.125, 1.25, 0.25, -0.0625, 2.0], np.float32)
OTHER = np.array([0.375, -0.75, 0.375, 1.75, 0.125, 0.0, 1.75], np.float32)
SETTINGS = msg.RunSettings(
    mode=msg.Mode.DECOUPLED,
    fragment_count=1,
    sync_period_steps=10,
    overlap_steps=2,
    push_codec=CODEC,
    publish_codec=CODEC,
    push_rho=RHO,
    publish_rho=RHO,
    push_bits=3.0,
    publish_bits=3.0,
    chunk_elements=262144,
    message_bytes=PAYLOAD_BYTES_MAX,
    streams=1,
    error_feedback=True,
    tokens_per_run_step=0,
    goal_tokens=0,
    max_offline_s=3600.0,
)


class Pushed(NamedTuple):
    """A push and what it holds, by element."""

    chunk: transfer.EncodedChunk
    outer_grad: F32
    codes: NDArray[np.int8]
    scales: F32
    values: F32
    residual: F32


class Round(NamedTuple):
    """Results of one round."""

    ours: Pushed
    other: Pushed
    mean: F32
    momentum: F32
    params: F32
    publication: transfer.EncodedChunk
    step_codes: NDArray[np.int8]
    copy: F32


def pushed(local: F32) -> Pushed:
    residual = np.empty_like(BASE)
    (chunk,) = transfer.encode_push(
        FRAGMENT, BASE, local, None,
        codec_name=CODEC, rho=RHO, chunk_elements=BASE.size, next_residual=residual,
    )  # fmt: skip
    content = decoded(chunk)
    values = transfer.values_of(FRAGMENT, [(0, content)])
    return Pushed(chunk, BASE - local, content.whole_codes(), content.scales, values, residual)


def exchange() -> Round:
    """Two learners push to version 0 of the only fragment; version 1 results."""
    ours, other = pushed(LOCAL), pushed(OTHER)
    contributions = [
        DecodedVector(name, [(0, decoded(push.chunk))])
        for name, push in (("a", ours), ("b", other))
    ]
    weights = token_weights([(48, 3), (32, 2)], rule="tokens")
    mean = merge_vectors(FRAGMENT, contributions, weights).outer_grad
    optimizer = outer_optimizer("nesterov", lr=0.4, momentum=0.6)
    params, momentum = optimizer.step(BASE, np.zeros_like(BASE), mean)
    copy = np.empty_like(BASE)
    (publication,) = transfer.encode_step(
        FRAGMENT, params, BASE,
        codec_name=CODEC, rho=RHO, chunk_elements=BASE.size, advanced=copy,
    )  # fmt: skip
    codes = decoded(publication).whole_codes()
    return Round(ours, other, mean, momentum, params, publication, codes, copy)


def decoded(chunk: transfer.EncodedChunk) -> DecodedChunk:
    return transfer.decode_chunk(FRAGMENT, CODEC, 0, BASE.size, chunk.payload)


def hello() -> msg.Hello:
    told = fingerprint(LAYOUT, 0)
    return msg.Hello(PROTOCOL, "a", INCARNATION, "", (0, 0, 0), told, codec_names(), 0, 0, ())


def welcome(digest: int) -> msg.Welcome:
    return msg.Welcome(
        run_id=RUN_ID,
        epoch=EPOCH,
        role=msg.Role.ADOPT,
        settings=SETTINGS,
        uplink_port=7071,
        downlink_port=7072,
        fragments=(msg.FragmentHead(0, digest),),
        rounds=(),
        phase=msg.Phase.RUNNING,
        run_tokens=0,
        tokens_per_s=0.0,
        step=0,
        up_bits_per_s=0.0,
    )


def header(
    kind: msg.DataKind,
    version: int,
    push_id: int,
    chunk: transfer.EncodedChunk,
    result_digest: int,
    before: transfer.EncodedChunk,
) -> msg.Header:
    """`before`: what the stream has carried besides this chunk, or the chunk itself."""
    others = 0 if before is chunk else len(before.payload)
    return msg.Header(
        protocol=PROTOCOL,
        run_id=RUN_ID,
        epoch=EPOCH,
        kind=kind,
        learner="a",
        incarnation=INCARNATION,
        fragment=0,
        version=version,
        push_id=push_id,
        offset=0,
        count=chunk.count,
        codec=CODEC,
        payload_digest=chunk.payload_digest,
        result_digest=result_digest,
        stream=0,
        position=others + len(chunk.payload),
    )
