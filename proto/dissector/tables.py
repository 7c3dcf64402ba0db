"""The tables of PROTOCOL.md as data: messages, structures, types and limits.

They are a copy of the page, not of our structs. A test compares them with the page.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Final, TypeAlias

PROTOCOL: Final = 3
CONTROL_BYTES_MAX: Final = 4194304
HEADER_BYTES_MAX: Final = 1024
TOPIC_BYTES_MAX: Final = 100
CHUNK_ELEMENTS_MAX: Final = 1048576
PAYLOAD_BYTES_MAX: Final = 4259840
STATE_CODEC: Final = "f32-blosc2"

INTEGERS: Final[Mapping[str, tuple[int, int]]] = {
    "int": (-(2**63), 2**64 - 1),
    "Count": (0, 2**62),
    "Elements": (0, 2**48),
    "Version": (0, 2**53),
    "Fragments": (1, 4096),
    "Period": (1, 2**62),
    "ChunkSize": (1, 2**20),
    "MessageSize": (1, 4259840),
    "Streams": (1, 64),
    "Port": (1, 65535),
    "Stream": (0, 63),
    "PushId": (1, 2**62),
    "PushTokens": (0, 2**40),
    "PartIndex": (0, 95),
    "PartCount": (1, 96),
}
FLOATS: Final[Mapping[str, tuple[float, float]]] = {
    "Rho": (0.001, 100),
    "Bits": (0, 64),
    "Seconds": (0, 1e9),
    "Rate": (0, 1e18),
}
TEXT_CHARACTERS_MAX: Final = 1024
CODEC_CHARACTERS_MAX: Final = 32
PATTERNS: Final[Mapping[str, str]] = {
    "Fingerprint": r"\A[0-9a-f]{32}\Z",
    "Proof": r"\A([0-9a-f]{64})?\Z",
    "PublicKey": r"\A[0-9A-Za-z.:+=^!/*?&<>()\[\]{}@%$#-]{40}\Z",
}
"""Texts of a fixed form."""

LISTS: Final[Mapping[str, tuple[str, int, int]]] = {
    "Positions": ("Count", 0, 64),
    "Ranges": ("Range", 0, 256),
    "Range": ("Elements", 2, 2),
    "Versions": ("Version", 0, 4096),
    "Codecs": ("Codec", 0, 32),
    "Shape": ("int", 0, 8),
    "LayoutEntries": ("LayoutEntry", 0, 4096),
    "Heads": ("FragmentHead", 0, 4096),
    "OpenRounds": ("OpenRound", 0, 4096),
    "LearnerStatuses": ("LearnerStatus", 0, 2048),
    "Epoch": ("Count", 3, 3),
    "Start": ("Count", 2, 2),
}
"""Type of the items, least and greatest number of them. Start exists in journals only."""

WORDS: Final[Mapping[str, tuple[str, ...]]] = {
    "Mode": ("decoupled", "streaming", "diloco"),
    "Phase": ("founding", "running", "ending", "ended"),
    "Role": ("found", "wait", "adopt"),
    "MergeRule": ("mean", "rda"),
    "DtypeName": ("float32", "bfloat16", "float16"),
}
DATA_KINDS: Final = ("PUSH", "FOUND", "PUBLICATION", "STATE")
"""They count from 1."""

UP, DOWN = "→", "←"

CONTROL_TABLE: Final = """
Hello →: protocol int; name Text; incarnation Text; run_id Text; epoch Epoch;
    fingerprint Fingerprint; codecs Codecs; step Count; tokens Count;
    versions Versions; epoch_proof Proof = ""
Report →: step Count; tokens Count; step_s Seconds; loss float or nil; received Positions;
    ledger TokenLedger; up_bits_per_s Rate
Push →: fragment Count; base_version Version; attempt Count; push_id PushId; elements Elements;
    tokens PushTokens; steps PushTokens
Decline →: fragment Count; base_version Version; attempt Count; reason Text
Adopted →: fragment Count; version Version
Fetch →: fragment Count; have_version int
Enrol →: protocol int; public_key PublicKey
Enrolled ←: name Text
Welcome ←: run_id Text; epoch Epoch; role Role; settings RunSettings; uplink_port Port;
    downlink_port Port; fragments Heads; rounds OpenRounds; phase Phase;
    run_tokens Count; tokens_per_s Rate; step Count; up_bits_per_s Rate; epoch_proof Proof = ""
Beat ←: epoch Epoch; phase Phase; versions Versions; rounds OpenRounds; run_tokens Count;
    tokens_per_s Rate; received Positions; up_bits_per_s Rate
Progress ←: received Positions
Refuse ←: code Text; message Text; expected Text = ""; got Text = ""; remedy Text = "";
    fragment int = -1; push_id Count = 0
Probe ←: nonce Count
Missing ↔: kind DataKind; fragment Count; version Version; push_id Count; ranges Ranges
AskLayout ↔: first PartIndex
LayoutPart ↔: index PartIndex; count PartCount; frozen_digest int; entries LayoutEntries
Alive →: nonce Count
Bye ↔: reason Text
AskStatus →:
Status ←: run_id Text; epoch Epoch; phase Phase; mode Mode; uptime_s float; versions Versions;
    rounds OpenRounds; run_tokens Count; goal_tokens int; tokens_per_s Rate; merges Count;
    contributions_merged Count; contributions_refused {str: int};
    mean_contributors_per_merge float; longest_merge_gap_s float; norms_clipped int;
    up_bytes int; down_bytes int; checkpoint_version int; waiting_for str;
    learners LearnerStatuses
"""

STRUCTURE_TABLE: Final = """
RunSettings map: mode Mode; fragment_count Fragments; sync_period_steps Period;
    overlap_steps Count; push_codec Codec; publish_codec Codec; push_rho Rho; publish_rho Rho;
    push_bits Bits; publish_bits Bits; chunk_elements ChunkSize; message_bytes MessageSize;
    streams Streams; error_feedback bool; tokens_per_run_step Count; goal_tokens Count;
    max_offline_s Seconds
LayoutEntry array: name Text; shape Shape; dtype DtypeName; rule MergeRule
FragmentHead array: version Version; digest int
OpenRound array: fragment Count; base_version Version; attempt Count; at_step int
TokenLedger array: logged Count = 0; pending Count = 0; merged Count = 0; overwritten Count = 0;
    refused Count = 0; rolled_back Count = 0; skipped Count = 0
LearnerStatus map: name Text; incarnation Text; address str; state str; last_heard_s float;
    step Count; tokens Count; step_s Seconds; loss float or nil; contributions int;
    refused Count; missed_running int; ledger TokenLedger; up_bytes int; down_bytes int
Header array: protocol int; run_id Text; epoch Epoch; kind DataKind; learner Text;
    incarnation Text; fragment Count; version Version; push_id Count; offset Elements;
    count Elements; codec Codec; payload_digest int; result_digest int; stream Stream;
    position Count
"""

JOURNAL_TABLE: Final = """
Began map: format int; epoch Start; config_digest str; versions [int]; at float
Committed map: epoch Start; fragment int; version int; reason str; contributors [Contributor];
    policy Policy; phase Phase; run_tokens int; publication Vector; contributions [Vector];
    error_ratio float; digests [int]; at float
Fate map: epoch Start; what str; learner str; incarnation str; fragment int; push_id int;
    reason str; at float
Sealed map: epoch Start; key str; at float
Contributor map: learner str; incarnation str; push_id int; tokens int; steps int; weight float;
    merged_tokens int; counted int = -1; is_clipped bool = False; cosine float or nil = None;
    is_noise bool = False; norms [float] = ()
Policy map: weights str; law str; clip_ratio float; share_max float; optimizer str; rate float;
    momentum float; is_rounded bool; norm_limit float = 0.0; robust str = off
Vector map: codec str; rho float; chunks [Chunk]
Chunk array: offset int; elements int; payload_bytes int
"""
"""The heads of the journal's records. They are no part of the wire format: they are described in
`broker/storage/records.py`."""


@dataclass(frozen=True)
class Number:
    """An integer, or a float, which may be sent as an integer; both bounds count."""

    name: str
    least: float
    most: float
    is_float: bool = False
    or_nil: bool = False

    @property
    def unbounded(self) -> bool:
        """Whether every value of msgpack will do."""
        return self.least == -float("inf") or self.name == "int"


@dataclass(frozen=True)
class AnyOf:
    """A word, or a number that stands for one and counts from 1."""

    name: str
    words: tuple[str, ...]
    is_number: bool = False


@dataclass(frozen=True)
class String:
    """UTF-8; `characters_max` -1: of any length."""

    name: str
    characters_max: int = -1
    pattern: str = ""
    """Regular expression that it matches."""

    def fits(self, value: str) -> bool:
        """Whether `value` is as long, and of the form, as it may be."""
        is_short = self.characters_max < 0 or len(value) <= self.characters_max
        return is_short and re.search(self.pattern, value) is not None


@dataclass(frozen=True)
class Bool:
    """True or false."""

    name: str = "bool"


@dataclass(frozen=True)
class Array:
    """Values of one type; `most` -1: any number of them."""

    name: str
    item: Type
    least: int = 0
    most: int = -1


@dataclass(frozen=True)
class Mapped:
    """A map from strings to values of one type."""

    name: str
    item: Type


@dataclass(frozen=True)
class StructureField:
    """A field of a structure."""

    name: str
    type: str
    """As the page has it, without the default."""
    default: str = ""
    """As the page has it, "" if the field must be there."""


@dataclass(frozen=True)
class Structure:
    """A map with the keys `members`, or an array in their order."""

    name: str
    members: tuple[StructureField, ...]
    is_map: bool = True
    arrow: str = ""
    is_tagged: bool = False
    """A map that has the key `type` besides, which says what it is."""

    @property
    def required(self) -> int:
        """Members without a default."""
        return sum(not member.default for member in self.members)


Type: TypeAlias = Number | AnyOf | String | Bool | Array | Mapped | Structure


def _parsed(table: str, *, tagged: tuple[str, ...] = ()) -> dict[str, Structure]:
    found: dict[str, Structure] = {}
    for line in re.sub(r"\n +", " ", table.strip()).splitlines():
        head, _, rest = line.partition(":")
        name, shape = head.split()
        members = tuple(map(_member, filter(None, rest.split("; "))))
        is_map, is_arrow = shape != "array", shape not in ("map", "array")
        arrow, is_tagged = shape if is_arrow else "", is_arrow or name in tagged
        found[name] = Structure(name, members, is_map, arrow, is_tagged)
    return found


def _member(text: str) -> StructureField:
    name, _, rest = text.strip().partition(" ")
    kind, _, default = rest.partition(" = ")
    return StructureField(name, kind, default)


CONTROL: Final = _parsed(CONTROL_TABLE)
STRUCTURES: Final = _parsed(STRUCTURE_TABLE)
JOURNAL: Final = _parsed(JOURNAL_TABLE, tagged=("Began", "Committed", "Fate", "Sealed"))
HEADER: Final = STRUCTURES["Header"]
CONTROL_TAGS: Final = {name.lower(): each for name, each in CONTROL.items()}
RECORD_TAGS: Final = {name.lower(): each for name, each in JOURNAL.items() if each.is_tagged}


@cache
def type_of(text: str) -> Type:
    """The type that a table calls so."""
    if text in INTEGERS:
        return Number(text, *INTEGERS[text])
    if text in FLOATS:
        return Number(text, *FLOATS[text], is_float=True)
    if text in ("float", "float or nil"):
        infinite = float("inf")
        return Number(text, -infinite, infinite, is_float=True, or_nil=text != "float")
    if text in LISTS:
        item, least, most = LISTS[text]
        return Array(text, type_of(item), least, most)
    if text.startswith("["):
        return Array(text, type_of(text[1:-1]))
    if text.startswith("{str: "):
        return Mapped(text, type_of(text[6:-1]))
    return _named(text)


def _named(text: str) -> Type:
    named: dict[str, Type] = {
        "str": String("str"),
        "Text": String("Text", TEXT_CHARACTERS_MAX),
        "Codec": String("Codec", CODEC_CHARACTERS_MAX),
        **{name: String(name, pattern=pattern) for name, pattern in PATTERNS.items()},
        "bool": Bool(),
        "DataKind": AnyOf("DataKind", DATA_KINDS, is_number=True),
        **{name: AnyOf(name, words) for name, words in WORDS.items()},
        **STRUCTURES,
        **JOURNAL,
    }
    return named[text]
