"""The command line: one line and an exit code for every failure, and nothing heavy before it."""

from __future__ import annotations

import json
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import msgpack
import pytest
import torch
import zmq
from acceptance.kit import WAIT_S, wait_until
from learner_cases import House, begun
from run_cases import broker, stranger, tiny, train
from safetensors import safe_open

from narrows import __main__ as command
from narrows.broker.cli import keys, status
from narrows.broker.cli.plan import payload_bits, plan
from narrows.broker.cli.relay import _Upstream
from narrows.broker.process.service import Service, log
from narrows.broker.store import History, Store
from narrows.broker.store.history import Audit
from narrows.broker.syncer.events import Finish
from narrows.learner import Learner
from narrows.proto.config import parse_address
from narrows.proto.keys import (
    AllowList,
    SiteKey,
    create_broker_key,
    new_pair,
    read_broker_key,
    read_site_key,
    serve_keys,
    write_site_key,
)
from narrows.proto.messages import Bye, Status
from narrows.proto.sockets import Dial, Kind, make_socket
from narrows.proto.timing import REDIAL_S
from narrows.proto.wire import encode_control

HEAVY = {"numpy", "numba", "zmq", "torch", "blosc2"}


class Said:
    """Runs a command; keeps what it printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capsys, self._monkeypatch = capsys, monkeypatch
        self.out = self.err = ""

    def run(self, *arguments: str) -> int:
        self._monkeypatch.setattr(sys, "argv", ["narrows", *arguments])
        with pytest.raises(SystemExit) as ended:
            command.main()
        self.out, self.err = self._capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code


@pytest.fixture
def narrows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Said]:
    monkeypatch.chdir(tmp_path)
    for name in ("NARROWS_BROKER", "NARROWS_KEY"):
        monkeypatch.delenv(name, raising=False)
    yield Said(capsys, monkeypatch)
    log.filters.clear()


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
def test_what_is_wrong_stands_in_one_line(narrows: Said, line: str, code: int, word: str) -> None:
    write_site_key(Path("a.key"), SiteKey("a", new_pair()))
    create_broker_key(Path("keys"))
    store = Store(Path("locked"), durable=False)
    assert narrows.run(*line.split()) == code
    store.close()
    (said,) = narrows.err.splitlines()
    assert said.startswith("narrows: ") and word in said


def test_a_disk_that_is_full_at_the_start_is_named_with_what_to_do(narrows: Said) -> None:
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
    narrows: Said, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    missing = ("a (fragment 0)", "b (fragments 0, 2)")

    def run(service: Service) -> Finish:
        service.stop("the test stops it")
        return serve(service)._replace(missing=missing)

    serve = Service.run
    monkeypatch.setattr(Service, "run", run)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert narrows.run(*LOOPBACK.split(), "--state-dir", "state") == 0
    warnings = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert "without the final model: a (fragment 0); b (fragments 0, 2)" in warnings


def test_status_with_the_next_key_of_the_broker(narrows: Said, tmp_path: Path) -> None:
    """The site trusts an old key first, and then the one that the broker has."""
    folder, file, pair = tmp_path / "keys", tmp_path / "a.key", new_pair()
    servers = new_pair().public, create_broker_key(folder).public
    AllowList.allow(folder, "a", pair.public)
    write_site_key(file, SiteKey("a", pair, servers))
    with broker(tmp_path, broker__keys=str(folder)) as run:
        assert narrows.run("status", run.address, "--key", str(file)) == 0
        assert "waits for a learner to join" in narrows.out
        AllowList.revoke(folder, "a")
        while (code := narrows.run("status", run.address, "--key", str(file))) == 0:
            pass
        assert code == 3 and f"narrows keys allow 'narrows-key a {pair.public}'" in narrows.err


def test_status_waits_for_a_broker_that_stops_and_starts_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as stops, zmq.Context() as context:
        port, heard = stops.getsockname()[1], threading.Event()

        def answer() -> None:
            stops.accept()[0].close()
            stops.close()
            with context.socket(zmq.ROUTER) as router:
                router.bind(f"tcp://127.0.0.1:{port}")
                peer, *_ = router.recv_multipart()
                router.send_multipart([peer, *encode_control(Status({"phase": "running"}))])
                # libzmq drops an answer that is not read yet when the connection ends.
                heard.wait(WAIT_S)

        broker = threading.Thread(target=answer, daemon=True)
        broker.start()
        said = status.ask_status(f"tcp://127.0.0.1:{port}", None, timeout_s=30)
        heard.set()
        broker.join()
    assert said == {"phase": "running"}


OTHER_PROGRAM = "another program listens there"
SILENCE = "takes connections and says nothing"
HTTP = b"HTTP/1.0 400 Bad Request\r\n\r\n"


@pytest.mark.parametrize(
    ("says", "key", "timeout_s", "told"),
    [
        (HTTP, "", 600, OTHER_PROGRAM),
        (HTTP, "--key a.key", 600, OTHER_PROGRAM),
        (b"SSH-2.0-x\r\n", "", 600, OTHER_PROGRAM),
        (b"SSH-2.0-x\r\n", "--key a.key", 600, OTHER_PROGRAM),
        (b"", "", 3, SILENCE),
        (b"", "--key a.key", 3, SILENCE),
        # It does not wait for its time to be over: a broker with keys will not admit it later.
        (None, "", 600, "admits only those who have a key.*--key FILE, in Python key="),
        (None, "--key a.key", 600, "as one does whose key is not"),
    ],
)
def test_status_tells_what_listens_there_from_a_broker(
    narrows: Said, says: bytes | None, key: str, timeout_s: int, told: str
) -> None:
    write_site_key(Path("a.key"), SiteKey("a", new_pair(), (new_pair().public,)))
    with stranger(says) as address:
        line = f"status {address} --timeout-s {timeout_s} {key}"
        assert narrows.run(*line.split()) == 4
    assert re.search(told, narrows.err) and address in narrows.err


def test_an_unknown_host_is_named_at_once(narrows: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = socket.gaierror(socket.EAI_NONAME, "unknown")
    monkeypatch.setattr(socket, "getaddrinfo", Mock(side_effect=unknown))
    for line in ("status --timeout-s 600", "relay --listen tcp://127.0.0.1:0"):
        assert narrows.run(*line.split(), "--broker", "tcp://no.invalid:7070") == 4
        assert "the host name no.invalid does not resolve" in narrows.err


def test_the_words_of_a_learner_are_no_markup(
    narrows: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = {
        "state": "paused: [/red]", "heard_s": 0.1, "steps_per_s": 2.0, "loss": None, "hint": "",
        "logged_tokens": 5, "merged_tokens": 4, "versions_behind": 1,
    }  # fmt: skip
    said = {
        "run_id": "f00d", "epoch": "1-1", "mode": "decoupled", "phase": "running", "uptime_s": 1.0,
        "run_tokens": 4, "goal_tokens": 8, "tokens_per_s": 2.0, "versions": [1, 2], "merges": 1,
        "contributions": 2, "waiting_for": ["a to push"], "up_bytes": 5e6, "down_bytes": 10,
        "learners": {"a": learner},
    }  # fmt: skip
    monkeypatch.setattr(status, "ask_status", lambda *_, **__: said)
    assert narrows.run("status") == 0
    assert "paused: [/red]" in narrows.out and "received 5MB and sent 10B" in narrows.out
    assert "4 of 8 tokens are learned" in narrows.out and "fragments: 1 to 2;" in narrows.out
    columns = narrows.out.splitlines()[3].split()
    assert {"heard", "logged", "merged", "behind"} <= set(columns)
    legend = "".join(narrows.out.splitlines()[-2:])
    assert all(f"{word}:" in legend for word in ("heard", "logged", "merged", "behind"))


def test_debug_shows_a_frame(narrows: Said, tmp_path: Path) -> None:
    file = tmp_path / "frame"
    file.write_bytes(encode_control(Bye("done"))[-1])
    assert narrows.run("debug", "frame", str(file)) == 0
    assert json.loads(narrows.out)["reason"] == "done"


def test_debug_shows_what_our_types_refuse_and_says_why(narrows: Said, tmp_path: Path) -> None:
    file = tmp_path / "frame"
    file.write_bytes(msgpack.packb({"type": "bye", "reason": 7, 1: b"\x1b"}))
    assert narrows.run("debug", "frame", str(file)) == 1
    assert json.loads(narrows.out) == {"type": "bye", "reason": 7, "1": "b'\\x1b'"}
    assert "bad_message" in narrows.err and "`$.reason`" in narrows.err
    file.write_bytes(b"\x91" * 2000)
    assert narrows.run("debug", "frame", str(file)) == 1
    assert "one MessagePack value" in narrows.err


def test_a_run_is_shown_checked_exported_and_rolled_back(narrows: Said, tmp_path: Path) -> None:
    place = str(tmp_path / "state")
    house = House(tmp_path / "state", {"broker.keep_history": True})
    (a,) = begun(house, "site-a")
    for version in (1, 2, 3):
        a.push()
        house.until(lambda: house.heads == (version,), "a version", a)  # noqa: B023
    house.host.close()
    house.kill()
    house.start()
    assert house.host.syncer.state.rounds[0].merged == {"site-a.00000001": 3}
    assert house.host.syncer.state.xi_s > 0, "it goes on at the pace of the last round"
    (resumed,) = [note.text for note in house.notes if note.event == "resumed"]
    tokens = house.host.syncer.state.clock.run_tokens
    assert f"at versions 3 to 3, {tokens:,} tok" in resumed
    house.kill()
    assert narrows.run("journal", "show", place, "--json") == 0
    rows = [json.loads(line) for line in narrows.out.splitlines()]
    assert [(row["fragment"], row["version"]) for row in rows] == [(0, 1), (0, 2), (0, 3)]
    assert all(row["contributors"] == ["site-a"] for row in rows)
    assert narrows.run("journal", "show", place, "--last", "1") == 0
    assert "fragment 0 version 3 " in narrows.out and rows[2]["published"] in narrows.out
    assert narrows.run("journal", "audit", place) == 0
    other = tmp_path / "other.safetensors"
    assert narrows.run("journal", "replay", place, "--out", str(other)) == 0
    assert rows[2]["published"] in narrows.out
    assert narrows.run("journal", "replay", place, "--out", f"{place}/packs/x") == 2

    model = tmp_path / "model.safetensors"
    assert narrows.run("export", place, "--to", str(model)) == 0
    assert model.read_bytes() == other.read_bytes()
    assert narrows.run("export", place, "--to", f"{place}/run.db") == 2
    with safe_open(model, "np") as file:
        told = file.metadata()
    assert told["narrows.run"] and told["narrows.versions"] == "[3]"
    assert narrows.run("export", place, "--layout") == 0
    assert [entry[0] for entry in json.loads(narrows.out)["entries"]] == ["w", "b"]

    back = tmp_path / "back"
    assert narrows.run("journal", "rollback", place, str(back), "--to", str(rows[1]["round"])) == 0
    assert narrows.run("journal", "show", str(back), "--json") == 0
    assert [json.loads(line)["version"] for line in narrows.out.splitlines()] == [1, 2]


def test_an_audit_prints_all_that_it_found(
    narrows: Said, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Store(tmp_path, durable=False).close()
    found = Audit(10, 7, ("pack 1 is damaged", "clock 5,\n but 6\x1b[2J"))
    monkeypatch.setattr(History, "audit", lambda _: found)
    assert narrows.run("journal", "audit", str(tmp_path)) == 1
    *_, one, other, bound = narrows.out.splitlines()
    assert (one, other) == ("pack 1 is damaged", "clock 5,\\n but 6\\x1b[2J")
    assert "after the first damage" in bound and "2 problems" in narrows.err


# Keys.


def test_a_key_is_admitted_and_never_overwritten_and_no_secret_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, file = tmp_path / "keys", tmp_path / "site-a.key"
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


# The plan.


def test_a_plan_follows_from_model_step_and_line(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ["fragments.count=4", "fragments.sync_period_steps=10", "codec.push=f32-blosc2"]
    code = plan(params="100M", step="1s", learners=2, wan="10Gbit/s", setting=chosen, json_=True)
    found = json.loads(capsys.readouterr().out)
    assert code == 0 and found["fits"]
    assert (found["fragments"], found["sync_period_steps"]) == (4, 10)
    # 32 bits a parameter and 4.6% of headers, once in ten seconds.
    assert found["learner_up_bits_per_s"] == pytest.approx(100e6 * 32 * 1.046 / 10, rel=0.005)
    assert found["broker_in_bits_per_s"] == 2 * found["learner_up_bits_per_s"]
    shares = found["shares"]
    assert shares[found["fullest"]] == max(shares.values())
    # Payloads of both learners, as they travelled.
    assert found["journal_per_hour_bytes"] == pytest.approx(
        found["broker_in_bits_per_s"] / 8 * 3600
    )


def test_the_sync_period_grows_until_the_run_fits(capsys: pytest.CaptureFixture[str]) -> None:
    periods = []
    for line in ("10Gbit/s", "1Gbit/s", "100Mbit/s"):
        code = plan(params="7B", step="1.5s", learners=4, wan=line, json_=True)
        found = json.loads(capsys.readouterr().out)
        periods.append(found["sync_period_steps"])
        assert found["fits"] is (code == 0)
    assert periods[0] < periods[1] < periods[2] == 500
    assert code == 1
    assert plan(params="7B", step="1.5s", learners=4, wan="100Mbit/s") == 1
    assert "It does not fit" in capsys.readouterr().out


def test_coarser_steps_take_fewer_bits() -> None:
    # The entropy of a rounded Gaussian is 8.69 bits in steps of 0.01 deviations, 3.06 in steps of
    # half a deviation and 2.10 in whole ones.
    for rho, bits in [(0.01, 8.69), (0.5, 3.06), (1.0, 2.10)]:
        assert payload_bits("int4-zstd", rho) == pytest.approx(bits, abs=0.06)


# The relay: one copy of each publication for a site, with keys on both hops.


@contextmanager
def relaying(broker: str, key: Path, log: Path) -> Iterator[str]:
    """The address of a relay that runs as a process."""
    command = ["relay", "--listen", "tcp://127.0.0.1:0", "--broker", broker, "--key", str(key)]
    with log.open("w") as out:
        process = subprocess.Popen([sys.executable, "-m", "narrows", *command], stderr=out)
    try:
        wait_until(lambda: process.poll() is not None or " on to " in log.read_text(), "the relay")
        yield log.read_text().split()[-1]
        assert process.poll() is None, log.read_text()
    finally:
        process.kill()
        process.wait()


@pytest.mark.real
def test_a_site_hears_each_publication_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, key = tmp_path / "keys", tmp_path / "site.key"
    site = SiteKey("site-a", new_pair(), (create_broker_key(folder).public,))
    AllowList.allow(folder, site.name, site.pair.public)
    write_site_key(key, site)
    models = [tiny(0), tiny(1)]

    def learn(index: int) -> None:
        optimizer = torch.optim.AdamW(models[index].parameters(), lr=1e-3)
        name = f"site-a/{index}"
        with Learner(models[index], optimizer, broker=run.address, name=name, key=key) as learner:
            listeners.append(run.service.host.downlink.sender.fan_out)
            train(learner, models[index], optimizer)

    listeners: list[int] = []
    with (
        broker(tmp_path, broker__keys=str(folder), run__goal_tokens=4000) as run,
        relaying(run.address, key, tmp_path / "relay.log") as address,
    ):
        monkeypatch.setenv("NARROWS_RELAY", address)
        threads = [threading.Thread(target=learn, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert listeners == [1, 1]
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


@pytest.mark.real
def test_a_refused_relay_dials_again_with_the_key_that_is_in_the_file_then(tmp_path: Path) -> None:
    server, old, new, file = new_pair(), new_pair(), new_pair(), tmp_path / "site.key"
    key = SiteKey("site-a", old, (server.public,))
    write_site_key(file, key)
    with zmq.Context() as context:
        authenticator = serve_keys(context, lambda public: public == new.public)
        downlink = make_socket(context, Kind.BROKER_DOWNLINK, pair=server)
        port = downlink.bind_to_random_port("tcp://127.0.0.1")
        address = parse_address(f"tcp://127.0.0.1:{port}")
        upstream = _Upstream(context, address, key, file)
        upstream.subscribe(b"\1p/00")

        def refused(now: float) -> Dial:
            dial = upstream.dial
            while not dial.is_dead(now):
                assert dial.monitor.poll(10_000)
                dial.look(now)
            upstream.look(now)
            return dial

        assert refused(0.0) is not upstream.dial, "at once, and then every five seconds"
        file.unlink()
        write_site_key(file, SiteKey("site-a", new, (server.public,)))
        assert refused(REDIAL_S - 0.1) is upstream.dial
        upstream.look(now=REDIAL_S)
        assert downlink.poll(10_000) and downlink.recv() == b"\1p/00"
        upstream.dial.close()
        downlink.close(linger=0)
        authenticator.stop()
