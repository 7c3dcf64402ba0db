"""Two sites from nothing by the README's six commands; a key is taken back, and allowed again."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from acceptance.keyring import BROKER_KEY
from acceptance.kit import Child, Site, wait_until

README = Path(__file__).parents[2] / "README.md"
NARROWS, PYTHON = re.compile(r"^narrows\b"), "python -m narrows"
LINE = re.compile(r"narrows-key site-a \S+")
ALLOW = re.compile(r"narrows keys allow '[^']+'")
"""The remedy in the log of a learner that is not admitted."""
TRAIN = "--preset nano --step-wait-s 0.05 --data {folder}/text --events {folder}/{name}.jsonl"
"""Makes the README's learner small."""


def commands(address: str) -> list[str]:
    """The commands of the README's section, without their remarks, with this address."""
    section = README.read_text().partition("## Two sites\n")[2].partition("\n## ")[0]
    block = section.split("```\n")[1]
    lines = [line.split(" #")[0].strip() for line in block.splitlines()]
    return [line.replace("tcp://HOST:7070", address) for line in lines]


@pytest.mark.timeout(120)
def test_a_site_joins_with_its_key_is_cut_off_and_comes_back(site: Site) -> None:
    here, there, text = (site.folder / name for name in ("here", "there", "text"))
    for folder in (here, there, text):
        folder.mkdir()
    for number in range(20):
        (text / f"{number}.txt").write_text(f"{number} times {number}. " * 400)

    def type_at(folder: Path, command: str) -> Child:
        run = NARROWS.sub(PYTHON, command)
        return site.shell("bash", "-c", f"cd {folder} && exec {run}", name=command.split()[1])

    def prints(folder: Path, command: str, what: re.Pattern[str]) -> str:
        child = type_at(folder, command)
        child.ends(0)
        found = what.search(child.log)
        assert found, child.log
        return found[0]

    def installs(name: str) -> int:
        return len(site.events(name, "installed"))

    def adopts(name: str, *watched: Child) -> None:
        goal = installs(name) + 2
        wait_until(lambda: installs(name) >= goal, f"{name} to adopt", broker, *watched)

    new, serve, new_site, allow, train, revoke = commands(site.address)
    broker_key = prints(here, new, BROKER_KEY)
    broker = type_at(here, serve)
    line = prints(there, new_site.replace("BROKER_KEY", broker_key), LINE)
    type_at(here, allow.replace("LINE", line)).ends(0)
    a = type_at(there, f"{train} {TRAIN.format(folder=site.folder, name='site-a')}")
    second = new_site.replace("site-a", "site-b").replace("BROKER_KEY", broker_key)
    line_b = prints(there, second, re.compile(r"narrows-key site-b \S+"))
    type_at(here, allow.replace("LINE", line_b)).ends(0)
    adopts("site-a", a)
    small = TRAIN.format(folder=site.folder, name="site-b")
    b = type_at(there, f"{train.replace('site-a', 'site-b')} {small}")
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

    ours, theirs = site.adopted("site-a"), site.adopted("site-b")
    assert all(ours[key] == theirs[key] for key in ours.keys() & theirs.keys())
    secret = tomllib.loads((there / "site-a.key").read_text())["secret"].encode()
    assert secret not in b"".join(path.read_bytes() for path in here.rglob("*") if path.is_file())
    assert secret.decode() not in "".join(child.log for child in site.children)
