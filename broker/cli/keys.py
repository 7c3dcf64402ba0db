"""`narrows keys`: make a key, show its public line, admit it, take it away.

The site runs `keys new site-a.key --name site-a` and mails the line that it prints. The operator of
the broker runs `keys allow` with it, and tells the site the broker's public key.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, TypeAlias

import cyclopts
from cyclopts import Parameter

from narrows.proto.config import parse_address
from narrows.proto.errors import ConfigError
from narrows.proto.keys import (
    AllowList,
    SiteKey,
    check_key,
    check_name,
    create_broker_key,
    new_pair,
    public_line,
    read_broker_key,
    read_public_line,
    read_site_key,
    write_site_key,
)
from narrows.proto.units import counted

keys = cyclopts.App(name="keys", help="Make, show, admit and revoke keys.")

FOLDER = Path("keys")
"""Where a broker's keys are, unless another folder is named."""

Folder: TypeAlias = Annotated[Path, Parameter(help="Folder of the broker's keys.")]

Key: TypeAlias = Annotated[str, Parameter(allow_leading_hyphen=True)]
"""A public key: 40 characters, the first of which may be a hyphen."""


@keys.command
def new(
    file: Path | None = None,
    *,
    name: str = "",
    server: Key = "",
    broker: str = "",
    keys: Folder = FOLDER,
) -> None:
    """Make a site's key file, or without FILE a broker's folder of keys.

    With a FILE that exists the key in it stays, and --server and --broker are changed.

    Args:
        file: Key file of a site.
        name: Name of the site: its learners are called so, or NAME/0, NAME/1 and so on.
        server: Public key of the broker, as `narrows keys show` prints it there.
        broker: Address of the broker, tcp://HOST:PORT.
    """
    if file is None:
        if name or server or broker:
            raise ConfigError("no file", expected="narrows keys new FILE --name NAME")
        pair = create_broker_key(keys)
        print(f"{keys / 'broker.key'} is made. Sites need its public key:\n{pair.public}")
        return
    exists = file.exists()
    if exists:
        done = "changed"
        site = read_site_key(file)
    else:
        done = "made"
        site = SiteKey(check_name(name, "--name"), new_pair())
    if name not in ("", site.name):
        raise ConfigError(f"{file} is the key of another site", expected=site.name, got=name)
    if server:
        site = replace(site, servers=(check_key(server, "--server"),))
    if broker:
        site = replace(site, broker=str(parse_address(broker)))
    write_site_key(file, site, replace=exists)
    print(f"{file} is {done}. Mail this line to the broker's operator:")
    print(public_line(site.name, site.pair.public))
    if not site.servers:
        print(f"Then add the broker's public key: narrows keys new {file} --server 'KEY'")


@keys.command
def show(path: Path = FOLDER) -> None:
    """Print the public parts of a site's key file, or of a broker's key or folder of keys.

    Args:
        path: The file or folder.
    """
    folder = path if path.is_dir() else path.parent
    if path in (folder, folder / "broker.key"):
        print(read_broker_key(folder).public)
        return
    site = read_site_key(path)
    print(public_line(site.name, site.pair.public))
    for server in site.servers:
        print(f"trusts {server}")
    if site.broker:
        print(f"joins {site.broker}")


@keys.command
def allow(*line: Key, keys: Folder = FOLDER) -> None:
    """Admit a key. A broker that runs admits it within two seconds.

    A site may have several keys, so that a new one can take the place of an old one.

    Args:
        line: The line that the site has mailed, in single quotes: 'narrows-key NAME KEY'.
    """
    name, key = read_public_line(" ".join(line))
    count = len(AllowList.allow(_checked(keys), name, key).sites[name])
    print(f"{name} is admitted with {counted(count, 'key')}")


@keys.command
def revoke(name: str, key: Key = "", *, keys: Folder = FOLDER) -> None:
    """Take a site's keys away. A broker that runs cuts its learners off within two seconds.

    Args:
        name: Name of the site.
        key: The one key to take away; without it all.
    """
    left = AllowList.revoke(_checked(keys), name, key).sites.get(name, ())
    print(f"{name} has {counted(len(left), 'key')} left")


@keys.command(name="list")
def list_(
    *, keys: Folder = FOLDER, json_: Annotated[bool, Parameter(name="--json")] = False
) -> None:
    """Print every site that the broker admits, with its keys.

    Args:
        json_: Print JSON.
    """
    sites = AllowList.read(_checked(keys)).sites
    if json_:
        print(json.dumps(sites, indent=1))
        return
    for name, public_keys in sites.items():
        for public in public_keys:
            print(public_line(name, public))
    if not sites:
        print("nobody is admitted: `narrows keys allow` admits a site")


def _checked(folder: Path) -> Path:
    """The folder, if it is one of a broker's keys. Raises ConfigError."""
    if not AllowList.path(folder).exists():
        raise ConfigError(
            f"no allow list in {folder.absolute()}",
            expected="the folder that `narrows keys new` has made at the broker",
            remedy="name it with --keys FOLDER, as for `narrows broker`",
        )
    return folder
