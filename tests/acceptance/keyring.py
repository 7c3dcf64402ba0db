"""The keys of a broker and of its sites, made and admitted by the commands of `narrows keys`."""

from __future__ import annotations

import re
import shutil
import tomllib
from pathlib import Path
from typing import Final

from acceptance.kit import Site
from acceptance.raw import Curve

KEY: Final = r"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}"
BROKER_KEY: Final = re.compile(rf"^({KEY})$", re.MULTILINE)
"""The broker's public key, as `narrows keys new` prints it."""
LINE: Final = re.compile(rf"narrows-key \S+ ({KEY})")
"""The public line of a site."""


class Keyring:
    """A broker's folder of keys, in the folder of a test, beside the key files of sites."""

    def __init__(self, site: Site, name: str = "keys") -> None:
        self.site, self.name = site, name
        self.server = self._new(BROKER_KEY, "--keys", name)
        """The broker's public key."""
        self.public = dict[str, str]()
        """The public key in each key file."""

    def make(self, name: str, *, server: str = "", file: str = "") -> str:
        """Makes a key file of a site that trusts this broker's key, or another one."""
        file = file or f"{name}.key"
        options = ("--name", name, "--broker", self.site.address)
        # With "=", because a key may begin with a hyphen.
        self.public[file] = self._new(LINE, file, *options, f"--server={server or self.server}")
        return file

    def admit(self, name: str) -> str:
        """Makes a key file and has the broker admit its key."""
        file = self.make(name)
        self._keys("allow", f"narrows-key {name} {self.public[file]}", "--keys", self.name)
        return file

    def revoke(self, name: str) -> None:
        """Takes the keys of a site away."""
        self._keys("revoke", name, "--keys", self.name)

    def curve(self, file: str) -> Curve:
        """The keys in a key file, for sockets made by hand."""
        told = tomllib.loads((self.site.folder / file).read_text())
        return Curve(told["servers"][0], self.public[file], told["secret"])

    def _new(self, key: re.Pattern[str], *arguments: str) -> str:
        answer = self._keys("new", *arguments)
        found = key.search(answer)
        assert found, answer
        return found[1]

    def _keys(self, *arguments: str) -> str:
        answer = self.site.ask("keys", *arguments)
        assert answer.code == 0, answer.err
        return answer.out


def claim(folder: Path, file: str, name: str) -> str:
    """Copies a key file into one that claims another name for the same key."""
    made = Path(shutil.copy(folder / file, folder / "claim.key"))
    text = made.read_text()
    made.write_text(text.replace(f'name = "{tomllib.loads(text)["name"]}"', f'name = "{name}"'))
    return made.name
