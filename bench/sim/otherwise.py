"""A push of the simulator, encoded by a coding of the codec bench in the place of ours."""

from __future__ import annotations

import numpy as np

from narrows.bench.codec.codings import Coding
from narrows.learner.transport import PushWork
from narrows.proto.codec import EncodedChunk


def encode_otherwise(coding: Coding, work: PushWork, cut: int) -> int:
    """Fills in the arriving chunks and the next residual; returns the bytes that it takes."""
    assert isinstance(work.local, np.ndarray)
    values = work.base - work.local
    if work.residual is not None:
        assert isinstance(work.residual, np.ndarray)
        values += work.residual
    sent, size = coding(work.fragment, values)
    work.next_residual = values - sent
    for offset, count in work.fragment.chunks(cut):
        payload = sent[offset : offset + count].tobytes()
        work.chunks.append(EncodedChunk(offset, count, payload, 0))
    return size
