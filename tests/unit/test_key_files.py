"""Key files: who may read them, what is told of a bad one, and an allow list beside an editor."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from narrows.proto import keys
from narrows.proto.errors import ConfigError
from narrows.proto.keys import AllowList, SiteKey, new_pair

OTHER = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"
"""A public key of nobody here."""
NUL = "\\u0000"
"""As TOML spells it."""


def site_key(name: str = "site-a") -> SiteKey:
    return SiteKey(name, new_pair(), (new_pair().public,), "tcp://broker.example.org:7070")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A broker's folder of keys."""
    keys.create_broker_key(tmp_path / "keys")
    return tmp_path / "keys"


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
    for file, replace in ((path, True), (tmp_path / "new.key", False)):
        with pytest.raises(ConfigError, match="No space left"):
            keys.write_site_key(file, site_key("other"), replace=replace)
    assert keys.read_site_key(path) == key and os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("secret = ", "sekret = ", "sekret"),
        ('secret = "', 'secret = "x', "public half of secret.*41 characters"),
        ('public = "', "public = ", "line 3"),
        ("public = ", f'public = "{OTHER}" #', "public half of secret"),
        ("servers = [", f'servers = ["{OTHER[:35] + 5 * NUL}", ', "servers.*public key"),
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


@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_a_pipe_in_the_place_of_a_key_does_not_hang(tmp_path: Path, mode: int) -> None:
    os.mkfifo(tmp_path / "site-a.key", mode)
    with pytest.raises(ConfigError, match="regular file"):
        keys.read_site_key(tmp_path / "site-a.key")


def test_a_brokers_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="narrows keys new --keys"):
        keys.read_broker_key(tmp_path)
    folder = tmp_path / "keys"
    pair = keys.create_broker_key(folder)
    assert keys.read_broker_key(folder) == pair and AllowList.read(folder).sites == {}
    for path in (folder, *folder.iterdir()):
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path


def test_allow_and_revoke_leave_an_editors_lines(folder: Path) -> None:
    a, b, c = (new_pair().public for _ in range(3))
    lines = ["# ours", f"'site.b' = \"{b}\"  # Berlin", "", "# theirs"]
    path = AllowList.path(folder)
    path.write_text("\n".join(lines) + "\n")
    AllowList.allow(folder, "site-a", a)
    AllowList.allow(folder, "site-a", a)
    allowed = AllowList.allow(folder, "site-a", c)
    assert allowed == AllowList.read(folder)
    assert allowed.sites == {"site.b": (b,), "site-a": (a, c)}
    speakers = [allowed.site(key) for key in (a, c, b, new_pair().public)]
    assert speakers == ["site-a", "site-a", "site.b", None]
    with pytest.raises(ConfigError, match=r"site\.b"):
        AllowList.allow(folder, "site-a", b)
    assert AllowList.revoke(folder, "site-a", a).sites == {"site.b": (b,), "site-a": (c,)}
    assert AllowList.revoke(folder, "site-a").sites == {"site.b": (b,)}
    assert path.read_text().splitlines() == lines
    with pytest.raises(ConfigError, match="nothing to revoke"):
        AllowList.revoke(folder, "site-a")


@pytest.mark.parametrize("entry", ['site-a = [\n  "KEY",\n]\n', '"site\\u002da" = "KEY"\n'])
def test_an_entry_that_only_an_editor_writes_is_left_to_it(folder: Path, entry: str) -> None:
    text = entry.replace("KEY", new_pair().public)
    AllowList.path(folder).write_text(text)
    with pytest.raises(ConfigError, match=r"site-a.*editor"):
        AllowList.revoke(folder, "site-a")
    assert AllowList.path(folder).read_text() == text


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('# sites\nsite-a "x"\n', "line 2"),
        ('site.b = "KEY"\n', "quotes"),
        ('site-a = "short"\n', "site-a.*Z85.*'short'"),
        ('"a b" = "KEY"\n', "'a b'"),
        ('site-a = "KEY"\nsite-b = "KEY"\n', "site-a and site-b"),
    ],
)
def test_a_bad_allow_list_names_the_entry(folder: Path, text: str, told: str) -> None:
    path = AllowList.path(folder)
    path.write_text(text.replace("KEY", new_pair().public))
    with pytest.raises(ConfigError, match=f"{path}.*{told}"):
        AllowList.read(folder)


def test_an_allow_list_that_anybody_may_change_is_not_used(folder: Path) -> None:
    AllowList.path(folder).chmod(0o666)
    with pytest.raises(ConfigError, match="admit keys"):
        AllowList.read(folder)


def test_a_public_line_goes_by_mail() -> None:
    pair = new_pair()
    line = keys.public_line("site-a", pair.public)
    assert keys.read_public_line(f"  {line}\n") == ("site-a", pair.public)
    for bad in ("", line[:-1], line.replace("site-a", "a/b/c"), f"{line} more", "x" * 500):
        with pytest.raises(ConfigError):
            keys.read_public_line(bad)
