"""Units, configuration, addresses and key files: what people write, and what they are told if it is
wrong."""

import os
import stat
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrows.broker.config import BrokerConfig, chunk_elements, load_broker
from narrows.learner.site import join_target
from narrows.proto import keys
from narrows.proto.config import describe, parse_address
from narrows.proto.errors import ConfigError
from narrows.proto.keys import AllowList, SiteKey, new_pair
from narrows.proto.messages import Mode
from narrows.proto.units import Amount, BitRate, Duration, Quantity, counted


def test_things_are_counted_in_words() -> None:
    assert [counted(count, "key") for count in (0, 1, 2)] == ["no keys", "1 key", "2 keys"]


@pytest.mark.parametrize(
    ("kind", "written", "value"),
    [
        (Duration, "1.5s", 1.5), (Duration, "200 ms", 0.2), (Duration, " 2min ", 120),
        (Duration, "0.1s", 0.1), (Duration, 3, 3),
        (BitRate, "2Gbit/s", 2e9), (BitRate, "0", 0), (BitRate, "1e3kbit/s", 1e6),
        (Amount, "12e9", 12_000_000_000), (Amount, "1.5M", 1_500_000),
        (Amount, "3B", 3_000_000_000), (Amount, 2.0**40, 1 << 40),
    ],
)  # fmt: skip
def test_units_are_read_exactly(kind: type[Quantity], written: object, value: float) -> None:
    assert kind.parse(written) == value


@pytest.mark.parametrize(
    ("kind", "written", "hint"),
    [
        (Duration, "5 parsecs", "units: us, ms, s, min, h, d"),
        (Duration, "-1s", "not a duration"), (Duration, float("nan"), "not a duration"),
        (Duration, True, "not a duration"), (Duration, None, "not a duration"),
        (Duration, "1" * 65 + "s", "not a duration"),
        (BitRate, "2GB", "units: bit/s, kbit/s"), (BitRate, "2gbit/S", 'write "2Gbit/s"'),
        (BitRate, "1e19", "out of range"),
        (Amount, "1.5", "not a whole number"), (Amount, "1e99", "out of range"),
    ],
)  # fmt: skip
def test_wrong_units_name_what_is_accepted(
    kind: type[Quantity], written: object, hint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        kind.parse(written)
    assert hint in str(caught.value)


@given(st.sampled_from([Duration, BitRate, Amount]), st.integers(0, 9 * 10**8))
def test_what_is_shown_can_be_read_again(kind: type[Quantity], value: int) -> None:
    assert kind.parse(kind(value).text()) == pytest.approx(value, rel=1e-3)


def test_flags_win_over_the_file_the_file_over_the_preset(tmp_path: Path) -> None:
    """Holds `load_broker`."""
    path = tmp_path / "broker.toml"
    path.write_text(
        """
        [run]
        mode = "diloco"
        goal_tokens = "12e9"
        [fragments]
        sync_period_steps = 20
        [merge]
        [wan]
        up = "2Gbit/s"
        """
    )
    flags = {"fragments.sync_period_steps": "30", "broker.insecure": "true", "merge.quorum": 2}
    config = load_broker(path, flags)
    assert (config.run.mode, config.merge.weights) == (Mode.DILOCO, "equal")
    assert config.fragments.count == 1
    assert (config.fragments.sync_period_steps, config.broker.insecure) == (30, True)
    assert (config.merge.quorum, config.wan.up, config.run.goal_tokens) == (2, 2e9, 12e9)
    assert config.run.max_offline == BrokerConfig().run.max_offline
    assert load_broker(path, {"run.mode": "decoupled"}).fragments.count == 4


@pytest.mark.parametrize(
    ("toml", "flags", "hints"),
    [
        ("", {"quorum": "2"}, ["command line: quorum: unknown key", "did you mean merge.quorum?"]),
        ("", {"merge.quorum": "-2"}, ["command line: merge.quorum", ">= 0", "got '-2'"]),
        ("", {"merge.quorum": "1.5"}, ["command line: merge.quorum", "expected a whole number"]),
        ("", {"run.mode": "dilco"}, ["decoupled, streaming, diloco", "did you mean diloco?"]),
        ("", {"merge.weights": "token"}, ["one of tokens, equal"]),
        ("", {"wan.up": "2GB"}, ["command line: wan.up", "units: bit/s"]),
        ("", {"wan.up": "2"}, ["wan.up", "at least 64kbit/s, with its unit"]),
        ("", {"broker.listen": "http://x"}, ["tcp://HOST:PORT"]),
        ("", {"broker.listen": "tcp://x:65534"}, ["it takes three"]),
        ("", {"broker.insecure": "maybe"}, ["broker.insecure", "expected true or false"]),
        ("", {"run.seeder": "a b"}, ["run.seeder", "a learner's name"]),
        ("", {"fragments.overlap_steps": 10}, ["less than fragments.sync_period_steps = 10"]),
        (
            "",
            {"fragments.handover": 0.5, "merge.outer_momentum": 0.9},
            ["fragments.handover", "of at most 1.5", "Lower merge.outer_lr", "got 0.5 with 4"],
        ),
        ("[wan\n", {}, ["broker.toml: not a TOML file", "line 1"]),
        ("[wann]\nup = 1\n", {}, ["broker.toml: wann.up: unknown key", "did you mean wan.up?"]),
        ("wan = 1\n", {}, ["wan: wrong value", "expected a table"]),
        ("[nothing]\n", {}, ["nothing: unknown key"]),
        ("[merge]\nouter_lr = nan\n", {}, ["merge.outer_lr", "a finite number"]),
        ("[merge]\nquorum = '2'\n", {}, ["merge.quorum", "expected a whole number, got '2'"]),
        ("[run]\nmode = {a = 1}\n", {}, ["run.mode", "one of decoupled"]),
        ("x = " + "[" * 10_000, {}, ["not a TOML file"]),
        (None, {}, ["broker.toml: cannot be read"]),
    ],
)
def test_errors_name_the_place_the_key_and_the_remedy(
    toml: str | None, flags: dict[str, object], hints: list[str], tmp_path: Path
) -> None:
    """Holds `load_broker`."""
    path = tmp_path / "broker.toml"
    if toml is not None:
        path.write_text(toml)
    with pytest.raises(ConfigError) as caught:
        load_broker(path, flags)
    for hint in hints:
        assert hint in str(caught.value)


def test_every_setting_is_described() -> None:
    """Holds `describe`."""
    rows = {key: (default, doc) for key, default, doc in describe(BrokerConfig)}
    assert rows["run.max_offline"][0] == "1h"
    assert rows["broker.insecure"][0] == "false"
    assert rows["wan.up"] == ("0", "From each learner to the broker.")
    assert all(doc for _, doc in rows.values())


def test_the_rate_of_a_learner_cuts_the_messages() -> None:
    """Holds `chunk_elements`."""
    assert BrokerConfig().shared.chunk_elements == 1 << 18
    shared = load_broker(None, {"wan.up": "10Mbit/s"}).shared
    # 10 ms of 10 Mbit/s are 100,000 bits: 4 bits an element, or 32.
    assert (shared.chunk_elements, shared.state_chunk_elements) == (16384, 2048)
    assert (shared.streams, shared.window_messages) == (1, 32)
    assert chunk_elements(1.0, bits_per_element=4) == 1024


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "b.example.org", "10.0.0.1"])
def test_addresses(host: str) -> None:
    address = parse_address(f"tcp://{host}:7070")
    assert str(address) == f"tcp://{host}:7070"
    assert address.is_loopback is (host in ("127.0.0.1", "localhost", "[::1]"))
    everywhere = parse_address("tcp://*:0", listen=True)
    assert everywhere == ("*", 0) and not everywhere.is_loopback


@pytest.mark.parametrize(
    "text",
    ["", "127.0.0.1:7070", "tcp://host", "tcp://host:70700", "tcp://[::g]:1", "tcp://a/b:1",
     "tcp://*:7070", "tcp://host:0", "tcp://host:7070\n"],
)  # fmt: skip
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="tcp://HOST:PORT"):
        parse_address(text)


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
    path = tmp_path / "site-a.key"
    key = site_key()
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
    """Holds `write_site_key`."""
    path = tmp_path / "site-a.key"
    key = site_key()
    keys.write_site_key(path, key)
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(28, "No space left on device")))
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
    path = tmp_path / "site-a.key"
    key = site_key()
    keys.write_site_key(path, key)
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(ConfigError, match=told) as raised:
        keys.read_site_key(path)
    assert str(path) in str(raised.value) and key.pair.secret not in str(raised.value)


@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_a_pipe_in_the_place_of_a_key_does_not_hang(tmp_path: Path, mode: int) -> None:
    """Holds `read_site_key`."""
    os.mkfifo(tmp_path / "site-a.key", mode)
    with pytest.raises(ConfigError, match="regular file"):
        keys.read_site_key(tmp_path / "site-a.key")


def test_a_brokers_folder(tmp_path: Path) -> None:
    """Holds `create_broker_key`."""
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
    speakers = [allowed.keys.get(key) for key in (a, c, b, new_pair().public)]
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
        ("", "is empty"),  # An editor is about to write it.
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


@pytest.mark.parametrize(("name", "mode"), [
    ("allow.toml", 0o602), ("allow.toml", 0o620), (".", 0o702), (".", 0o720),
])  # fmt: skip
def test_an_allow_list_that_others_may_change_is_not_used(
    folder: Path, name: str, mode: int
) -> None:
    path = folder / name
    path.chmod(mode)
    with pytest.raises(ConfigError, match=rf"admit keys.*{mode:04o}.*chmod go-w {path}"):
        AllowList.read(folder)


@pytest.mark.parametrize("name", ["allow.toml", "."])
def test_an_allow_list_of_another_user_is_not_used(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.geteuid() == 0:
        os.chown(folder / name, 65534, -1)  # Root's own would be as good as this user's.
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    with pytest.raises(ConfigError, match=r"admit keys.*chown 4711"):
        AllowList.read(folder)


def test_a_folder_that_others_may_change_gets_no_key(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match=f"chmod go-w {tmp_path}"):
        keys.create_broker_key(tmp_path)
    assert not list(tmp_path.iterdir())
    tmp_path.chmod(0o1777)
    keys.create_broker_key(tmp_path)
    assert AllowList.read(tmp_path).sites == {}, "the sticky bit keeps each one's files"


def test_a_public_line_goes_by_mail() -> None:
    """Holds `read_public_line`."""
    pair = new_pair()
    line = keys.public_line("site-a", pair.public)
    assert keys.read_public_line(f"  {line}\n") == ("site-a", pair.public)
    for bad in ("", line[:-1], line.replace("site-a", "a/b/c"), f"{line} more", "x" * 500):
        with pytest.raises(ConfigError):
            keys.read_public_line(bad)


@pytest.mark.parametrize(
    ("given", "text", "cores", "workers"),
    [
        (3, "5", 16, 3), (None, "5", 16, 5), (None, "", 16, 4), (None, "", 3, 1),
        (None, "", 256, 8), (0, "", 16, "got 0"), (None, "-2", 16, "got -2"),
    ],
)  # fmt: skip
def test_a_learner_codes_on_a_quarter_of_its_cores_unless_it_is_told(
    monkeypatch: pytest.MonkeyPatch, given: int | None, text: str, cores: int, workers: int | str
) -> None:
    """Holds `join_target`."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores))
    monkeypatch.setenv("NARROWS_WORKERS", text)
    try:
        found: object = join_target("tcp://127.0.0.1:7070", "a", None, given).workers
    except ConfigError as error:
        found = str(error)
    assert workers == found or str(workers) in str(found)
