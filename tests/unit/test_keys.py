"""Key files, key rings and invitations: what is written is read again, what is wrong is named."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import get_args

import pytest

from narrows.proto.errors import ConfigError
from narrows.proto.key_holder import MAY_SAY, KeyHolder, KeyRole
from narrows.proto.keys import (
    Invitation,
    Keyring,
    SiteKey,
    broker_key_path,
    check_public_key,
    edit_ring,
    new_broker_key,
    new_pair,
    pair_of_secret,
    read_broker_key,
    read_invitation,
    read_ring,
    read_site_key,
    ring_path,
    write_site_key,
)
from narrows.proto.keys.ring import ROTATION_S, write_ring
from narrows.proto.messages import ControlMessage

NOW = 1_800_000_000.0


def site_key() -> SiteKey:
    return SiteKey("site-a", new_pair(), "tcp://broker.example.org:7070", (new_pair().public,))


def test_a_site_key_is_read_as_it_was_written(tmp_path: Path) -> None:
    key = site_key()
    write_site_key(tmp_path / "a.key", key)
    assert read_site_key(tmp_path / "a.key") == key
    assert stat.S_IMODE((tmp_path / "a.key").stat().st_mode) == 0o600


def test_a_key_file_is_never_overwritten(tmp_path: Path) -> None:
    key = site_key()
    write_site_key(tmp_path / "a.key", key)
    with pytest.raises(ConfigError, match="exists"):
        write_site_key(tmp_path / "a.key", site_key())
    assert read_site_key(tmp_path / "a.key") == key


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660])
def test_a_secret_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    write_site_key(tmp_path / "a.key", site_key())
    new_broker_key(tmp_path)
    for path in (tmp_path / "a.key", broker_key_path(tmp_path)):
        path.chmod(mode)
    refusal = r"others may read it.*chmod 600"
    with pytest.raises(ConfigError, match=refusal):
        read_site_key(tmp_path / "a.key")
    with pytest.raises(ConfigError, match=refusal):
        read_broker_key(tmp_path)


def test_no_printed_form_shows_a_secret(tmp_path: Path) -> None:
    pair, key = new_pair(), site_key()
    invitation = Invitation("tcp://h:1", new_pair().public, "site-a", pair, 5)
    for thing, secret in ((pair, pair.secret), (key, key.pair.secret), (invitation, pair.secret)):
        assert secret not in repr(thing)
    path = tmp_path / "a.key"
    write_site_key(path, key)
    path.write_text(path.read_text().replace("secret =", "secret"))
    with pytest.raises(ConfigError) as caught:
        read_site_key(path)
    assert key.pair.secret not in str(caught.value)


def test_a_secret_of_wrong_length_is_refused_unseen() -> None:
    with pytest.raises(ConfigError, match="39 characters") as caught:
        pair_of_secret("x" * 39, "a.key")
    assert "xxx" not in str(caught.value)


def test_a_directory_without_a_broker_key_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="narrows keys new"):
        read_broker_key(tmp_path)


def test_a_pipe_in_the_place_of_a_key_does_not_hang(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "a.key", 0o600)
    with pytest.raises(ConfigError, match="no key file"):
        read_site_key(tmp_path / "a.key")


def test_an_invitation_survives_line_breaks_and_no_other_change() -> None:
    invitation = Invitation("tcp://h:7070", new_pair().public, "site-a", new_pair(), int(NOW))
    text = str(invitation)
    assert read_invitation(f"  {text[:60]}\n  {text[60:]}\n") == invitation
    for at in range(len(text)):
        other = text[:at] + ("A" if text[at] != "A" else "B") + text[at + 1 :]
        with pytest.raises(ConfigError):
            read_invitation(other)


def test_a_ring_is_read_as_it_was_written(tmp_path: Path) -> None:
    ring = (
        Keyring()
        .allow(
            KeyHolder("site-a", organisation="uni x", tokens_per_s_max=5.5),
            new_pair().public,
            now=NOW,
        )
        .allow(KeyHolder("edge", KeyRole.RELAY, carries=("a", "b")), new_pair().public, now=NOW)
        .invite(KeyHolder("site-b"), new_pair().public, until=NOW + 60)
    )
    write_ring(tmp_path, ring)
    assert read_ring(tmp_path) == ring
    with edit_ring(tmp_path) as rings:
        rings[0] = rings[0].revoke("site-a")
    assert [g.holder.name for g in read_ring(tmp_path).grants] == ["edge"]


def test_a_second_key_ends_the_first_in_a_day() -> None:
    keys = [new_pair().public for _ in range(3)]
    ring, site = Keyring(), KeyHolder("site-a")
    for key in keys:
        ring = ring.allow(site, key, now=NOW)
    assert ring.holder(keys[0], NOW) is None, "the third key replaced the first"
    assert ring.holder(keys[1], NOW + ROTATION_S - 1) == site
    assert ring.holder(keys[1], NOW + ROTATION_S) is None
    assert ring.holder(keys[2], NOW + 1e9) == site


def test_an_invitation_becomes_a_key_once_and_in_time() -> None:
    token, key = new_pair().public, new_pair().public
    ring = Keyring().invite(KeyHolder("site-a", organisation="uni"), token, until=NOW + 60)
    assert ring.holder(token, NOW) == KeyHolder("site-a", KeyRole.ENROL)
    assert ring.holder(token, NOW + 60) is None
    with pytest.raises(ConfigError, match="unknown, used or expired"):
        ring.enrol(token, key, now=NOW + 60)
    enrolled = ring.enrol(token, key, now=NOW)
    assert enrolled.holder(key, NOW) == KeyHolder("site-a", organisation="uni")
    assert enrolled.holder(token, NOW) is None
    with pytest.raises(ConfigError, match="unknown, used or expired"):
        enrolled.enrol(token, new_pair().public, now=NOW)


def test_one_key_cannot_have_two_holders() -> None:
    key = new_pair().public
    ring = Keyring().allow(KeyHolder("site-a"), key, now=NOW)
    with pytest.raises(ConfigError, match="one key twice"):
        ring.allow(KeyHolder("site-b"), key, now=NOW)


def test_a_name_cannot_change_its_role_by_a_second_key() -> None:
    ring = Keyring().allow(KeyHolder("site-a"), new_pair().public, now=NOW)
    with pytest.raises(ConfigError, match="differ in role"):
        ring.allow(KeyHolder("site-a", KeyRole.OPERATOR), new_pair().public, now=NOW)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("format = 2", "unknown format"),
        ("format = 1\n[[key]]\nname='a/b'\npublic='x'", "a name"),
        ("format = 1\n[[key]]\nname='a'\npublic='x'", "not a public key"),
        ("format = 1\n[[key]]\nname='a'\npublick='x'", "publick"),
        ("format = 1\n[[key]]\nname='a'\npublic='x'\nrole='boss'", "boss"),
        ("format = 1\n[[invitation]]\nname='a'\npublic='KEY'", "until"),
        ("format = 1\n[[key]]\nname='a'\npublic='KEY'\nrole='enrol'", "role"),
    ],
)
def test_a_ring_that_is_wrong_is_refused_by_name(tmp_path: Path, text: str, named: str) -> None:
    ring_path(tmp_path).write_text(text.replace("KEY", new_pair().public))
    with pytest.raises(ConfigError, match=named):
        read_ring(tmp_path)


def test_every_message_to_the_broker_has_a_role_that_may_send_it() -> None:
    tags = {kind.__struct_config__.tag for kind in get_args(ControlMessage)}
    only_from_the_broker = {
        "welcome", "beat", "progress", "refuse", "probe", "status", "enrolled",
    }  # fmt: skip
    assert set().union(*MAY_SAY.values()) == tags - only_from_the_broker


def test_a_relay_speaks_for_those_it_carries_alone() -> None:
    relay = KeyHolder("edge", KeyRole.RELAY, carries=("a", "b"))
    assert [relay.speaks_for(name) for name in ("a", "b", "c", "edge")] == [
        True,
        True,
        False,
        False,
    ]
    learner = KeyHolder("a")
    assert learner.speaks_for("a") and not learner.speaks_for("b")
    monitor = KeyHolder("a", KeyRole.MONITOR)
    assert not monitor.speaks_for("a") and not monitor.trains
    assert monitor.may_say("askstatus") and not monitor.may_say("hello")


def test_forty_characters_that_spell_more_than_32_bytes_are_no_key() -> None:
    with pytest.raises(ConfigError, match="not a public key"):
        check_public_key("#" * 40, "x")
    with pytest.raises(ConfigError, match="not a secret key"):
        pair_of_secret("#" * 40, "x")
