"""Every bound of the protocol, with its reason. A message beyond a bound is refused, never cut.

A bound protects the memory and the time of the side that receives. A message that was cut would be
a different message with the same checksum, so it is refused whole.
"""

from __future__ import annotations

PROTOCOL = 3
"""Version of the wire format; peers must agree exactly."""

CONTROL_BYTES_MAX = 4 << 20
"""Bytes of a control message to a learner. The largest is the Status of a full run."""

CONTROL_UP_BYTES_MAX = 64 << 10
"""Bytes of a control message to the broker, which reads them from anybody. The largest are a
LayoutPart and the Hello of a learner that holds 4096 fragments."""

HEADER_BYTES_MAX = 1 << 10
"""Bytes of a data message's header: small fields, the longest a 64-character name."""

TOPIC_BYTES_MAX = 100
"""Bytes of a downlink topic: a name, 32 hex digits of an incarnation and two digits of a stream,
with slashes between them."""

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

STATUS_LEARNERS_MAX = 2 * LEARNERS_MAX
"""Learners in a Status: those that are here, and as many that are gone."""

FRAGMENTS_MAX = 4096
"""Fragments of one model: the state of every one of them travels in each Welcome."""

TENSORS_MAX = 30_000
"""Tensors in a layout."""

TENSOR_NAME_CHARACTERS_MAX = 512
"""Deeply nested modules have long names; longer than this is a bug or an attack."""

DIMENSIONS_MAX = 8
"""Dimensions of a tensor."""

LAYOUT_PART_BYTES_MAX = 48 << 10
"""Bytes of the entries of one LayoutPart: a message of control, with room to spare."""

LAYOUT_PARTS_MAX = 96
"""Parts of a layout, 4.5 MiB in all: 30,000 tensors at 150 bytes."""

LAYOUT_PART_ENTRIES_MAX = 4096
"""Entries of one LayoutPart. The smallest entry has 12 bytes, so that the bytes are the bound."""

CODECS_MAX = 32
"""Codecs that a learner names in its Hello. There are five."""

CODEC_CHARACTERS_MAX = 32
"""Characters of a codec's name."""

ELEMENTS_MAX = 1 << 48
"""Elements of a model: 281 trillion parameters, so that no sum of sizes can wrap."""

STREAMS_MAX = 64
"""Data connections of one learner in each direction; published gains end near 64."""

TOKENS_MAX = 1 << 62
"""Cumulative tokens of one learner or run. No run reaches it, and a signed 64-bit integer holds
twice as much."""

PUSH_TOKENS_MAX = 1 << 40
"""Tokens, or steps, of one push. A million processors make as many in a day, and the sum of four
million such pushes is within TOKENS_MAX."""

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

# A chunk of float32 fits into a payload.
assert CHUNK_ELEMENTS_MAX * 4 < PAYLOAD_BYTES_MAX
# The longest arrays fit into a message to the broker: ranges, versions and the part of a layout.
assert RANGES_MAX * 2 * 9 < CONTROL_UP_BYTES_MAX
assert FRAGMENTS_MAX * 9 + CODECS_MAX * (4 * CODEC_CHARACTERS_MAX + 2) < CONTROL_UP_BYTES_MAX
assert LAYOUT_PART_BYTES_MAX < CONTROL_UP_BYTES_MAX
# With one publication kept, a learner that misses one would need the whole state.
assert PUBLICATIONS_KEPT >= 2
