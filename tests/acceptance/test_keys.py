"""Two sites from nothing, one by the README's commands, one by those of docs/two-sites.md; nobody
gets in without an admitted key, and a key speaks for no other name, hears no other site, and is
taken back in seconds."""

import re
import shutil
import tomllib
from collections import Counter
from pathlib import Path

import pytest
import zmq
from acceptance.kit import Site
from acceptance.peer import Curve, Peer, fingerprint_of, refusals

from narrows.bench.kit.processes import Child, wait_until

README = Path(__file__).parents[2] / "README.md"
TWO_SITES = README.parent / "docs" / "two-sites.md"
TYPED = re.compile(r"^\$ ((?:.*\\\n)*.*)$", re.MULTILINE)
"""A command of that page; its other lines are what the commands print."""
TRAIN = "--preset nano --step-wait-s 0.05 --data {data} --events {folder}/{name}.jsonl"
"""Makes the documents' learner small."""

LINE = re.compile(r"^narrows-key (\S+) (\S{40})$", re.MULTILINE)
"""The public line of a site, as `narrows keys new` prints it."""
BROKER_KEY = re.compile(r"^\S{40}$", re.MULTILINE)
READ_AGAIN = "the allow list was read again"
ALLOW = re.compile(r"narrows keys allow '[^']+'")
"""The remedy in the log of a learner that is not admitted."""

FORGED = 5
"""Chunks that site-b sends in the name of site-a."""

OUTSIDERS = {
    "keyless": ((3, 4), "admits only those who have a key"),
    "unknown": ((3,), "does not admit the key of unknown"),
    "lost": ((4,), "broker_unreachable"),
    "liar": ((3,), "key_name"),
}
"""Learners that must not get in, with their exit codes and a part of what they print. A broker with
keys breaks a keyless handshake off; whether ZeroMQ hears why before that is chance."""


def find(what: re.Pattern[str], text: str) -> re.Match[str]:
    """The first place in a text that must have one."""
    found = what.search(text)
    assert found, text
    return found


def typed(line: str, address: str) -> str:
    """A command as a reader types it, with this address; the keys of examples become the README's
    words for them."""
    command = line.replace("\\\n", " ").split(" #")[0].strip()
    command = re.sub(r"tcp://(HOST|broker\.example\.org|\*):7070", address, command)
    command = re.sub(r"--server='\S{40}'", "--server='BROKER_KEY'", command)
    return re.sub(r"narrows-key site-a \S{40}", "LINE", command)


@pytest.mark.timeout(180)
def test_a_site_joins_by_typing_what_stands_there_is_cut_off_and_comes_back(site: Site) -> None:
    section = README.read_text().partition("## Two sites\n")[2].partition("\n## ")[0]
    lines = section.split("```\n")[1].splitlines()
    new, serve, *by_readme, revoke = (typed(line, site.address) for line in lines)
    _, _, *by_page, status = (
        typed(line, site.address) for line in TYPED.findall(TWO_SITES.read_text())
    )
    here, there, data = (site.folder / name for name in ("here", "there", "data"))
    for folder in (here, there, data):
        folder.mkdir()
    for n in range(40):
        (data / f"{n}.txt").write_text("".join(f"{n} times {m} is {n * m}.\n" for m in range(400)))

    def prints(folder: Path, command: str, what: re.Pattern[str]) -> str:
        child = site.type(folder, command)
        child.ends(0)
        return find(what, child.log)[0]

    def admit(name: str, new_site: str, allow: str, train: str) -> Child:
        """Makes a key there, has it admitted here, and starts a learner with it."""
        made = new_site.replace("site-a", name).replace("BROKER_KEY", broker_key)
        line = prints(there, made, LINE)
        before = broker.log.count(READ_AGAIN)
        site.type(here, allow.replace("LINE", line)).ends(0)
        # A learner here starts sooner than a person's, and the broker looks once in a second.
        wait_until(lambda: broker.log.count(READ_AGAIN) > before, "the broker to look", broker)
        more = TRAIN.format(data=data, folder=site.folder, name=name)
        return site.type(there, f"{train.replace('site-a', name)} {more}")

    broker_key = prints(here, new, BROKER_KEY)
    broker = site.type(here, serve)
    wait_until(lambda: "serving on" in broker.log, "the broker to serve", broker)
    a = admit("site-a", *by_readme)
    site.adopt("site-a")
    admit("site-b", *by_page)
    site.adopt("site-a", "site-b")
    site.type(there, status).ends(0)

    site.type(here, revoke).ends(0)
    wait_until(lambda: ALLOW.search(a.log), "the remedy", a)
    site.adopt("site-b")  # Meanwhile site-a adopts what it had got before.
    before = site.adopted("site-a")
    site.adopt("site-b")
    assert site.adopted("site-a") == before, "site-a got data after it was cut off"
    site.type(here, find(ALLOW, a.log)[0]).ends(0)
    site.adopt("site-a")

    either = site.adopted("site-a") | site.adopted("site-b")
    assert len(either) == len({(fragment, version) for fragment, version, _ in either})
    secret = tomllib.loads((there / "site-a.key").read_text())["secret"].encode()
    assert secret not in b"".join(path.read_bytes() for path in here.rglob("*") if path.is_file())
    assert secret.decode() not in "".join(child.log for child in site.children)


class Keys:
    """The keys of a broker and of its sites, made and admitted by `narrows keys`."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.server = self.make_broker("keys")

    def make_broker(self, folder: str) -> str:
        """Makes a broker's folder of keys; gives the public key."""
        return find(BROKER_KEY, self.site.tell("keys", "new", "--keys", folder))[0]

    def make(self, file: str, name: str, server: str = "", *, is_admitted: bool = False) -> Curve:
        """Makes the key file of a site, which trusts this broker or another one."""
        line = find(LINE, self.site.tell(
            "keys", "new", file, "--name", name, "--broker", self.site.address,
            f"--server={server or self.server}",  # With "=": a key may begin with a hyphen.
        ))  # fmt: skip
        if is_admitted:
            self.site.tell("keys", "allow", line[0])
        secret = tomllib.loads((self.site.folder / file).read_text())["secret"]
        return Curve(server or self.server, line[2], secret)


def ends_of(listener: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
    """A socket that says when a connection of this one ends."""
    return listener.get_monitor_socket(zmq.EVENT_DISCONNECTED)


@pytest.mark.timeout(120)
def test_strangers_stay_out_and_a_key_speaks_and_hears_for_its_own_site_only(site: Site) -> None:
    keys = Keys(site)
    names = ("site-a", "site-b", "site-c")
    curves = {name: keys.make(f"{name}.key", name, is_admitted=True) for name in names}
    keys.make("unknown.key", "unknown")
    keys.make("lost.key", "site-b", keys.make_broker("other"))
    liar = Path(shutil.copy(site.folder / "site-b.key", site.folder / "liar.key"))
    liar.write_text(liar.read_text().replace('"site-b"', '"site-a"'))
    broker = site.broker("fragments.count=1", keys="keys", seeder="site-a")
    site.learner("site-a", key=str(site.folder / "site-a.key"))
    files = {name: str(site.folder / f"{name}.key") for name in ("unknown", "lost", "liar")}
    outsiders = {
        name: site.learner(name, join_timeout_s=3, key=files.get(name)) for name in OUTSIDERS
    }
    site.contribute("site-a", count=2)
    fingerprint = fingerprint_of(site)
    victim = site.status("--key", "site-a.key")["learners"]["site-a"]["incarnation"]
    for name, (codes, word) in OUTSIDERS.items():
        outsiders[name].ends(*codes)
        assert word in outsiders[name].log

    with (
        Peer(site, "site-b", fingerprint, curves["site-b"]) as member,
        Peer(site, "site-c", fingerprint, curves["site-c"]) as thief,
    ):
        member.join()
        before = refusals(site)
        for _ in range(FORGED):
            member.chunk(b"forged", learner=victim)
        member.chunk(b"own", chunk=1)
        member.is_refused("bad_chunk")  # What came before it has been read.
        expected = Counter(key_name=FORGED, bad_chunk=1)
        wait_until(lambda: refusals(site) - before == expected, "the refusals", broker)

        listener = member.dial(zmq.SUB, 2, b"p/00")
        wait_until(lambda: listener.poll(0), "publications", broker)
        tap = thief.dial(zmq.SUB, 2, f"r/{victim}/00".encode())
        cut = ends_of(tap)
        wait_until(lambda: cut.poll(0), "the thief to be cut off", broker)
        assert not tap.poll(0)
        wait_until(lambda: "is kept out" in broker.log, "the reason in the log", broker)
        site.contribute("site-a")
        # The honest one was cut for a moment, too, and is back.
        member.hello()
        member.hear("welcome")

        standing = (member.control, member.uplink, listener)
        ends = [ends_of(each) for each in standing]
        site.tell("keys", "revoke", "site-b")
        wait_until(lambda: all(end.poll(0) for end in ends), "all to be cut", broker)
        for one in (listener, member.control):  # What had come before.
            while one.poll(0):
                one.recv_multipart()
        site.contribute("site-a", count=4)
        assert not listener.poll(0) and not member.control.poll(0)
    assert site.contributors() == {"site-a"}
    site.check_copies("site-a")
