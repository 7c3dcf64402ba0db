"""Every time of the protocol that a peer can notice, in seconds, with its reason.

PROTOCOL.md lists them under the same names; a test compares the two.
"""

from __future__ import annotations

from typing import Final

# Joining.

HELLO_S: Final = 0.25
"""Pause before the first repeat of a Hello. Each later pause is twice as long, for ever; a new
connection begins again."""

HELLO_MAX_S: Final = 5.0
"""Longest pause between two Hellos, before the jitter."""

ASK_LAYOUT_S: Final = 0.5
"""A learner that was refused for its layout repeats its question for the run's after this time."""

LAYOUT_GONE_S: Final = 10.0
"""It ends with the refusal as it came if no part has come for so long: a part takes 4 s on the
slowest line that a budget can name."""

REDIAL_S: Final = 5.0
"""A connection on which Hellos have no answer for this long is given up for a new one: a firewall
or a proxy may have forgotten it. The next one gets twice the time, until something is heard."""

REDIAL_MAX_S: Final = 60.0
"""Longest time that a connection without an answer is kept, or twice the time of a Hello on the
slowest line if that is longer."""

QUIET_S: Final = 4.0
"""Without a sign of the broker for this long the learner is offline and says Hello again."""

PROBE_S: Final = 2.0
"""Time that the holder of a name has to answer when a newcomer claims it (liveness.probe)."""

# Liveness and reports.

BEAT_S: Final = 1.0
"""Longest time between two Beats to a learner (broker.beat)."""

LATE_S: Final = 3.0
"""Nothing heard for this long: a learner is late (liveness.late)."""

LOST_S: Final = 10.0
"""Nothing heard for this long: a learner is lost, and its session is over (liveness.lost)."""

FORGET_S: Final = 21600.0
"""A learner that is gone is remembered for this long (liveness.forget)."""

REPORT_S: Final = 0.1
"""Time between two Reports while steps are made."""

IDLE_REPORT_S: Final = 1.0
"""Time between two Reports without news."""

EXTRAPOLATION_MAX_S: Final = 60.0
"""The run's clock runs on by itself for at most this long after it was last told."""

# Rounds.

REOPEN_S: Final = 0.5
"""A round that was closed without a merge is opened again after this long at the earliest."""

ADOPTION_WAIT_S: Final = 60.0
"""The lockstep modes wait this long for a joiner to adopt the fragments, then go on without it."""

ANSWER_AGAIN_S: Final = 5.0
"""After a push that failed, rounds that are still open are answered anew after this long."""

# Repair.

LEARNER_REPAIR_S: Final = 0.5
"""A learner asks for what is missing after this long without progress, then twice as late each
time."""

BROKER_REPAIR_S: Final = 1.0
"""The broker asks for missing chunks after this long without progress, then twice as late each
time. What is only late is not sent twice: its sender knows that it is on its way."""

REPAIR_MAX_S: Final = 8.0
"""Longest pause between two requests for the same transfer, before the jitter."""

# The end.

BROKER_GONE_S: Final = 60.0
"""A learner that leaves waits at least this long for a broker that has gone: a restart takes its
time."""

PATIENCE_SAMPLE_S: Final = 1.0
"""Shortest sample of a peer's rate: seconds in which bytes were awaited."""

# The run's clock.

CLOCK_FIRST_S: Final = 60.0
"""A learner without others is measured by its first minute. For so long the clock also waits, at
the start of a broker, for a second learner to compare the first one with."""

CLOCK_RESTS_S: Final = 2.0
"""Without a merge for this long, and for twice the usual distance of merges: the clock rests."""

# Credit.

ACKNOWLEDGE_S: Final = 0.05
"""A receiver tells its positions this often while data comes."""

ACKNOWLEDGE_SOON_S: Final = 0.01
"""A receiver of ACKNOWLEDGE_BYTES tells its positions this often: the sooner, the less must be
under way."""

ACKNOWLEDGE_SLACK_S: Final = 0.01
"""Time allowed to a receiver on a busy machine beyond the round trip."""

DELIVERY_MEMORY_S: Final = 10.0
"""The rate is the largest, the round trip the smallest of at least this many last seconds."""

STALL_S: Final = 5.0
"""A peer without progress for this long has lost what was under way."""

LATE_STALL_MAX_S: Final = 15.0
"""Longest stall that a late acknowledgement makes of STALL_S."""

STANDSTILL_S: Final = 1.0
"""A stream that has not moved for this long while others have is dead; at least four round
trips."""

ROUND_TRIP_S: Final = 0.4
"""Round trip that is assumed until one was seen."""

ROUND_TRIP_MAX_S: Final = 1.0
"""A round trip counts as at most this: what was measured over an outage does not say how long to
be patient with what was sent."""

STREAM_LOOK_S: Final = 0.25
"""A sender looks this often for a stream that stands still."""

# Rates.

RATE_WINDOW_S: Final = 1.0
"""Length of the window in which no more than WINDOW_SHARE of the rate leaves."""

RATE_BURST_S: Final = 0.1
"""Seconds of its rate that a sender that was late may make up for: on a busy machine a poll loop
is kept from its core for longer than a few milliseconds."""

RATE_PAUSE_BURST_S: Final = 0.02
"""The same after a pause in which nothing waited: two messages. More at once would overrun the
queue of a line of just this rate, and take control messages with it."""

MESSAGE_S: Final = 0.01
"""The longest that one message may occupy the slowest rate that it uses, so that control never
waits for long behind it."""

SHARE_IDLE_S: Final = 1.0
"""A learner that has sent nothing for this long is idle; less would tell everybody twice in each
round."""

SHARE_DIVIDE_S: Final = 0.05
"""Shares of the uplink are divided anew at most this often."""

RATE_CONFIRM_S: Final = 5.0
"""A learner that has not confirmed a lower rate for this long is counted by what arrives from it:
what it claims to use must not be lost to the others."""

# Sockets.

LINGER_S: Final = 1.0
"""A socket that is closed tries this long to send the rest: a Bye gets out, and no socket keeps a
process from ending."""

UNACKNOWLEDGED_MAX_S: Final = 20.0
"""A connection on which nothing is acknowledged for this long, neither data nor probes, is closed
and dialled again: a firewall may have forgotten it, and the kernel alone would try for a quarter of
an hour."""

KEEPALIVE_IDLE_S: Final = 10.0
"""Idle time before the kernel's first probe: probes find out for a side that only receives, and
keep NAT and firewalls from forgetting an idle connection."""

KEEPALIVE_INTERVAL_S: Final = 5.0
"""Time between two probes; two without an answer close the connection."""

CONNECT_TIMEOUT_S: Final = 5.0
"""Longest attempt to connect. The kernel sends a lost first packet again after 1, 2, 4, ... 64 s:
over an outage that is longer than the outage."""

HANDSHAKE_S: Final = 10.0
"""Longest ZMTP handshake: half-open ones (port scanners, slow-loris) are dropped."""

RECONNECT_S: Final = 0.1
"""First pause before a connection is dialled again."""

RECONNECT_MAX_S: Final = 2.0
"""Longest such pause. Without one a hundred learners would hammer a restarting broker; but it also
decides how long a broker is back before anybody notices."""
