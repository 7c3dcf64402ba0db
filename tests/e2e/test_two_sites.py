"""Two sites from nothing: keys, an invitation, a run, and a learner that is revoked."""

from __future__ import annotations

import re
from pathlib import Path

from two_sites import BLOCK, DOCUMENT, REMEDY, Walk

from narrows.proto.keys import read_broker_key, read_ring, read_site_key

README = DOCUMENT.parent.parent / "README.md"


def test_two_sites_in_six_commands(tmp_path: Path, data: Path) -> None:
    with Walk(tmp_path, f"--data {data} --preset nano --join-timeout-s 200") as walk:
        walk.go()
        learner = read_site_key(walk.learner_site / "site-a.key")
        broker = read_broker_key(walk.broker_site / "keys")
        assert len(walk.commands) <= 6
        assert not read_ring(walk.broker_site / "keys").everybody
        # It was cut while it trained, it goes on, and it says what the operator has to type.
        assert "1 key out of the ring: 9 connections cut" in walk.log("broker")
        assert f"{REMEDY} '{learner.pair.public}'" in walk.log("learner")
        printed = "".join(walk.log(name) for name in walk.blocks if name != "revoked")
        for secret in (learner.pair.secret, broker.current.secret):
            assert secret not in printed
        files = [path for path in walk.broker_site.rglob("*") if path.is_file()]
        assert not any(learner.pair.secret.encode() in path.read_bytes() for path in files)


def test_the_document_and_the_readme_have_the_commands_of_the_walk() -> None:
    """The transcript is not made anew here, but what it types must be what the walk types."""
    blocks = {match[2] for match in BLOCK.finditer(DOCUMENT.read_text(encoding="utf-8"))}
    assert blocks == {"new", "invite", "broker", "accept", "learner", "revoke", "revoked"}
    typed = re.findall(r"^\$ (narrows .*)$", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(typed) == 6
    section = README.read_text(encoding="utf-8").partition("## Two sites")[2].partition("\n## ")[0]
    in_readme = re.findall(r"^(narrows .*?)(?: +#.*)?$", section, re.MULTILINE)
    host = re.compile(r"tcp://[^ ]+:\d+")
    assert [host.sub("A", each) for each in in_readme] == [host.sub("A", each) for each in typed]
