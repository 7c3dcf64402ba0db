"""A sealed state directory: every altered byte is named, and the broker does not serve it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from checkpoint_cases import Killed, failing
from e2e.test_journal import run_to_its_goal
from running import broker_config, live_broker
from seal_cases import digest_again, samples, sealed_files

from narrows.broker.cli.broker import BrokerCommand, renew_run_secret
from narrows.broker.cli.journal_report import audit, export_model, replay, show
from narrows.broker.process.service import Service
from narrows.broker.storage import StateDir, begin_epoch, new_seal_key, read_seal_key, seal_run
from narrows.broker.storage.durable_files import StateError
from narrows.broker.storage.history import Changes
from narrows.proto.errors import ConfigError, NarrowsError


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The state directory of a sealed run that was stopped and begun again, and its key."""
    folder = tmp_path_factory.mktemp("sealed")
    key = folder / "seal.key"
    new_seal_key(key)
    state = run_to_its_goal(folder, security__seal_key=str(key), broker__journal_keep=True)
    with live_broker(broker_config(folder, security__seal_key=str(key))):
        pass
    return state, key


def refusal(work: Callable[[], object]) -> str:
    """The words in which something is refused; "": it is not."""
    try:
        work()
    except NarrowsError as error:
        assert error.remedy
        return str(error)
    return ""


def test_a_sealed_run_is_whole(
    ended: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    state, key = ended
    audit(state, key)
    told = capsys.readouterr().out
    assert "every seal of what is used is as it was" in told and "all weights sum to 1" in told
    show(state)
    replay(state, Changes())
    assert "every digest as it was" in capsys.readouterr().out
    names = {path.name for path in sealed_files(state)}
    assert {"seal.json", "run.json", "run.copy.json", "manifest.json"} < names


def test_a_flipped_byte_in_every_file_is_named_although_digests_are_right(
    ended: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state, key = ended
    copy, count, unused = tmp_path / "state", 0, 0
    shutil.copytree(state, copy)
    for path in sealed_files(copy):
        whole, named = path.read_bytes(), str(path.relative_to(copy).name)
        neighbour = path.parent / "manifest.json"
        manifest = neighbour.read_bytes() if neighbour.exists() else b""
        for place in samples(path):
            flipped = bytearray(whole)
            flipped[place] ^= 1 << place % 8
            path.write_bytes(flipped)
            digest_again(path)
            if path.read_bytes() == whole:
                continue
            told = refusal(lambda: audit(copy, key))
            if path.suffix == ".log" and not told:
                # The end of a file looks like a torn write: what follows is not used, and told.
                told, unused = capsys.readouterr().out, unused + 1
            # With the digests of an array its manifest was altered too, and may be named first.
            assert named in told or (path.suffix == ".safetensors" and "manifest.json" in told), (
                path, place, told,
            )  # fmt: skip
            count += 1
            path.write_bytes(whole)
            if manifest:
                neighbour.write_bytes(manifest)
    assert count > 300 and unused < 20
    print(f"{count} flipped bytes, {unused} of them in ends that are not used")
    audit(copy, key)


def test_an_array_that_is_altered_with_its_digests_passes_without_a_seal_only(
    ended: tuple[Path, Path], tmp_path: Path
) -> None:
    """The test above would prove little if the digests alone had found it."""
    state, key = ended
    copy = tmp_path / "state"
    shutil.copytree(state, copy)
    array = sorted(copy.glob("checkpoint-*/fragment-00000.safetensors"))[-1]
    content = bytearray(array.read_bytes())
    content[-1] ^= 1
    array.write_bytes(content)
    digest_again(array)
    # All that a start without a seal looks at is in order.
    with StateDir.open(copy) as state_dir:
        assert state_dir.load() is not None and state_dir.warnings == []
    config = broker_config(tmp_path, security__seal_key=str(key))
    with pytest.raises(StateError, match=r"does not match its seal") as caught:
        Service(config)
    assert array.parent.name in str(caught.value) and "backup" in caught.value.remedy


def test_files_are_not_left_out_added_or_brought_from_elsewhere(
    ended: tuple[Path, Path], tmp_path: Path
) -> None:
    state, key = ended
    for number, what in enumerate(("left out", "added", "swapped", "other top", "key")):
        copy = tmp_path / str(number)
        shutil.copytree(state, copy)
        one, other = sorted(copy.glob("checkpoint-*"))[:2]
        if what == "left out":
            (one / "manifest.json").unlink()
        elif what == "added":
            (one / "more.json").write_text("{}")
        elif what == "swapped":
            one.rename(tmp_path / "aside")
            other.rename(one)
            (tmp_path / "aside").rename(other)
        elif what == "other top":
            (copy / "run.more").write_text("mine")
        else:
            (copy / "seal.json").unlink()
        told = refusal(partial(audit, copy, key))
        expected = {
            "left out": "manifest.json", "added": "more.json", "swapped": "another place",
            "other top": "run.more", "key": "it is not sealed",
        }  # fmt: skip
        assert expected[what] in told, (what, told)


def test_an_older_copy_is_found_by_a_line_of_the_log(
    ended: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    state, key = ended
    audit(state, key)
    newest = re.search(r"the newest is (\d+:[0-9a-f]{64})", capsys.readouterr().out)
    assert newest
    audit(state, key, newest[1])
    assert "is here with its seal" in capsys.readouterr().out
    number = newest[1].partition(":")[0]
    assert "older copy" in refusal(lambda: audit(state, key, f"{int(number) + 1}:{'ab' * 32}"))
    assert "older copy" in refusal(lambda: audit(state, key, f"{number}:{'ab' * 32}"))
    with pytest.raises(ConfigError, match="NUMBER:SEAL"):
        audit(state, key, "12")


# Keys, and directories that were not sealed.


def test_a_key_that_others_may_read_is_refused(tmp_path: Path) -> None:
    key, state = tmp_path / "seal.key", tmp_path / "state"
    new_seal_key(key)
    assert key.stat().st_mode & 0o777 == 0o600
    for mode in (0o644, 0o640, 0o620, 0o604):
        key.chmod(mode)
        with pytest.raises(ConfigError, match=f"got {mode:04o}.*chmod 600"):
            Service(broker_config(tmp_path, security__seal_key=str(key)))
    key.chmod(0o400)
    assert read_seal_key(key, state).name


def test_a_key_has_its_place_and_its_form(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    inside = state / "seal.key"
    new_seal_key(inside)
    with pytest.raises(ConfigError, match="lies in the state directory"):
        read_seal_key(inside, state)
    linked = tmp_path / "link"
    linked.symlink_to(inside)
    with pytest.raises(ConfigError, match="lies in the state directory"):
        read_seal_key(linked, state)
    with pytest.raises(ConfigError, match="expected a new file"):
        new_seal_key(inside)
    with pytest.raises(ConfigError, match=r"cannot be read.*new-seal-key"):
        read_seal_key(tmp_path / "none", state)
    bad = tmp_path / "bad"
    bad.write_text("secret")
    bad.chmod(0o600)
    with pytest.raises(ConfigError, match="64 hexadecimal digits") as caught:
        read_seal_key(bad, state)
    assert "secret" not in str(caught.value)
    key = read_seal_key_moved(inside, tmp_path / "moved", state)
    assert key not in repr(read_seal_key(tmp_path / "moved", state))


def read_seal_key_moved(source: Path, target: Path, state: Path) -> str:
    shutil.copy2(source, target)
    assert read_seal_key(target, state)
    return target.read_text().strip()


def test_a_directory_without_a_seal_is_sealed_by_command_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = run_to_its_goal(tmp_path)
    key = tmp_path / "seal.key"
    new_seal_key(key)
    config = broker_config(tmp_path, security__seal_key=str(key))
    with pytest.raises(StateError, match=r"it is not sealed.*narrows journal seal"):
        Service(config)
    assert "it is not sealed" in refusal(lambda: audit(state, key))
    seal_run(state, read_seal_key(key, state))
    audit(state, key)
    assert "sealed already" in refusal(lambda: seal_run(state, read_seal_key(key, state)))
    for _ in range(2):
        with live_broker(config):
            pass
    audit(state, key)
    show(state)
    told = capsys.readouterr().out
    assert told.count("sealed from here on with the key") == 1
    for path in sealed_files(state):
        whole = path.read_bytes()
        flipped = bytearray(whole)
        flipped[len(whole) // 3] ^= 1
        path.write_bytes(flipped)
        told = refusal(lambda: audit(state, key)) or capsys.readouterr().out
        assert path.name in told, path
        path.write_bytes(whole)


def test_the_secret_of_a_run_is_sealed_and_can_be_renewed(
    ended: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state, key = ended
    copy = tmp_path / "state"
    shutil.copytree(state, copy)
    (copy / "run.secret").unlink()
    assert "run.secret: is missing" in refusal(lambda: audit(copy, key))
    settings = [f"broker.state_dir={copy}", f"security.seal_key={key}"]
    renew_run_secret(BrokerCommand(None, {}, settings, None, None))
    audit(copy, key)
    assert "is new" in capsys.readouterr().out
    with pytest.raises(StateError, match="no seal key is set"):
        renew_run_secret(BrokerCommand(None, {}, settings[:1], None, None))


def test_a_sealed_directory_is_not_served_without_its_key(
    ended: tuple[Path, Path], tmp_path: Path
) -> None:
    state, _ = ended
    copy = tmp_path / "state"
    shutil.copytree(state, copy)
    with pytest.raises(StateError, match="it is sealed, and no seal key is set"):
        Service(broker_config(tmp_path))
    other = tmp_path / "other.key"
    new_seal_key(other)
    with pytest.raises(StateError, match="made with another key"):
        Service(broker_config(tmp_path, security__seal_key=str(other)))
    # As the remedy says.
    (copy / "seal.json").rename(tmp_path / "seal.json")
    with live_broker(broker_config(tmp_path)) as service:
        assert service.syncer.state.version_sum > 0
    audit(copy)


def test_no_start_that_is_cut_short_is_an_alteration(
    ended: tuple[Path, Path], tmp_path: Path
) -> None:
    state, key_file = ended
    copy, starts = tmp_path / "state", 0
    shutil.copytree(state, copy)
    key = read_seal_key(key_file, copy)
    config = broker_config(tmp_path, security__seal_key=str(key_file))
    for call in ("rename", "fsync", "write", "open"):
        for at in range(60):
            with pytest.MonkeyPatch.context() as patch:
                happened = failing(call, at, Killed(), patch)
                try:
                    with StateDir.open(copy, key) as state_dir:
                        begin_epoch(config, state_dir, now=0.0).close()
                except Killed:
                    pass
            if not happened():
                break
            starts += 1
            audit(copy, key_file)
    assert starts > 20


@pytest.fixture(scope="module")
def unsealed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The state directory of a run that has ended and was never sealed."""
    return run_to_its_goal(tmp_path_factory.mktemp("unsealed"), broker__journal_keep=True)


@pytest.mark.parametrize("way", ["rollback", "moved", "cut"])
def test_new_segments_take_the_numbers_of_those_that_were_sealed_as_they_were(
    way: str, unsealed: Path, tmp_path: Path
) -> None:
    state, key = tmp_path / "state", tmp_path / "seal.key"
    shutil.copytree(unsealed, state)
    seal_run(state, new_seal_key(key))
    segments = {path.name: path.read_bytes() for path in (state / "journal").iterdir()}
    if way == "moved":
        (state / "journal").rename(tmp_path / "moved")
    elif way == "cut":
        with live_broker(broker_config(tmp_path, security__seal_key=str(key))):
            pass  # As after a cut: the oldest segments are gone, newer ones stay.
    flags: dict[str, object] = {} if way == "moved" else {"broker__rollback_to": 3}
    config = partial(broker_config, tmp_path, security__seal_key=str(key))
    with live_broker(config(**flags)) as service:
        begun = service.syncer.state.version_sum
    assert set(segments) & {path.name for path in (state / "journal").iterdir()}
    for _ in range(2):
        with live_broker(config()) as service:
            assert service.syncer.state.version_sum == begun
    missed = "record 2 is needed" if way == "moved" else ""
    assert missed in refusal(lambda: audit(state, key))
    # The old segments do not come back under their names.
    for path in sorted((state / "journal").iterdir()):
        if old := segments.get(path.name):
            new = path.read_bytes()
            path.write_bytes(old)
            assert path.name in refusal(lambda: audit(state, key))
            path.write_bytes(new)
    assert bool(refusal(lambda: audit(state, key))) == bool(missed)
    if aside := sorted(state.glob("rolled-back-to-*")):
        audit(aside[0], key)


@pytest.mark.parametrize("is_folder_gone", [False, True])
def test_a_journal_that_was_removed_as_a_whole_is_named(
    ended: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture,
    is_folder_gone: bool,
) -> None:  # fmt: skip
    state, key = ended
    copy = tmp_path / "state"
    shutil.copytree(state, copy)
    for path in (copy / "journal").iterdir():
        path.unlink()
    if is_folder_gone:
        (copy / "journal").rmdir()
    for command in (partial(audit, copy), partial(replay, copy, Changes())):
        assert "journal: it holds no record" in refusal(partial(command, seal_key=key))
    # The operator may have moved it: the broker says it, and goes on.
    config = broker_config(tmp_path, security__seal_key=str(key))
    with live_broker(config) as service:
        begun = service.syncer.state.version_sum
    assert begun > 0
    told = [each.getMessage() for each in caplog.records if each.levelname == "ERROR"]
    assert [each for each in told if "it holds no record" in each and "backup" in each]
    caplog.clear()
    with live_broker(config):
        pass
    assert "it holds no record" not in caplog.text
    # What an older checkpoint needs is missed for as long as that is kept.
    assert re.search(r"record \d+ is needed", refusal(lambda: audit(copy, key)))


def test_a_rollback_leaves_no_journal_that_anybody_has_removed(
    ended: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state, key = ended
    shutil.copytree(state, tmp_path / "state")
    with live_broker(broker_config(tmp_path, security__seal_key=str(key), broker__rollback_to=3)):
        pass
    assert "it holds no record" not in caplog.text
    audit(tmp_path / "state", key)


def test_every_reader_compares_the_seals_or_says_that_it_does_not(
    ended: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state, key = ended
    copy, target = tmp_path / "state", tmp_path / "model.safetensors"
    shutil.copytree(state, copy)
    readers: list[Callable[..., object]] = [
        partial(show, copy),
        partial(audit, copy),
        partial(replay, copy, Changes()),
        partial(export_model, copy, target),
    ]
    for reader in readers:
        reader()
        assert "the seals were not compared" in capsys.readouterr().out, reader
        reader(seal_key=key)
        assert "not compared" not in capsys.readouterr().out, reader
    path = copy / "run.json"
    path.write_bytes(path.read_bytes()[:-1] + b" }")
    for reader in readers:
        assert "run.json" in refusal(partial(reader, seal_key=key)), reader
