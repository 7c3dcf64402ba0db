"""Values to bytes and back: quantisation, kernels, entropy coders. [pure]

`transfer` (encode_push, encode_step, decode_chunk and its kin) codes a whole fragment in chunks;
`codec` gives one coding by its name; `BitControl` chooses codec and step for a bit rate. `F32` and
its kin are the array types of the whole project. `kernel` compiles a strict loop, for merging too.
Decoders trust nothing in a payload: peers wrote it. Encoders give the same bits on every machine,
because both ends must hold the same published copy.
"""

from narrows.proto.codec import blosc2_chunk, codecs, transfer
from narrows.proto.codec.bfloat16 import round_to_dtype
from narrows.proto.codec.bit_control import (
    AUTO,
    BitControl,
    codecs_of,
    expected_bits,
    make_bit_control,
    setting_names,
)
from narrows.proto.codec.buffers import empty_f32
from narrows.proto.codec.chunk import DecodedChunk, float_square_sums, not_finite
from narrows.proto.codec.codecs import RMS_SAMPLES_MAX, codec, codec_names, piece_scales, warm_up
from narrows.proto.codec.compiled import kernel, uncached_advice
from narrows.proto.codec.kernels import F32, F64, I8, I64, RUN, all_finite, read_only, sample_places
from narrows.proto.codec.quantised import QuantisedCodec
from narrows.proto.codec.scales import upper_halves, widened
from narrows.proto.codec.transfer import (
    STATE_CODEC,
    EncodedChunk,
    advance_copy,
    decode_chunk,
    digest_of,
    encode_fragment,
    encode_push,
    encode_step,
    error_ratio,
    values_of,
)

__all__ = [
    "AUTO",
    "F32",
    "F64",
    "I8",
    "I64",
    "RMS_SAMPLES_MAX",
    "RUN",
    "STATE_CODEC",
    "BitControl",
    "DecodedChunk",
    "EncodedChunk",
    "QuantisedCodec",
    "advance_copy",
    "all_finite",
    "blosc2_chunk",
    "codec",
    "codec_names",
    "codecs",
    "codecs_of",
    "decode_chunk",
    "digest_of",
    "empty_f32",
    "encode_fragment",
    "encode_push",
    "encode_step",
    "error_ratio",
    "expected_bits",
    "float_square_sums",
    "kernel",
    "make_bit_control",
    "not_finite",
    "piece_scales",
    "read_only",
    "round_to_dtype",
    "sample_places",
    "setting_names",
    "transfer",
    "uncached_advice",
    "upper_halves",
    "values_of",
    "warm_up",
    "widened",
]
