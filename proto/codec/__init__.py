"""Values to bytes and back: kernels, lent memory, payloads, fragments in chunks.

    encode_push(fragment, published, local, *, codec, rho, chunk_elements)   -> PushChunk...
    encode_step(fragment, global_, published, *, codec, rho, chunk_elements, advanced)
                                                                             -> EncodedChunk...
    encode_values(fragment, values, *, chunk_elements)   lossless, for STATE and SEED
    encode_codes(fragment, codec, scales, codes, chunk_elements)   a push coded on a GPU
    recut(fragment, decoded, *, codec, chunk_elements)   the same codes in chunks of another size
    decode_chunk(fragment, codec, chunk_elements, index, payload)            -> DecodedChunk
    values_of(fragment, chunks), advance_copy(fragment, copy, chunks)        -> F32
    digest_of(values)                                                        -> int

`chunks` and `decoded` are all DecodedChunks of a fragment, in order. A PushChunk is an EncodedChunk
(index, payload, payload_digest) with `decoded`, the push as its receiver will hold it.

Decoders trust nothing in a payload: peers wrote it. Encoders give the same bits on every machine,
because both ends must hold the same published copy.
"""

from narrows.proto.codec.kernels import (
    F32,
    F64,
    I8,
    I64,
    RUN,
    all_finite,
    kernel,
    read_only,
    round_to_dtype,
    sample_places,
    uncached_advice,
)
from narrows.proto.codec.memory import empty_f32
from narrows.proto.codec.payload import LIMITS, DecodedChunk
from narrows.proto.codec.transfer import (
    RMS_SAMPLES_MAX,
    EncodedChunk,
    PushChunk,
    advance_copy,
    decode_chunk,
    digest_of,
    encode_codes,
    encode_push,
    encode_step,
    encode_values,
    piece_scales,
    recut,
    values_of,
    warm_up,
)

# fmt: off
__all__ = [
    "F32", "F64", "I8", "I64", "LIMITS", "RMS_SAMPLES_MAX", "RUN", "DecodedChunk", "EncodedChunk",
    "PushChunk", "advance_copy", "all_finite", "decode_chunk", "digest_of", "empty_f32",
    "encode_codes", "encode_push", "encode_step", "encode_values", "kernel", "piece_scales",
    "read_only", "recut", "round_to_dtype", "sample_places", "uncached_advice", "values_of",
    "warm_up",
]
# fmt: on
