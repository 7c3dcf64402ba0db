"""Two sites from nothing by the README's six commands; a key is taken back, and allowed again."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from acceptance.kit import Child, Site, wait_until

README = Path(__file__).parents[2] / "README.md"
ALLOW = re.compile(r"narrows keys allow site-a '[^']+'")
TRAIN = "--preset nano --step-wait-s 0.05 --data {folder}/text --events {folder}/{name}.jsonl"
"""Makes the README's learner small."""

RETURN_S = 60.0
"""A learner that was refused dials again after 5, 10 and 20 s."""


def commands(address: str) -> list[str]:
    """The commands of the README's section, without their remarks, with this address."""
    section = README.read_text().partition("## Two sites\n")[2].partition("\n## ")[0]
    block = section.split("```\n")[1]
    lines = [line.split(" #")[0].strip() for line in block.splitlines()]
    return [line.replace("tcp://HOST:7070", address) for line in lines]


@pytest.mark.timeout(120)
def test_a_site_joins_by_invitation_is_cut_off_and_comes_back(site: Site) -> None:
    here, there, text = (site.folder / name for name in ("here", "there", "text"))
    for folder in (here, there, text):
        folder.mkdir()
    for number in range(20):
        (text / f"{number}.txt").write_text(f"{number} times {number}. " * 400)

    def type_at(folder: Path, command: str) -> Child:
        return site.shell("bash", "-c", f"cd {folder} && exec {command}", name=command.split()[1])

    def installs(name: str) -> int:
        return len(site.events(name, "installed"))

    def adopts(name: str, *watched: Child) -> None:
        goal = installs(name) + 2
        wait_until(
            lambda: installs(name) >= goal, f"{name} to adopt", broker, *watched, timeout_s=RETURN_S
        )

    new, invite, serve, accept, train, revoke = commands(site.address)
    type_at(here, new).ends(0)
    type_at(here, invite).ends(0)
    broker = type_at(here, serve)
    (here / "site-a.invite").rename(there / "site-a.invite")
    type_at(there, accept).ends(0)
    a = type_at(there, f"{train} {TRAIN.format(folder=site.folder, name='site-a')}")

    offer = site.ask("keys", "invite", "site-b", "--address", site.address, "--keys", "here/keys")
    (site.folder / "b.invite").write_text(offer.out)
    assert site.ask("keys", "accept", "b.invite", "--to", "b.key").code == 0
    thief = site.narrows("thief", "keys", "accept", "there/site-a.invite", "--to", "thief.key")
    adopts("site-a", a)
    small = TRAIN.format(folder=site.folder, name="site-b").split()
    b = site.narrows("site-b", "learner", "--key", "b.key", *small)
    adopts("site-b", b)
    adopts("site-a", a)

    type_at(here, revoke).ends(0)
    wait_until(lambda: ALLOW.search(a.log), "the remedy", a, broker)
    adopts("site-b", b)  # Meanwhile site-a adopts what it had got before.
    before = installs("site-a")
    adopts("site-b", b)
    assert installs("site-a") == before, "site-a got data after it was cut off"
    remedy = ALLOW.search(a.log)
    assert remedy
    type_at(here, remedy[0]).ends(0)
    adopts("site-a", a)
    thief.ends(3)

    ours, theirs = site.adopted("site-a"), site.adopted("site-b")
    assert all(ours[key] == theirs[key] for key in ours.keys() & theirs.keys())
    secret = tomllib.loads((there / "site-a.key").read_text())["secret"].encode()
    assert secret not in b"".join(path.read_bytes() for path in here.rglob("*") if path.is_file())
    assert secret.decode() not in "".join(child.log for child in site.children)
