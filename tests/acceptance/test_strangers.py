"""Nobody gets in without an admitted key, and a key speaks for no other name, on any port."""

from __future__ import annotations

from collections import Counter

import zmq
from acceptance.keyring import Keyring, claim
from acceptance.kit import Site, wait_until
from acceptance.raw import Peer, fingerprint_of, refusals

FORGED = 5
"""Chunks that site-b sends in the name of site-a."""

OUTSIDERS = {
    "keyless": (3, "admits only those who have a key"),
    "unknown": (3, "does not admit the key of unknown"),
    "lost": (4, "broker_unreachable"),
    "liar": (3, "key_name"),
}
"""Learners that must not get in, with their exit code and a part of what they print."""


def test_strangers_stay_out_and_a_key_speaks_for_its_own_name_only(site: Site) -> None:
    ring, wrong = Keyring(site), Keyring(site, "other").server
    key_a, key_b = ring.admit("site-a"), ring.admit("site-b")
    files = {
        "unknown": ring.make("unknown"),
        "lost": ring.make("site-b", server=wrong, file="lost.key"),
        "liar": claim(site.folder, key_b, "site-a"),
    }
    broker = site.broker(keys=ring.name, seeder="site-a", fragments=1)
    learner = site.learner("site-a", key=str(site.folder / key_a))
    outsiders = {
        name: site.learner(name, join_timeout_s=3, key=file and str(site.folder / file))
        for name, file in ((name, files.get(name)) for name in OUTSIDERS)
    }
    wait_until(lambda: len(site.merged()) >= 2, "merges", broker, learner)
    view, fingerprint = site.status("--key", key_a), fingerprint_of(site.layout())
    assert view is not None

    with Peer(site.address, "site-b", fingerprint, ring.curve(key_b)) as member:
        member.join()
        outsiders["liar"].wait()  # Its refusal counts, too.
        before = refusals(site)
        victim = view.learners["site-a"].incarnation
        for push in range(FORGED):
            member.chunk(b"forged", learner=victim, push_id=1000 + push)
        member.chunk(b"own", chunk=1)
        assert member.hear("refuse")["code"] == "bad_chunk"  # What came before it has been read.
        wait_until(
            lambda: refusals(site) - before == Counter(key_name=FORGED, bad_chunk=1),
            "the refusals",
            broker,
        )

        listener = member.dial(zmq.SUB, 2, b"p/")
        ends = listener.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        for topic in (b"p/00", member.topic()):
            listener.setsockopt(zmq.SUBSCRIBE, topic)
        wait_until(lambda: ends.poll(0), "the end of who listens to more than topics", broker)
    wait_until(lambda: "is kept out" in broker.log, "the reason in the log", broker)
    site.contribute("site-a")

    for name, (code, word) in OUTSIDERS.items():
        outsiders[name].ends(code)
        assert word in site.told(name)["said"], site.told(name)
    assert {name for one in site.merged() for name in one["contributors"]} == {"site-a"}
    site.check_equal_copies("site-a")


def test_a_key_hears_no_other_site_and_nothing_once_it_is_revoked(site: Site) -> None:
    ring = Keyring(site)
    keys = {name: ring.admit(name) for name in ("site-a", "site-b", "site-c")}
    broker = site.broker(keys=ring.name, seeder="site-a", fragments=1)
    learner = site.learner("site-a", key=str(site.folder / keys["site-a"]))
    wait_until(lambda: len(site.merged()) >= 2, "merges", broker, learner)
    view, fingerprint = site.status("--key", keys["site-a"]), fingerprint_of(site.layout())
    assert view is not None

    with (
        Peer(site.address, "site-b", fingerprint, ring.curve(keys["site-b"])) as member,
        Peer(site.address, "site-c", fingerprint, ring.curve(keys["site-c"])) as thief,
    ):
        member.join()
        listener = member.dial(zmq.SUB, 2, b"p/00")
        wait_until(lambda: listener.poll(0), "publications", broker, learner)
        stolen = f"r/{view.learners['site-a'].incarnation}/00".encode()
        tap = thief.dial(zmq.SUB, 2, stolen)
        cut = tap.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        wait_until(lambda: cut.poll(0), "the thief to be cut off", broker, learner)
        assert not tap.poll(0)
        site.contribute("site-a")

        # The honest one was cut for a moment, too, and is back.
        member.hello()
        member.hear("welcome")

        standing = (member.control, member.uplink, listener)
        ends = [one.get_monitor_socket(zmq.EVENT_DISCONNECTED) for one in standing]
        ring.revoke("site-b")
        wait_until(lambda: all(end.poll(0) for end in ends), "all to be cut", broker, learner)
        for one in (listener, member.control):  # What had come before.
            while one.poll(0):
                one.recv_multipart()
        site.contribute("site-a", count=4)
        assert not listener.poll(0) and not member.control.poll(0)
    site.check_equal_copies("site-a")
