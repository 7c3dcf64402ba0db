"""The command line: one line and an exit code for every failure, and nothing heavy before it; and
the commands `broker`, `debug` and `keys`."""

import json
import resource
import signal
import subprocess
import sys
from pathlib import Path

import msgpack
import pytest
from cli_cases import Narrows
from msgspec import structs

from narrows.broker.cli import keys
from narrows.broker.process.service import Service
from narrows.broker.store import Store
from narrows.broker.syncer.events import Finish
from narrows.proto.keys import (
    SiteKey,
    create_broker_key,
    new_pair,
    read_broker_key,
    read_site_key,
    write_site_key,
)
from narrows.proto.messages import Bye
from narrows.proto.wire import encode_control

HEAVY = {"numpy", "numba", "zmq", "torch", "blosc2"}


@pytest.mark.parametrize(
    ("line", "word"), [("--help", "status"), ("broker --help", "merge.quorum = 1")]
)
def test_help_imports_nothing_heavy(line: str, word: str) -> None:
    code = (
        f"import sys; sys.argv = {['narrows', *line.split()]}\n"
        "from narrows.__main__ import main\n"
        "try: main()\n"
        "except SystemExit: print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert word in done.stdout and "Exit codes: 0 ok, 1 failure, 2 usage" in done.stdout
    assert not HEAVY & set(done.stderr.split())


LOOPBACK = "broker --listen tcp://127.0.0.1:0"
ADMIT = "keys allow --keys a.key -- narrows-key a rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"
PLAN = "plan --params 1B --step 1s"


@pytest.mark.parametrize(
    ("line", "code", "word"),
    [
        ("satus", 2, "did you mean status?"),
        ("status nonsense", 2, "expected tcp://HOST:PORT"),
        ("export /nowhere --to x", 2, "/nowhere holds no run"),
        ("export /\x1b[2J --to x", 2, "/\\x1b[2J holds no run"),
        ("export locked --to none/m", 2, "mkdir -p none"),
        ("journal rollback locked none/new --to 1", 2, "mkdir -p none"),
        ("journal show locked --last -1", 2, "or 0 for all"),
        (f"{LOOPBACK} --events keys", 2, "got a folder"),
        ("debug frame none", 2, "a file with one frame"),
        (f"{LOOPBACK} --ready-file none/x", 2, "mkdir -p none"),
        (f"{LOOPBACK} --state-dir new --resume", 2, "got no run"),
        (f"{LOOPBACK} --state-dir locked --resume", 2, "got a run without version 0"),
        ("journal audit .", 2, "holds no run"),
        ("broker --listne x", 2, "--listen"),
        ("broker --set merge.quorun=2", 2, "did you mean merge.quorum"),
        ("broker --set merge.quorum", 2, "expected KEY=VALUE"),
        ("broker --mode fast", 2, "one of decoupled, streaming, diloco"),
        ("broker /nowhere/x.toml", 2, "/nowhere/x.toml"),
        ("broker --listen nonsense", 2, "expected tcp://HOST:PORT"),
        ("broker --listen tcp://0.0.0.0:0", 2, "insecure"),
        ("broker --listen tcp://HOST:7070 --set broker.insecure=true", 2, "does not resolve"),
        (f"{LOOPBACK} --keys nowhere", 2, "broker.key"),
        ("relay --broker tcp://127.0.0.1:9 --listen tcp://0.0.0.0:9", 2, "or a loopback address"),
        ("status --key a.key", 2, "does not say which broker to trust"),
        ("status --key a.key", 2, "--server KEY"),
        ("status --key keys/broker.key", 2, "the broker's own key"),
        ("status --key keys/broker.key", 2, "--name operator"),
        ("keys new --keys keys", 2, "never overwritten"),
        ("keys new a.key --name site-b", 2, "another site"),
        ("keys new other.key --name ../etc", 2, "a site's name"),
        ("keys new --name site-a", 2, "no file"),
        ("keys allow narrows-key site-a --keys keys", 2, "not a public line"),
        (ADMIT, 2, "no allow list in /"),
        (ADMIT, 2, "--keys FOLDER"),
        ("plan --params 7X --step 1s --learners 2 --wan 1Gbit/s", 2, "--params"),
        ("plan --params 1B --step fast --learners 2 --wan 1Gbit/s", 2, "--step"),
        (f"{PLAN} --learners 2 --wan 1GB", 2, "--wan"),
        (f"{PLAN} --learners 2 --wan 1", 2, "write --wan 1Gbit/s"),
        (f"{PLAN} --learners 0 --wan 1Gbit/s", 2, "sizes above 0"),
        (f"{PLAN} --learners 2 --wan 0 --broker-wan 1Gbit/s", 2, "sizes above 0"),
        (f"{PLAN} --learners 2 --wan 1Gbit/s --set run.mode=diloco", 2, "without lockstep"),
        (f"{PLAN} --learners 2 --wan 1Gbit/s --set merge.quorun=2", 2, "mean merge.quorum?"),
        ("learner --name site-a", 2, "the learner's broker is missing"),
        ("debug frame a.key --header", 1, "bad_message"),
        (f"{LOOPBACK} --state-dir locked", 1, "state_locked"),
        (f"{LOOPBACK} --state-dir /dev/null/x", 1, "/dev/null"),
    ],
)
def test_what_is_wrong_stands_in_one_line(
    narrows: Narrows, line: str, code: int, word: str
) -> None:
    write_site_key(Path("a.key"), SiteKey("a", new_pair()))
    create_broker_key(Path("keys"))
    store = Store(Path("locked"), durable=False)
    assert narrows.run(*line.split()) == code
    store.close()
    (said,) = narrows.err.splitlines()
    assert said.startswith("narrows: ") and word in said


def test_debug_shows_a_frame(narrows: Narrows, tmp_path: Path) -> None:
    file = tmp_path / "frame"
    file.write_bytes(encode_control(Bye("done"))[-1])
    assert narrows.run("debug", "frame", str(file)) == 0
    assert json.loads(narrows.out)["reason"] == "done"


def test_debug_shows_what_our_types_refuse_and_says_why(narrows: Narrows, tmp_path: Path) -> None:
    file = tmp_path / "frame"
    file.write_bytes(msgpack.packb({"type": "bye", "reason": 7, 1: b"\x1b"}))
    assert narrows.run("debug", "frame", str(file)) == 1
    assert json.loads(narrows.out) == {"type": "bye", "reason": 7, "1": "b'\\x1b'"}
    assert "bad_message" in narrows.err and "`$.reason`" in narrows.err
    file.write_bytes(b"\x91" * 2000)
    assert narrows.run("debug", "frame", str(file)) == 1
    assert "one MessagePack value" in narrows.err


def test_a_disk_that_is_full_at_the_start_is_named_with_what_to_do(narrows: Narrows) -> None:
    """A limit on the length of files stands in for the full disk: it needs no rights."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        assert narrows.run(*LOOPBACK.split(), "--state-dir", "state") == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    (said,) = narrows.err.splitlines()
    assert "disk_full: the disk of state is full" in said and "Make room or" in said


def test_a_broker_names_the_learners_that_a_runs_end_has_left_without_the_final_model(
    narrows: Narrows, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    missing = ("a (fragment 0)", "b (fragments 0, 2)")

    def run(service: Service) -> Finish:
        service.stop("the test stops it")
        return structs.replace(serve(service), missing=missing)

    serve = Service.run
    monkeypatch.setattr(Service, "run", run)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert narrows.run(*LOOPBACK.split(), "--state-dir", "state") == 0
    warnings = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert "without the final model: a (fragment 0); b (fragments 0, 2)" in warnings


def test_a_key_is_admitted_and_never_overwritten_and_no_secret_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "keys"
    file = tmp_path / "site-a.key"
    keys.new(keys=folder)
    server = read_broker_key(folder)
    keys.new(file, name="site-a")
    secrets = {server.secret, read_site_key(file).pair.secret}
    keys.new(file, server=server.public, broker="tcp://broker.example.org:7070")
    site = read_site_key(file)
    assert (site.servers, site.broker) == ((server.public,), "tcp://broker.example.org:7070")
    capsys.readouterr()
    for path in (folder, folder / "broker.key"):
        keys.show(path)
        assert capsys.readouterr().out == f"{server.public}\n"
    keys.show(file)
    shown = capsys.readouterr().out
    keys.allow(*shown.splitlines()[0].split(), keys=folder)
    capsys.readouterr()
    keys.list_(keys=folder, json_=True)
    assert json.loads(capsys.readouterr().out) == {"site-a": [site.pair.public]}
    shown += capsys.readouterr().out
    assert not any(secret in shown for secret in secrets)
    assert {read_broker_key(folder).secret, read_site_key(file).pair.secret} == secrets
