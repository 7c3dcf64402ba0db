"""Tells the service manager that started this process how it is: systemd's sd_notify, by hand.

It is one datagram to a Unix socket that the environment names. Without one nothing is told.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

SEND_S_MAX: Final = 1.0
"""Longest wait for a manager that takes no message: the loop has other work."""


class ServiceManager:
    """The manager of this process, if there is one."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._address = environment.get("NOTIFY_SOCKET", "")
        if self._address.startswith("@"):  # A name that is no file.
            self._address = "\0" + self._address[1:]
        self._every_s = math.inf
        self.due_at = math.inf
        """When the manager has to hear next that the loop turns."""
        own = str(os.getpid())
        watchdog_us = environment.get("WATCHDOG_USEC", "")
        if watchdog_us.isdigit() and environment.get("WATCHDOG_PID", own) == own:
            self._every_s = int(watchdog_us) / 1e6 / 2
            self.due_at = -math.inf

    def alive(self, now: float) -> None:
        """Tells that the loop turns, where the manager ends processes that do not say so."""
        if now >= self.due_at:
            self.due_at = now + self._every_s
            self.tell("WATCHDOG=1")

    def tell(self, text: str) -> None:
        """Sends lines such as READY=1. A manager that does not listen changes nothing here."""
        if self._address:
            with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.settimeout(SEND_S_MAX)
                sender.sendto(text.encode(), self._address)
