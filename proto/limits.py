"""Every bound of the protocol, with its reason. A message beyond a bound is refused, never cut.

A bound protects the memory and the time of the side that receives. A message that was cut would be
a different message with the same checksum, so it is refused whole.
"""

from __future__ import annotations

PROTOCOL = 2
"""Version of the wire format; peers must agree exactly."""

CONTROL_BYTES_MAX = 4 << 20
"""Bytes of a control message. The largest is Hello with its layout: 30,000 tensors at 100 bytes."""

HEADER_BYTES_MAX = 1 << 10
"""Bytes of a data message's header: small fields, the longest a 64-character name."""

TOPIC_BYTES_MAX = 64
"""Bytes of a downlink topic: 32 hex digits of an incarnation, a slash and a stream number."""

CHUNK_ELEMENTS_MAX = 1 << 20
"""Elements in one data message: 4 MiB as float32. More would hold up heartbeats behind it."""

PAYLOAD_BYTES_MAX = CHUNK_ELEMENTS_MAX * 4 + (1 << 16)
"""Payload of a data message: one float32 per element, plus scales and frame overhead."""

NAME_CHARACTERS_MAX = 64
"""Characters of a learner's name, which appears in every log line and table."""

NAME_PATTERN = rf"\A[A-Za-z0-9][A-Za-z0-9._-]{{0,{NAME_CHARACTERS_MAX - 1}}}\Z"
"""Names are safe in files, logs and tables: no slash, no blank, no control character."""

LEARNERS_MAX = 1024
"""Learners of one run at the same time. One broker serves tens; the bound stops a flood."""

FRAGMENTS_MAX = 4096
"""Fragments of one model: the state of every one of them travels in each Welcome."""

TENSORS_MAX = 30_000
"""Tensors in a layout."""

TENSOR_NAME_CHARACTERS_MAX = 512
"""Deeply nested modules have long names; longer than this is a bug or an attack."""

DIMENSIONS_MAX = 8
"""Dimensions of a tensor."""

ELEMENTS_MAX = 1 << 48
"""Elements of a model: 281 trillion parameters, so that no sum of sizes can wrap."""

STREAMS_MAX = 64
"""Data connections of one learner in each direction; published gains end near 64."""

TOKENS_MAX = 1 << 62
"""Cumulative tokens of one learner or run. No run reaches it, and a signed 64-bit integer holds
twice as much."""

VERSION_MAX = 1 << 53
"""Versions of a fragment: exact in every language's numbers."""

RATE_MIN = 100_000
"""Smallest rate of a budget, in bit/s: control alone takes a tenth of it."""

RATE_MAX = 10**15
"""Largest rate of a budget, in bit/s: a sum over all learners stays exact in a float."""

CHUNKS_OF_A_REGULAR_CUT_MAX = 4
"""Largest number of chunks of a transfer, in units of the chunks of a regular cut; 16 more are
allowed. Each chunk costs the receiver some 2 KB and a run of the decoder, however little it
holds."""

RANGES_MAX = 256
"""Ranges in one Missing message; the next message asks for the rest."""

PUBLICATIONS_KEPT = 8
"""Encoded publications kept per fragment to fill small gaps; a larger gap gets the State."""

TEXT_CHARACTERS_MAX = 1024
"""Free text from a peer (reasons, remedies); it is escaped before it is logged."""

# A chunk of float32 fits into a payload, and a Missing message into a control message.
assert CHUNK_ELEMENTS_MAX * 4 < PAYLOAD_BYTES_MAX
assert RANGES_MAX * 2 * 9 < CONTROL_BYTES_MAX
# With one publication kept, a learner that misses one would need the whole state.
assert PUBLICATIONS_KEPT >= 2
