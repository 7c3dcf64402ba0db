"""Every number of the protocol has a name in PROTOCOL.md, and the value that the code has."""

from __future__ import annotations

import re

from protocol_tables import DOCUMENT, number, table

from narrows.broker.merging import history, merge, robust, weights
from narrows.broker.syncer import clock, ending, forgetting, pace, rates
from narrows.learner.session import fragments
from narrows.proto import limits, socket_options, timing
from narrows.proto.codec import codecs, kernels, scales, zstd_frame
from narrows.proto.flow import budget, lanes, outbox, path, patience

#: Constants that are neither a limit nor a time, by the name that the document gives them.
AMOUNTS: dict[str, object] = {
    "KEEPALIVE_PROBES": socket_options.COMMON["TCP_KEEPALIVE_CNT"],
    "FETCHES_MAX": fragments.FETCHES_MAX,
    "GONE_MAX": forgetting.GONE_MAX,
    "MERGED_PUSHES_MAX": forgetting.MERGED_PUSHES_MAX,
    "LIVES_MAX": ending.LIVES_MAX,
    "PATIENCE_ROUNDS": patience.ROUNDS,
    "PATIENCE_FACTOR": patience.SLOWER,
    "PATIENCE_SAMPLES": patience.SAMPLES,
    "STATE_ELEMENT_BYTES": patience.STATE_BYTES,
    "OWN_RATIO_MAX": clock.OWN_RATIO_MAX,
    "MEDIAN_RATIO_MAX": clock.MEDIAN_RATIO_MAX,
    "FIRST_TOKENS_PER_S_MAX": clock.FIRST_TOKENS_PER_S_MAX,
    "CLOCK_SAMPLES": clock.SAMPLES,
    "CLOCK_KNOWN_SAMPLES": clock.KNOWN_SAMPLES,
    "RESTS_RATIO": clock.RESTS_RATIO,
    "PACE_SAMPLES": pace.SAMPLES,
    "PACE_DISAGREE_RATIO": pace.DISAGREE_RATIO,
    "USUAL_RATIO_MAX": patience.USUAL_RATIO_MAX,
    "LEFT_OUT_DOUBLINGS_MAX": ending.LEFT_OUT_DOUBLINGS_MAX,
    "ACKNOWLEDGE_BYTES": path.ACKNOWLEDGE_BYTES,
    "STREAM_WINDOW_BYTES": socket_options.STREAM_WINDOW_BYTES,
    "WINDOW_START_BYTES": path.WINDOW_START_BYTES,
    "WINDOW_MIN_BYTES": path.WINDOW_MIN_BYTES,
    "STATE_FLOOR": lanes.STATE_FLOOR,
    "LATE_FACTOR": outbox.LATE_FACTOR,
    "SHARE_USED": budget.SHARE_USED,
    "WINDOW_SHARE": budget.WINDOW_SHARE,
    "BACK_SHARE": budget.BACK_SHARE,
    "IDLE_SHARE": rates.IDLE_SHARE,
    "MESSAGE_BYTES_MIN": budget.MESSAGE_BYTES_MIN,
    "MESSAGE_OVERHEAD_BYTES": budget.MESSAGE_OVERHEAD_BYTES,
    "CUT": budget.CUT,
    "SEGMENT_BYTES": budget.SEGMENT_BYTES,
    "SEGMENT_OVERHEAD_BYTES": budget.SEGMENT_OVERHEAD_BYTES,
    "FRAME_OVERHEAD_BYTES": budget.FRAME_OVERHEAD_BYTES,
    "RMS_SAMPLES_MAX": codecs.RMS_SAMPLES_MAX,
    "RUN": kernels.RUN,
    "ZSTD_WINDOW_BYTES_MAX": zstd_frame.WINDOW_BYTES_MAX,
    "ZSTD_BLOCK_BYTES_MIN": zstd_frame.BLOCK_CONTENT_BYTES_MIN,
    "SCALE_MIN": scales.SCALE_MIN,
    "SCALE_MAX": scales.SCALE_MAX,
    "LANES": kernels.LANES,
    "NORM_MIN": history.NORM_MIN,
    "DIRECTION_MIN": merge.DIRECTION_MIN,
    "CLIP_CONTRIBUTORS_MIN": weights.CLIP_CONTRIBUTORS_MIN,
    "VERSIONS_KEPT": history.VERSIONS_KEPT,
    "VERSIONS_REMEMBERED": history.VERSIONS_REMEMBERED,
    "NAMES_KEPT": history.NAMES_KEPT,
    "WORK_RATIO_MAX": weights.WORK_RATIO_MAX,
    "SHARE_RATIO_MAX": weights.SHARE_RATIO_MAX,
    "NORMS_MIN": history.NORMS_MIN,
    "TRIM_SHARE": robust.TRIM_SHARE,
}


def constants() -> dict[str, object]:
    """Every constant of the protocol: limits, times, and other amounts."""
    found: dict[str, object] = {}
    for module in (limits, timing):
        found |= {name: value for name, value in vars(module).items() if name.isupper()}
    return found | AMOUNTS


def test_every_constant_with_its_value() -> None:
    told = {row[0].strip("`"): row[1] for row in table("constant", "value", "unit", "sections")}
    assert list(told) == list(constants())
    for name, actual in constants().items():
        value = told[name]
        assert actual == (value.strip("`") if isinstance(actual, str) else number(value)), name


def test_times_are_in_seconds() -> None:
    units = {row[0].strip("`"): row[2] for row in table("constant", "value", "unit", "sections")}
    assert all(units[name] == "s" for name in vars(timing) if name.isupper())


def test_names_of_constants_in_the_text() -> None:
    """The text uses every constant by its name, and no name that the table lacks."""
    before, _, after = DOCUMENT.partition("| constant | value | unit | sections |")
    text = before + after.partition("\n\n")[2]
    used = set(re.findall(r"\b[A-Z]+(?:_[A-Z]+)+\b", text))
    assert used - constants().keys() == NOT_CONSTANTS
    unused = {name for name in constants() if not re.search(rf"\b{name}\b", text)}
    assert not unused


#: Options of ZeroMQ sockets and a file, which look like constants.
NOT_CONSTANTS = {
    "CONNECT_TIMEOUT",
    "HANDSHAKE_IVL",
    "README_CHUNK_FORMAT",
    "RECONNECT_IVL",
    "RECONNECT_IVL_MAX",
    "ROUTER_MANDATORY",
    "TCP_KEEPALIVE",
    "TCP_MAXRT",
    "XPUB_MANUAL",
    "XPUB_VERBOSER",
}
