"""Frames become messages here: decoded, and spoken by whom their connection's key allows.

Name, role and organisation come from the key, never from the message. A message that breaks this
has no effect. It is counted; the log names each holder once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from narrows.broker.process.named import Named
from narrows.broker.process.origin import MessageOrigin
from narrows.broker.process.turnstile import Turnstile
from narrows.broker.syncer import RunState, refusal
from narrows.broker.syncer import events as ev
from narrows.proto import messages as msg
from narrows.proto.errors import ErrorCode, RemoteProtocolError, printable
from narrows.proto.frames import decode_control, decode_data, topic_name
from narrows.proto.key_holder import KeyHolder
from narrows.proto.limits import CONTROL_UP_BYTES_MAX

_log = logging.getLogger("narrows.broker")


class Reception:
    """Takes frames from connections; gives messages of those who may send them."""

    def __init__(
        self,
        run: RunState,
        send: Callable[[bytes, msg.ControlMessage], None],
        turnstile: Turnstile,
        note: Callable[[ev.Note], None],
    ) -> None:
        self._run, self._send, self._turnstile, self._note = run, send, turnstile, note
        self._named = Named()
        self.bad_frames = 0

    def control(
        self, peer: bytes, origin: MessageOrigin, frames: list[bytes]
    ) -> msg.ControlMessage | None:
        """The message, None if it is refused or dropped."""
        if not self._turnstile.control(peer, origin.holder, frames, time.monotonic()):
            return None
        try:
            if len(frames) != 1:
                raise _bad_frame_count(len(frames))
            message = decode_control(frames[0], CONTROL_UP_BYTES_MAX)
            if origin.holder is not None:
                member = self._run.roster.by_peer(peer)
                check_speaker(origin.holder, message, member.name if member else "")
        except RemoteProtocolError as error:
            self.refuse(origin, error, f"frame {self.bad_frames + 1} from {origin.address}")
            self._send(peer, refusal(error))
            return None
        passes = self._turnstile.message(peer, origin.holder, message, time.monotonic())
        return message if passes else None

    def data(self, origin: MessageOrigin, frames: list[bytes]) -> msg.Header | None:
        """The header of a data message, None if it is refused or dropped."""
        if not self._turnstile.data(origin.holder, frames, time.monotonic()):
            return None
        try:
            header, _ = decode_data(frames)
            if origin.holder is not None:
                check_name(origin.holder, header.learner)
        except RemoteProtocolError as error:
            self.refuse(origin, error, f"data message {self.bad_frames + 1}")
            return None
        return header

    def subscription(self, origin: MessageOrigin, topic: bytes) -> bool:
        """True if the connection may listen to a topic: it must be a learner's of its own."""
        name = topic_name(topic)
        try:
            if name is None:
                raise RemoteProtocolError(
                    ErrorCode.BAD_FRAME, "subscription",
                    expected="the topic of a learner", got=repr(topic[:80]),
                )  # fmt: skip
            if origin.holder is not None:
                check_name(origin.holder, name)
        except RemoteProtocolError as error:
            self.refuse(origin, error, f"subscription from {origin.address}")
            return False
        return True

    def refuse(self, origin: MessageOrigin, error: RemoteProtocolError, what: str) -> None:
        """Counts a refusal. Logs the first of each holder, or as many as `Repeats` lets pass."""
        self._run.tally.refuse(error.code)
        self._turnstile.refused(origin.holder, 1, time.monotonic())
        if error.code in (ErrorCode.KEY_NAME, ErrorCode.KEY_ROLE):
            name = origin.holder.account if origin.holder is not None else origin.key
            if self._named.is_due(f"{error.code} {name}", time.monotonic()):
                where = f"from {origin.address}, which is not repeated within the hour"
                _log.warning("%s refused, %s: %s", name, where, printable(str(error)))
            return
        self.bad_frames += 1
        who = origin.holder.account if origin.holder is not None else origin.address
        self._note(ev.Note("warning", f"{what} refused: {error}", about=f"{error.code} {who}"))


def check_speaker(holder: KeyHolder, message: msg.ControlMessage, speaks_as: str) -> None:
    """Raises RemoteProtocolError unless `holder` may send `message` on a connection that speaks
    as the learner `speaks_as` (empty: it has no session)."""
    tag = str(type(message).__struct_config__.tag)
    if not holder.may_say(tag):
        raise RemoteProtocolError(
            ErrorCode.KEY_ROLE, f"the key of {holder.name} is no key for this message",
            expected=f"what a key of role {holder.role} may send", got=tag,
            remedy="use a key of another role, or ask the broker's operator for one",
        )  # fmt: skip
    if isinstance(message, msg.Hello):
        check_name(holder, message.name)
    elif speaks_as and holder.trains:
        check_name(holder, speaks_as)


def check_name(holder: KeyHolder, learner: str) -> None:
    """Raises RemoteProtocolError KEY_NAME unless `holder` speaks for the learner."""
    if not holder.speaks_for(learner):
        raise RemoteProtocolError(
            ErrorCode.KEY_NAME, f"the key of {holder.name} does not speak for this learner",
            expected=", ".join(holder.carries) or holder.name, got=repr(learner[:80]),
            remedy="the key says the name: leave --name out, or use the key of that name",
        )  # fmt: skip


def _bad_frame_count(count: int) -> RemoteProtocolError:
    return RemoteProtocolError(
        ErrorCode.BAD_FRAME, "control message", expected="1 frame", got=f"{count} frames"
    )
