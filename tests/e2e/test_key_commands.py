"""`narrows keys` as operators and sites type it; a door stands in for the broker."""

from __future__ import annotations

import io
import json
import re
import stat
import time
from pathlib import Path

import pytest
from key_door import Door
from running import Run

from narrows.broker.cli.enrolling import provisional
from narrows.proto.errors import ErrorCode
from narrows.proto.key_holder import KeyHolder, KeyRole
from narrows.proto.keys import (
    Invitation,
    SiteKey,
    check_public_key,
    new_pair,
    read_broker_key,
    read_invitation,
    read_ring,
    read_site_key,
    write_site_key,
)
from narrows.proto.messages import ControlMessage, Enrol, Enrolled, Refuse

ADDRESS = "tcp://broker.example.org:7070"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Commands run in a folder of their own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NARROWS_KEY", raising=False)
    return tmp_path


def secrets_of(folder: Path) -> list[str]:
    """Every secret in the files of a folder."""
    texts = [path.read_text() for path in folder.rglob("*") if path.is_file()]
    return re.findall(r'secret = "(.*)"', "\n".join(texts))


def a_key() -> SiteKey:
    return SiteKey("site-a", new_pair(), ADDRESS, (new_pair().public,))


def public_key_of(output: str) -> str:
    """The key in single quotes in a command that was printed."""
    (found,) = re.findall(r"'(\S{40})'", output)
    return check_public_key(found, "output")


# At the broker's site.


def test_new_makes_a_directory_that_is_its_owners_and_says_what_to_type(
    narrows: Run, folder: Path
) -> None:
    code, output, _ = narrows("keys", "new")
    assert code == 0
    assert stat.S_IMODE((folder / "keys").stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "keys/broker.key").stat().st_mode) == 0o600
    assert (
        "narrows keys invite NAME" in output
        and "narrows broker --keys keys --founder NAME" in output
    )
    code, _, errors = narrows("keys", "new")
    assert code == 2 and "exists" in errors


def test_show_prints_public_parts_only(narrows: Run, folder: Path) -> None:
    narrows("keys", "new")
    server = read_broker_key(Path("keys")).current.public
    narrows("keys", "new", "b.key", "--name", "b", "--broker", ADDRESS, "--server", server)
    shown = narrows("keys", "show")[1] + narrows("keys", "show", "b.key")[1]
    assert server in shown and ADDRESS in shown
    assert read_site_key(Path("b.key")).pair.public in shown
    secrets = secrets_of(folder)
    assert len(secrets) == 2 and not any(secret in shown for secret in secrets)


def test_a_key_made_by_hand_is_allowed_with_the_command_that_is_printed(narrows: Run) -> None:
    narrows("keys", "new")
    server = read_broker_key(Path("keys")).current.public
    _, output, _ = narrows(
        "keys", "new", "b.key", "--name", "b", "--broker", ADDRESS, "--server", server
    )
    key = public_key_of(output)
    code, output, _ = narrows("keys", "allow", "b", key, "--org", "lab", "--role", "operator")
    assert code == 0
    holder = read_ring(Path("keys")).holder(key, time.time())
    assert holder == KeyHolder("b", KeyRole.OPERATOR, "lab")


def test_a_key_that_begins_with_hyphens_is_no_option(narrows: Run) -> None:
    narrows("keys", "new")
    odd = "--" + new_pair().public[2:]
    code, _, errors = narrows("keys", "allow", "a", odd)
    # Not all characters make a key; what counts is that it was read as one.
    assert code == 0 or "not a public key" in errors


def test_a_second_key_ends_the_first_in_a_day_and_the_same_key_again_changes_nothing(
    narrows: Run,
) -> None:
    narrows("keys", "new")
    first, second = new_pair().public, new_pair().public
    narrows("keys", "allow", "a", first)
    _, output, _ = narrows("keys", "allow", "a", second)
    assert first in output
    ring = read_ring(Path("keys"))
    assert narrows("keys", "allow", "a", second)[0] == 0
    assert read_ring(Path("keys")) == ring
    day_s = ring.of("a")[0].until - time.time()
    assert 86_000 < day_s <= 86_400 and ring.of("a")[1].public == second


def test_a_third_key_within_a_day_ends_the_first_at_once_and_says_so(narrows: Run) -> None:
    narrows("keys", "new")
    first, second, third = (new_pair().public for _ in range(3))
    narrows("keys", "allow", "a", first)
    narrows("keys", "allow", "a", second)
    _, output, _ = narrows("keys", "allow", "a", third)
    assert f"Its key {first} ends at once" in output and second in output
    assert [grant.public for grant in read_ring(Path("keys")).of("a")] == [second, third]


def test_list_shows_keys_and_open_invitations(narrows: Run) -> None:
    narrows("keys", "new")
    assert "nobody is admitted" in narrows("keys", "list")[1]
    key = new_pair().public
    narrows("keys", "allow", "a", key, "--org", "lab")
    narrows("keys", "invite", "b", "--address", ADDRESS)
    _, output, _ = narrows("keys", "list")
    assert key in output and "lab" in output and "invited" in output
    rows = json.loads(narrows("keys", "list", "--json")[1])
    assert [(row["name"], row["state"], row["key"]) for row in rows] == [
        ("a", "key", key),
        ("b", "invited", ""),
    ]


def test_revoke_removes_keys_and_invitations(narrows: Run) -> None:
    narrows("keys", "new")
    narrows("keys", "allow", "a", new_pair().public)
    narrows("keys", "invite", "a", "--address", ADDRESS)
    assert narrows("keys", "revoke", "a")[0] == 0
    assert not read_ring(Path("keys")).everybody
    code, _, errors = narrows("keys", "revoke", "a")
    assert code == 2 and "neither a key nor an invitation" in errors


def test_an_invitation_alone_goes_to_standard_output(narrows: Run) -> None:
    narrows("keys", "new")
    code, output, errors = narrows(
        "keys", "invite", "site-a", "--address", ADDRESS, "--valid", "30min", "--org", "lab"
    )
    assert code == 0 and len(output.splitlines()) == 1
    invitation = read_invitation(output)
    assert (invitation.name, invitation.broker) == ("site-a", ADDRESS)
    assert invitation.server == read_broker_key(Path("keys")).current.public
    assert 1700 < invitation.until - time.time() <= 1800
    assert "narrows keys accept" in errors and invitation.token.secret not in errors
    ring = read_ring(Path("keys"))
    token = ring.holder(invitation.token.public, time.time())
    assert token == KeyHolder("site-a", KeyRole.ENROL)
    assert invitation.token.secret not in Path("keys/allowed.toml").read_text()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("allow", "a", "short"), "not a public key"),
        (("allow", "a/b", "KEY"), "letters, digits"),
        (("allow", "a", "KEY", "--role", "lerner"), "did you mean learner?"),
        (("allow", "a", "KEY", "--role", "enrol"), "learner, relay"),
        (("allow", "a", "KEY", "--org", 'a"b'), "organisation"),
        (("allow", "a", "KEY", "--tokens-per-s-max", "-1"), "tokens_per_s_max"),
        (("invite", "a", "--address", "broker:7070"), "tcp://HOST:PORT"),
        (("invite", "a", "--address", ADDRESS, "--valid", "soon"), "a duration"),
        (("invite", "a", "--address", ADDRESS, "--valid", "99999999h"), "at most 366d"),
        (("invite", "a", "--address", ADDRESS, "--valid", "0"), "at most 366d"),
        (("new", "b.key", "--name", "b"), "--broker is missing"),
        (("rotate", "--now"), "narrows keys rotate"),
        (("list", "--keys", "elsewhere"), "narrows keys new --keys elsewhere"),
        (("show", "nothing.key"), "nothing.key"),
        (("accept", "nothing", "--to", "a.key"), "cannot read the invitation"),
        (("accept", "narrows-1-abc", "--to", "a.key"), "the invitation is damaged"),
    ],
)
def test_bad_input_is_named(narrows: Run, arguments: tuple[str, ...], told: str) -> None:
    narrows("keys", "new")
    key = new_pair().public
    code, _, errors = narrows("keys", *(key if text == "KEY" else text for text in arguments))
    assert code == 2 and told in errors
    assert not read_ring(Path("keys")).everybody


def test_other_terms_for_a_name_that_has_keys_are_refused(narrows: Run) -> None:
    narrows("keys", "new")
    narrows("keys", "allow", "a", new_pair().public, "--org", "lab")
    code, _, errors = narrows("keys", "invite", "a", "--address", ADDRESS, "--org", "other")
    assert code == 2 and "narrows keys revoke a" in errors
    assert narrows("keys", "invite", "a", "--address", ADDRESS)[0] == 0


def test_the_broker_rotates_in_two_steps_and_sites_trust_the_successor(narrows: Run) -> None:
    narrows("keys", "new")
    before = read_broker_key(Path("keys")).current.public
    narrows("keys", "new", "b.key", "--name", "b", "--broker", ADDRESS, "--server", before)
    successor = public_key_of(narrows("keys", "rotate")[1])
    assert public_key_of(narrows("keys", "rotate")[1]) == successor
    assert read_broker_key(Path("keys")).current.public == before
    assert narrows("keys", "trust", "b.key", successor)[0] == 0
    assert read_site_key(Path("b.key")).servers == (before, successor)
    code, output, _ = narrows("keys", "rotate", "--now")
    assert code == 0 and successor in output
    assert read_broker_key(Path("keys")).current.public == successor
    narrows("keys", "trust", "b.key", successor, "--only")
    assert read_site_key(Path("b.key")).servers == (successor,)


# At the learner's site.


class Ring:
    """The broker's part of an enrolment, behind a door. Answers may be lost on their way."""

    def __init__(self, *, lost: int = 0) -> None:
        self.token = new_pair()
        self.lost = lost
        self.door = Door(self._answer)
        self.door.admitted[self.token.public] = "token"

    def invitation(self, name: str = "site-a") -> Invitation:
        until = int(time.time()) + 60
        return Invitation(self.door.address, self.door.server.public, name, self.token, until)

    def _answer(self, holder: str, message: ControlMessage) -> ControlMessage | None:
        assert isinstance(message, Enrol)
        name = "site-a"
        if holder == "token":
            # As a broker does it: the invitation is used up before the answer leaves.
            del self.door.admitted[self.token.public]
        self.door.admitted[message.public_key] = name
        self.lost -= 1
        return None if self.lost >= 0 else Enrolled(name)


def test_accept_makes_a_key_whose_secret_never_leaves(narrows: Run, folder: Path) -> None:
    ring = Ring()
    Path("a.invite").write_text(f"{ring.invitation()}\n")
    with ring.door:
        code, output, _ = narrows("keys", "accept", "a.invite", "--to", "site-a.key")
    assert code == 0 and "narrows learner --key site-a.key" in output
    key = read_site_key(Path("site-a.key"))
    assert (key.name, key.broker) == ("site-a", ring.door.address)
    assert key.servers == (ring.door.server.public,)
    assert ring.door.heard[0][1] == Enrol(3, key.pair.public)
    assert stat.S_IMODE(Path("site-a.key").stat().st_mode) == 0o600
    assert not provisional(Path("site-a.key")).exists()
    assert key.pair.secret not in output


def test_an_invitation_is_read_from_standard_input(
    narrows: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = Ring()
    monkeypatch.setattr("sys.stdin", io.StringIO(str(ring.invitation())))
    with ring.door:
        assert narrows("keys", "accept", "-", "--to", "a.key")[0] == 0
    assert read_site_key(Path("a.key")).name == "site-a"


def test_after_a_lost_answer_the_same_command_again_ends_with_the_same_key(narrows: Run) -> None:
    ring = Ring(lost=1)
    accept = ("keys", "accept", str(ring.invitation()), "--to", "a.key")
    with ring.door:
        code, _, _ = narrows(*accept, "--timeout-s", "2")
        assert code == 4 and not Path("a.key").exists()
        key = read_site_key(provisional(Path("a.key")))
        assert narrows(*accept)[0] == 0
    assert read_site_key(Path("a.key")) == key
    assert not provisional(Path("a.key")).exists()


def test_a_used_invitation_is_refused_with_the_command_for_a_new_one(narrows: Run) -> None:
    ring = Ring()
    accept = ("keys", "accept", str(ring.invitation()), "--to")
    with ring.door:
        assert narrows(*accept, "a.key")[0] == 0
        code, _, errors = narrows(*accept, "again.key")
    assert code == 3 and "neither used" in errors and "narrows keys invite site-a" in errors
    assert not Path("again.key").exists()
    assert ring.token.secret not in errors


def test_an_existing_key_is_not_overwritten(narrows: Run) -> None:
    ring = Ring()
    write_site_key(Path("a.key"), ring.door.key("other"))
    with ring.door:
        code, _, errors = narrows("keys", "accept", str(ring.invitation()), "--to", "a.key")
    assert code == 2 and "exists" in errors and not ring.door.heard


def test_a_refusal_is_passed_on(narrows: Run) -> None:
    def refuse(_name: str, _message: ControlMessage) -> ControlMessage:
        return Refuse(ErrorCode.INVITATION, "the invitation is expired", remedy="ask for another")

    with Door(refuse) as door:
        token = new_pair()
        door.admitted[token.public] = "token"
        invitation = Invitation(door.address, door.server.public, "a", token, 1 << 40)
        code, _, errors = narrows("keys", "accept", str(invitation), "--to", "a.key")
    assert code == 3 and "the invitation is expired" in errors and "ask for another" in errors


@pytest.mark.parametrize("lost", [0, 1])
def test_a_site_rotates_its_key_with_the_old_one(narrows: Run, lost: int) -> None:
    ring = Ring(lost=lost)
    old = ring.door.admit(ring.door.key("site-a"))
    write_site_key(Path("a.key"), old)
    with ring.door:
        for _ in range(lost):
            assert narrows("keys", "rotate", "a.key", "--timeout-s", "2")[0] == 4
            assert read_site_key(Path("a.key")) == old
        code, output, _ = narrows("keys", "rotate", "a.key")
    assert code == 0
    new = read_site_key(Path("a.key"))
    assert new.pair.public in output and new.pair != old.pair
    assert (new.name, new.broker, new.servers) == (old.name, old.broker, old.servers)
    handed_over = {m.public_key for _, m in ring.door.heard if isinstance(m, Enrol)}
    assert handed_over == {new.pair.public}


# The key of a learner and of `narrows status`.


def test_a_name_that_is_not_the_keys_is_refused_here(narrows: Run) -> None:
    write_site_key(Path("a.key"), a_key())
    code, _, errors = narrows("learner", "--key", "a.key", "--name", "site-b")
    assert code == 2 and "of another name" in errors and "narrows keys invite site-b" in errors


def test_without_a_key_broker_and_name_are_needed(narrows: Run) -> None:
    code, _, errors = narrows("learner", "--name", "a")
    assert code == 2 and "broker is missing" in errors and "NARROWS_KEY" in errors


def test_status_with_an_unknown_key_prints_the_command(
    narrows: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = Ring()
    key = ring.door.key("site-a")
    write_site_key(Path("a.key"), key)
    monkeypatch.setenv("NARROWS_KEY", "a.key")
    with ring.door:
        code, _, errors = narrows("status")
    assert code == 3 and f"narrows keys allow site-a '{key.pair.public}'" in errors


def test_a_secret_that_others_may_read_is_refused_everywhere(narrows: Run) -> None:
    write_site_key(Path("a.key"), a_key())
    Path("a.key").chmod(0o644)
    for command in (("learner", "--key"), ("status", "--key"), ("keys", "show")):
        code, _, errors = narrows(*command, "a.key")
        assert code == 2 and "chmod 600 a.key" in errors
