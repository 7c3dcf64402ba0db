"""Quotas of the holders of keys: who has used up what, and until when. [pure]

Each holder has a token bucket per kind. A relay has the sum for the learners that it carries.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from narrows.proto.key_holder import KeyHolder
from narrows.proto.limits import PAYLOAD_BYTES_MAX
from narrows.proto.quotas import (
    BYTES_BURST_S,
    CONTROL_UNIT_BYTES,
    ENROLMENTS,
    TOLD_S,
    Ask,
    Quota,
    quotas,
)

REST_S: Final = ENROLMENTS.burst / ENROLMENTS.per_s
"""A holder that has asked for nothing for this long has full buckets: its account is dropped. The
bucket of enrolments is the slowest."""


@dataclass
class Bucket:
    """Room that one holder has left of one kind."""

    room: float
    filled_at: float
    versions: int

    def fill(self, quota: Quota, times: int, now: float, versions: int) -> None:
        """Fills the bucket with time and with versions; `times` learners share it."""
        assert now >= self.filled_at, "time does not run backwards"
        assert versions >= self.versions, "versions do not fall"
        grown = quota.per_s * (now - self.filled_at)
        grown += quota.per_version * (versions - self.versions)
        # A quota that has become smaller takes nothing back.
        self.room = max(self.room, min(times * quota.burst, self.room + times * grown))
        self.filled_at, self.versions = now, versions

    def has_room(self, amount: float) -> bool:
        """True if an amount may be taken. One that is larger than 1 may leave a debt, which time
        pays: else a long message would never have room."""
        return self.room >= min(amount, 1.0)

    def take(self, amount: float) -> bool:
        """Takes an amount if there is room for it."""
        assert amount >= 0.0
        if not self.has_room(amount):
            return False
        self.room -= amount
        return True


@dataclass(frozen=True)
class Excess:
    """A holder has used up a quota: its message is dropped."""

    kind: Ask
    dropped: int
    """Messages dropped for this reason since it was last told; 0: say nothing now."""


@dataclass
class _HolderAccount:
    times: int
    heard_at: float
    buckets: dict[Ask, Bucket] = field(default_factory=dict[Ask, Bucket])
    bytes_room: float = math.inf
    """Bytes that may still come; infinite before the first."""
    bytes_at: float = 0.0
    told_at: dict[Ask, float] = field(default_factory=dict[Ask, float])
    dropped: dict[Ask, int] = field(default_factory=dict[Ask, int])


@dataclass
class Quotas:
    """Accounts of the holders, by `KeyHolder.account`. The run tells what depends on its model."""

    fragments: int
    versions: int = 0
    """Sum of the versions that the broker has published."""
    dropped: int = 0
    """Messages dropped since the start."""
    _quotas: Mapping[Ask, Quota] = field(default_factory=dict[Ask, Quota])
    _accounts: dict[str, _HolderAccount] = field(default_factory=dict[str, _HolderAccount])
    """The one that was heard longest ago comes first."""

    def __post_init__(self) -> None:
        self.cut([])

    def __len__(self) -> int:
        return len(self._accounts)

    def cut(self, chunks: Sequence[int]) -> None:
        """Takes the largest number of chunks of each fragment, once the model is known."""
        self._quotas = quotas(chunks, self.fragments)
        for account in self._accounts.values():
            # What it has used was of another cut.
            account.buckets.pop(Ask.CHUNKS, None)

    # Before a message is decoded.

    def control(self, holder: KeyHolder, size_bytes: int, now: float) -> Excess | None:
        """A control message has come; Excess: drop it."""
        if (excess := self.look(holder, Ask.REFUSED, 1.0, now)) is not None:
            return excess
        return self.take(holder, Ask.CONTROL, -(-max(size_bytes, 1) // CONTROL_UNIT_BYTES), now)

    def data(
        self, holder: KeyHolder, size_bytes: int, bits_per_s: float, now: float
    ) -> Excess | None:
        """A data message has come, from a holder of this rate (0: no limit); Excess: drop it."""
        if (excess := self.look(holder, Ask.REFUSED, 1.0, now)) is not None:
            return excess
        account = self._account(holder, now)
        if bits_per_s and not self._has_byte_room(account, size_bytes, bits_per_s / 8, now):
            return self._exceed(account, Ask.BYTES, now)
        return self.take(holder, Ask.CHUNKS, 1.0, now)

    def _has_byte_room(
        self, account: _HolderAccount, size_bytes: int, bytes_per_s: float, now: float
    ) -> bool:
        burst = BYTES_BURST_S * bytes_per_s + PAYLOAD_BYTES_MAX
        if math.isinf(account.bytes_room):
            account.bytes_room = burst
        else:
            grown = account.bytes_room + bytes_per_s * (now - account.bytes_at)
            # What came at a higher rate before was within that rate.
            account.bytes_room = max(account.bytes_room, min(burst, grown))
        account.bytes_at = now
        if account.bytes_room < size_bytes:
            return False
        account.bytes_room -= size_bytes
        return True

    # Once it is known what is asked.

    def take(self, holder: KeyHolder, kind: Ask, amount: float, now: float) -> Excess | None:
        """Takes an amount from a holder's quota; Excess: there is no room, nothing is taken."""
        account = self._account(holder, now)
        if self._bucket(account, kind, now).take(amount):
            return None
        return self._exceed(account, kind, now)

    def charge(self, holder: KeyHolder, kind: Ask, amount: float, now: float) -> None:
        """Charges what has been done already. The debt is at most one burst: it ends soon."""
        account = self._account(holder, now)
        bucket = self._bucket(account, kind, now)
        bucket.room = max(bucket.room - amount, -account.times * self._quotas[kind].burst)

    def look(self, holder: KeyHolder, kind: Ask, amount: float, now: float) -> Excess | None:
        """As `take`, but takes nothing: what it costs is known when it is done."""
        account = self._account(holder, now)
        if self._bucket(account, kind, now).has_room(amount):
            return None
        return self._exceed(account, kind, now)

    # Accounts.

    def _account(self, holder: KeyHolder, now: float) -> _HolderAccount:
        account = self._accounts.pop(holder.account, None) or _HolderAccount(1, now)
        account.times, account.heard_at = max(1, len(holder.carries)), now
        self._accounts[holder.account] = account
        oldest = next(iter(self._accounts))
        if now >= self._accounts[oldest].heard_at + REST_S:
            del self._accounts[oldest]
        return account

    def _bucket(self, account: _HolderAccount, kind: Ask, now: float) -> Bucket:
        quota = self._quotas[kind]
        bucket = account.buckets.get(kind)
        if bucket is None:
            bucket = Bucket(account.times * quota.burst, now, self.versions)
            account.buckets[kind] = bucket
        bucket.fill(quota, account.times, now, self.versions)
        return bucket

    def _exceed(self, account: _HolderAccount, kind: Ask, now: float) -> Excess:
        self.dropped += 1
        dropped = account.dropped.get(kind, 0) + 1
        if now < account.told_at.get(kind, -math.inf) + TOLD_S:
            account.dropped[kind] = dropped
            return Excess(kind, 0)
        account.told_at[kind], account.dropped[kind] = now, 0
        return Excess(kind, dropped)
