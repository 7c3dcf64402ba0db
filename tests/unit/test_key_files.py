"""Key files: who may read them, what is told of a bad one, and an allow list beside an editor."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from narrows.proto import keys
from narrows.proto.errors import ConfigError
from narrows.proto.keys import AllowList, KeyPair, SiteKey, new_pair


def site_key(name: str = "site-a") -> SiteKey:
    return SiteKey(name, new_pair(), (new_pair().public,), "tcp://broker.example.org:7070")


def broker_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "keys"
    keys.create_broker_key(folder)
    return folder


def error_of(folder: Path, text: str) -> ConfigError:
    AllowList.path(folder).write_text(text)
    with pytest.raises(ConfigError) as raised:
        AllowList.read(folder)
    assert str(AllowList.path(folder)) in str(raised.value)
    return raised.value


def test_a_site_file_comes_back_and_is_its_owners_alone(tmp_path: Path) -> None:
    path, key = tmp_path / "site-a.key", site_key()
    before = os.umask(0)
    try:
        keys.write_site_key(path, key)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert keys.read_site_key(path) == key
    with pytest.raises(ConfigError, match=r"exists.*never overwritten"):
        keys.write_site_key(path, site_key())
    trusting = SiteKey(key.name, key.pair, (*key.servers, new_pair().public))
    keys.write_site_key(path, trusting, replace=True)
    assert keys.read_site_key(path) == trusting and os.listdir(tmp_path) == [path.name]
    assert key.pair.secret not in repr(key) and key.pair.secret not in str(key)


def test_a_secret_that_others_may_read_is_not_used(tmp_path: Path) -> None:
    path, key = tmp_path / "site-a.key", site_key()
    keys.write_site_key(path, key)
    path.chmod(0o640)
    with pytest.raises(ConfigError, match=f"0640.*chmod 600 {path}"):
        keys.read_site_key(path)


def test_a_write_that_fails_leaves_no_half_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, key = tmp_path / "site-a.key", site_key()
    keys.write_site_key(path, key)

    def full(_fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match="No space left"):
        keys.write_site_key(path, site_key("other"), replace=True)
    with pytest.raises(ConfigError, match="No space left"):
        keys.write_site_key(tmp_path / "new.key", key)
    assert keys.read_site_key(path) == key and os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("secret = ", "sekret = ", "sekret"),
        ('secret = "', 'secret = "x', "41 characters"),
        ('public = "', "public = ", "line 3"),
        ('name = "site-a"', 'name = "a b"', "name"),
        ('name = "site-a"', "name = 7", "str.*int.*name"),
        ("servers = [", 'servers = ["short", ', "servers.*public key.*'short'"),
    ],
)
def test_a_bad_site_file_is_told_by_entry_and_no_secret_is_shown(
    tmp_path: Path, old: str, new: str, told: str
) -> None:
    path, key = tmp_path / "site-a.key", site_key()
    keys.write_site_key(path, key)
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(ConfigError, match=told) as raised:
        keys.read_site_key(path)
    assert str(path) in str(raised.value) and key.pair.secret not in str(raised.value)


def test_halves_of_two_pairs_are_no_pair(tmp_path: Path) -> None:
    path, pair = tmp_path / "site-a.key", KeyPair(new_pair().public, new_pair().secret)
    keys.write_site_key(path, SiteKey("site-a", pair))
    with pytest.raises(ConfigError, match="public half of the secret") as raised:
        keys.read_site_key(path)
    assert pair.secret not in str(raised.value)


def test_a_brokers_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="narrows keys new --keys"):
        keys.read_broker_key(tmp_path)
    pair = keys.create_broker_key(tmp_path / "keys")
    assert keys.read_broker_key(tmp_path / "keys") == pair
    assert AllowList.read(tmp_path / "keys").sites == {}
    with pytest.raises(ConfigError, match="never overwritten"):
        keys.create_broker_key(tmp_path / "keys")
    for path in ((tmp_path / "keys"), *(tmp_path / "keys").iterdir()):
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path


def test_a_pipe_in_the_place_of_a_key_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "site-a.key", 0o600)
    with pytest.raises(ConfigError, match="no key file"):
        keys.read_site_key(tmp_path / "site-a.key")


def test_allow_and_revoke_leave_an_editors_lines(tmp_path: Path) -> None:
    folder, a, b, c = broker_folder(tmp_path), *(new_pair().public for _ in range(3))
    path = AllowList.path(folder)
    path.write_text(f"# ours\n'site.b' = \"{b}\"  # Berlin\n\n# theirs\n")
    AllowList.allow(folder, "site-a", a)
    AllowList.allow(folder, "site-a", a)
    allowed = AllowList.allow(folder, "site-a", c)
    assert allowed == AllowList.read(folder)
    assert allowed.sites == {"site.b": (b,), "site-a": (a, c)}
    assert [allowed.site(key) for key in (a, c, b, new_pair().public)] == [
        *("site-a", "site-a", "site.b"),
        None,
    ]
    assert AllowList.revoke(folder, "site-a", a).sites == {"site.b": (b,), "site-a": (c,)}
    assert AllowList.revoke(folder, "site-a").sites == {"site.b": (b,)}
    assert path.read_text().splitlines()[:4] == [
        "# ours",
        f"'site.b' = \"{b}\"  # Berlin",
        "",
        "# theirs",
    ]
    with pytest.raises(ConfigError, match="nothing to revoke"):
        AllowList.revoke(folder, "site-a")
    with pytest.raises(ConfigError, match=r"site\.b"):
        AllowList.allow(folder, "site-a", b)


@pytest.mark.parametrize("entry", ['site-a = [\n  "KEY",\n]\n', '"site\\u002da" = "KEY"\n'])
def test_an_entry_that_only_an_editor_writes_is_left_to_it(tmp_path: Path, entry: str) -> None:
    folder = broker_folder(tmp_path)
    text = entry.replace("KEY", new_pair().public)
    AllowList.path(folder).write_text(text)
    with pytest.raises(ConfigError, match=r"site-a.*editor"):
        AllowList.revoke(folder, "site-a")
    assert AllowList.path(folder).read_text() == text


def test_a_bad_allow_list_names_the_entry(tmp_path: Path) -> None:
    folder, key = broker_folder(tmp_path), new_pair().public
    assert "line 2" in str(error_of(folder, '# sites\nsite-a "x"\n'))
    assert "quotes" in str(error_of(folder, f'site.b = "{key}"\n'))
    short = error_of(folder, 'site-a = "short"\n')
    assert "site-a" in short.message and short.got == "'short'" and "Z85" in short.expected
    assert "'a b'" in str(error_of(folder, f'"a b" = "{key}"\n'))
    twice = error_of(folder, f'site-a = "{key}"\nsite-b = "{key}"\n')
    assert "site-a and site-b" in twice.got
    AllowList.path(folder).chmod(0o666)
    assert "admit keys" in str(error_of(folder, ""))


def test_a_public_line_goes_by_mail() -> None:
    pair = new_pair()
    line = keys.public_line("site-a", pair.public)
    assert keys.read_public_line(f"  {line}\n") == ("site-a", pair.public)
    for bad in ("", line[:-1], line.replace("site-a", "a/b/c"), f"{line} more", "x" * 500):
        with pytest.raises(ConfigError):
            keys.read_public_line(bad)
