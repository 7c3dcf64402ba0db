"""The rules of a key: which messages its role may send, and for which names it speaks."""

from __future__ import annotations

import time

import pytest
from machines import hello

from narrows.broker.process.gate import Gate
from narrows.broker.process.reception import check_name, check_speaker
from narrows.broker.syncer import status_for
from narrows.proto import messages as msg
from narrows.proto.errors import RemoteProtocolError
from narrows.proto.key_holder import KeyHolder, KeyRole
from narrows.proto.keys import BrokerKey, Keyring, new_pair

A = KeyHolder("a")
RELAY = KeyHolder("edge", KeyRole.RELAY, carries=("a", "b"))
BYE = msg.Bye("enough")


@pytest.mark.parametrize(
    ("holder", "message", "speaks_as", "code"),
    [
        (A, hello("a"), "", ""),
        (A, hello("b"), "", "key_name"),
        (A, BYE, "a", ""),
        (A, BYE, "b", "key_name"),
        (A, msg.AskStatus(), "", ""),
        (RELAY, hello("b"), "", ""),
        (RELAY, hello("edge"), "", "key_name"),
        (RELAY, BYE, "c", "key_name"),
        (KeyHolder("m", KeyRole.MONITOR), msg.AskStatus(), "", ""),
        (KeyHolder("m", KeyRole.MONITOR), hello("m"), "", "key_role"),
        (KeyHolder("o", KeyRole.OPERATOR), BYE, "a", "key_role"),
        (KeyHolder("n", KeyRole.ENROL), msg.AskStatus(), "", "key_role"),
    ],
)
def test_who_may_say_what(
    holder: KeyHolder, message: msg.ControlMessage, speaks_as: str, code: str
) -> None:
    try:
        check_speaker(holder, message, speaks_as)
        found = ""
    except RemoteProtocolError as error:
        found = str(error.code)
    assert found == code


def test_the_refusal_of_a_name_shows_both() -> None:
    with pytest.raises(RemoteProtocolError, match=r"expected a, b, got 'c'"):
        check_name(RELAY, "c")


class Answers:
    """A ZAP socket that is never asked."""


def gate_of(ring: Keyring, now: float) -> Gate:
    gate = Gate(Answers(), BrokerKey(new_pair()))  # type: ignore[arg-type]
    gate.admit(ring, now)
    return gate


def test_the_gate_names_the_keys_that_are_not_what_they_were() -> None:
    now, old, new, other = time.time(), new_pair().public, new_pair().public, new_pair().public
    ring = Keyring().allow(A, old, now=now).allow(KeyHolder("b"), other, now=now)
    gate = gate_of(ring, now)
    assert gate.holder(old) == A and gate.has(A)
    assert not gate.admit(ring.allow(A, new, now=now), now)
    assert gate.expires_at() == now + 86_400
    assert gate.admit(gate.ring, now + 86_400) == {old: A}
    assert gate.holder(old) is None and gate.holder(new) == A and gate.has(A)
    richer = KeyHolder("b", tokens_per_s_max=5.0)
    now += 86_400
    changed = gate.ring.revoke("b").allow(richer, other, now=now)
    assert gate.admit(changed, now) == {other: KeyHolder("b")}
    assert gate.admit(gate.ring.revoke("a"), now) == {new: A} and not gate.has(A)


def test_an_invitation_may_enrol_and_nothing_else() -> None:
    token = new_pair().public
    gate = gate_of(Keyring().invite(A, token, until=1.0), 5.0)
    assert gate.holder(token) == KeyHolder("a", KeyRole.ENROL)
    assert not gate.has(A)


def test_an_invitation_that_expired_a_day_ago_is_nobody_any_more() -> None:
    token = new_pair().public
    gate = gate_of(Keyring().invite(A, token, until=1000.0), 1000.0 + 86_399)
    invited = gate.holder(token)
    assert invited is not None and gate.expires_at() == 1000.0 + 86_400
    assert gate.admit(gate.ring, gate.expires_at()) == {token: invited}
    assert gate.holder(token) is None and gate.expires_at() == float("inf")


def test_a_status_shows_to_each_its_own() -> None:
    rows = tuple(msg.LearnerStatus(
        name=name, incarnation="", address="", state="live", last_heard_s=0.0, step=0, tokens=0,
        step_s=0.0, loss=None, contributions=0, refused=0, missed_running=0,
        ledger=msg.TokenLedger(), up_bytes=0, down_bytes=0,
    ) for name in "abc")  # fmt: skip
    status = msg.Status(
        run_id="", epoch=(1, 1, 1), phase=msg.Phase.RUNNING, mode=msg.Mode.DECOUPLED, uptime_s=0.0,
        versions=(), rounds=(), run_tokens=0, goal_tokens=0, tokens_per_s=0.0, merges=0,
        contributions_merged=0, contributions_refused={}, mean_contributors_per_merge=0.0,
        longest_merge_gap_s=0.0, norms_clipped=0, up_bytes=0, down_bytes=0, checkpoint_version=0,
        waiting_for="b to adopt the fragments", learners=rows,
    )  # fmt: skip

    def shown(holder: KeyHolder | None) -> str:
        return "".join(each.name for each in status_for(holder, status).learners)

    assert shown(None) == shown(KeyHolder("o", KeyRole.OPERATOR)) == "abc"
    assert shown(RELAY) == "ab" and shown(A) == "a"
    assert shown(KeyHolder("m", KeyRole.MONITOR)) == ""

    def told(holder: KeyHolder | None) -> str:
        return status_for(holder, status).waiting_for

    # It names other learners, and what they say.
    assert told(None) == told(KeyHolder("o", KeyRole.OPERATOR)) == "b to adopt the fragments"
    assert told(A) == told(RELAY) == told(KeyHolder("m", KeyRole.MONITOR)) == ""
