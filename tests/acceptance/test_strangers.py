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
    "keyless": (3, "admits only those that have a key"),
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
    broker = site.broker(keys=ring.name, founder="site-a", fragments=1)
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
        before = refusals(member)
        victim = {"learner": "site-a", "incarnation": view.learners["site-a"].incarnation}
        for push in range(FORGED):
            version = site.merged()[-1]["version"]
            member.chunk(b"forged", **victim, version=version, push_id=1000 + push)
        member.chunk(b"own", run_id="0" * 16)
        assert member.hear("refuse")["code"] == "wrong_run"  # What came before it has been read.
        assert refusals(member) - before == Counter(key_name=FORGED, wrong_run=1)

        listener = member.dial(zmq.SUB, 2)
        stolen = "/".join([*victim.values(), "00"]).encode()
        for topic in (stolen, b"", b"site-a/", *map(member.topic, range(4))):
            listener.setsockopt(zmq.SUBSCRIBE, topic)
        wait_until(lambda: listener.poll(0), "data of site-b's own", broker, learner)
        made = len(site.merged())
        wait_until(lambda: len(site.merged()) >= made + 4, "more merges", broker, learner)
        while listener.poll(0):
            assert listener.recv_multipart()[0].startswith(b"site-b/")

        standing = (member.control, member.uplink, listener)
        ends = [one.get_monitor_socket(zmq.EVENT_DISCONNECTED) for one in standing]
        ring.revoke("site-b")
        wait_until(lambda: all(end.poll(0) for end in ends), "all to be cut", broker, learner)

    for name, (code, word) in OUTSIDERS.items():
        outsiders[name].ends(code)
        assert word in site.told(name)["said"], site.told(name)
    assert {name for one in site.merged() for name in one["contributors"]} == {"site-a"}
    site.check_equal_copies("site-a")
