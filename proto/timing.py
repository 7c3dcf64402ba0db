"""Every time that a peer or a user can notice, in seconds, with its reason.

The times of a budget (bursts, windows) stand in flow, those of ZeroMQ sockets in sockets.
"""

from __future__ import annotations

from typing import Final

# Signs of life.

BEAT_S: Final = 1.0
"""Longest time between two Beats. They repeat the whole state: a lost one is a delay."""

REPORT_S: Final = 1.0
"""Time between two Reports. The broker takes step times from them, so a learner waits for the next
boundary if one is due before long."""

HEARD_S: Final = 3.0
"""A learner that was heard within this time counts: rounds wait for it, and its name is taken.
It falls silent if three Reports are lost in a row, or if its process stops."""

SILENT_S: Final = 3.0
"""A learner that has heard nothing for this long is offline and says Hello."""

# Joining.

HELLO_S: Final = 1.0
"""Time between two Hellos without an answer."""

NAME_IN_USE_S: Final = 10.0
"""A learner that is told `name_in_use` says Hello for this long before it raises: the holder is
most often its own process that died just now, and its name is free after HEARD_S."""

OVER_CAPACITY_S: Final = 60.0
"""The same for `over_capacity`: a place is free as soon as somebody leaves."""

REDIAL_S: Final = 5.0
"""A socket that libzmq has given up is made anew, with the key file read again, at most
this often."""

# Repair.

REPAIR_S: Final = 1.0
"""A receiver asks for what is missing after this long without progress of a transfer."""

REPAIR_MAX_S: Final = 8.0
"""While nothing at all comes from the peer, the receiver asks half as often each time, down to once
in this time: the line is cut, and questions would pile up."""

COPY_AGAIN_S: Final = 1.0
"""A learner that could not make a published copy, or found it damaged, tries again after this long.
The pause doubles from failure to failure: a relay that damages everything, or a machine that is
short of memory, must not make it fetch and compute without end."""

COPY_AGAIN_MAX_S: Final = 60.0
"""The pause grows no longer than this. After as long without a failure it is short again."""

ANNOUNCE_S: Final = 10.0
"""A learner announces a push again after this long without its outcome."""

DISK_AGAIN_S: Final = 2.0
"""The broker tries a commit again after this long when the disk is full."""

# Work.

LATE_STEP_PERIODS: Final = 0.5
"""A learner whose step takes longer than this share of the period pushes at every boundary."""

# The end.

LEAVE_S: Final = 30.0
"""A learner that leaves, or that a run's end waits for, is given up when nothing of it has moved
for this long."""

LEAVE_MAX_S: Final = 600.0
"""It is given up after this long in any case."""

RETURN_S: Final = 8.0
"""A learner whose line works is here again this long after a start of the broker: CONNECT_TIMEOUT
and RECONNECT_IVL_MAX are 7 s together."""

# Bad input.

REFUSALS_S: Final = 60.0
"""Refused messages of a key are counted over this long; with REFUSALS_MAX of them the key is kept
out for as long again."""

REFUSALS_MAX: Final = 100

# Quotas of a key. The broker neither reads nor answers what is above a quota, and counts it as a
# refused message.

CONTROLS_PER_S: Final = 200
"""Control messages of a key in a second, and as many for each learner of its site that is here. A
learner sends a few, or some hundred if its steps take a millisecond."""

CONTROLS_AT_ONCE: Final = 2048
"""Control messages that may come at once beyond those of a second: after a start of the broker no
learner is here, and 1,024 of them say Hello and Report."""

HANDSHAKES_AT_ONCE: Final = 10_000
"""Handshakes of a key at once: 1,024 learners have nine connections each."""

HANDSHAKES_PER_S: Final = 50
