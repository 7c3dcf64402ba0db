"""`narrows keys`: the commands around keys, at the broker's site and at the learners' sites."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import cyclopts
from cyclopts import Parameter

keys = cyclopts.App(name="keys", help="Make, admit, hand over, replace and revoke keys.")

DIRECTORY = Path("keys")
"""Directory of the broker's keys, unless another one is named."""

Key: TypeAlias = Annotated[str, Parameter(allow_leading_hyphen=True)]
"""A public key: 40 characters, the first of which may be a hyphen."""

Invitation: TypeAlias = Annotated[str, Parameter(allow_leading_hyphen=True)]
"""A file with an invitation; `-` is standard input."""


@keys.command
def new(
    file: Path | None = None,
    *,
    keys: Path = DIRECTORY,
    name: str = "",
    broker: str = "",
    server: Key = "",
) -> None:
    """Make a broker's directory of keys; or with FILE a site's key, without an invitation.

    Parameters
    ----------
    file
        Key file of a site to make; it needs --name, --broker and --server.
    keys
        Directory of the broker's keys to make.
    name
        Name of the site's learner.
    broker
        Address of its broker, tcp://HOST:PORT.
    server
        Public key of that broker, as `narrows keys show` prints it there.
    """
    from narrows.broker.cli.key_commands import new_broker, new_site

    if file is None:
        new_broker(keys)
    else:
        new_site(file, name, broker, server)


@keys.command
def show(path: Path = DIRECTORY) -> None:
    """Print the public parts of a site's key file or of a broker's directory of keys.

    Parameters
    ----------
    path
        The file or directory.
    """
    from narrows.broker.cli.key_commands import show

    show(path)


@keys.command(name="list")
def list_(*, keys: Path = DIRECTORY, json: bool = False) -> None:
    """Print everybody whom the broker admits, and the invitations that nobody has accepted yet.

    Parameters
    ----------
    keys
        Directory of the broker's keys.
    json
        Print JSON instead of a table.
    """
    from narrows.broker.cli.key_commands import show_ring

    show_ring(keys, as_json=json)


@keys.command
def allow(
    name: str,
    key: Key,
    *,
    keys: Path = DIRECTORY,
    org: str | None = None,
    role: str | None = None,
    carries: str | None = None,
    tokens_per_s_max: float | None = None,
) -> None:
    """Admit a public key. A broker that runs admits it within 2 s.

    The key that a name had before ends in a day; of three keys the oldest ends at once. Role,
    organisation and the like stay those of that key, unless it was revoked.

    Parameters
    ----------
    name
        Name of the holder: the one under which its learner trains.
    key
        Its public key, as its site's `narrows keys show` prints it.
    keys
        Directory of the broker's keys.
    org
        Organisation of the holder. Learners of one organisation trust what each of them declares.
    role
        learner (default), relay, standby, operator (reads the whole status) or monitor (its
        totals).
    carries
        For a relay: names of the learners for which it speaks, with commas.
    tokens_per_s_max
        Most tokens per second that count for this holder (default: the broker derives a bound).
    """
    from narrows.broker.cli.key_commands import Terms, allow

    allow(keys, name, key, Terms(org, role, carries, tokens_per_s_max))


@keys.command
def revoke(name: str, *, keys: Path = DIRECTORY) -> None:
    """Remove the keys and the invitation of a name. A broker that runs cuts it off within 2 s.

    Parameters
    ----------
    name
        Name of the holder.
    keys
        Directory of the broker's keys.
    """
    from narrows.broker.cli.key_commands import revoke

    revoke(keys, name)


@keys.command
def invite(
    name: str,
    *,
    address: str,
    valid: str = "24h",
    keys: Path = DIRECTORY,
    org: str | None = None,
    role: str | None = None,
    carries: str | None = None,
    tokens_per_s_max: float | None = None,
) -> None:
    """Print an invitation: one line with which a site gets a key for a name, once.

    Whoever has the line first gets the name: send it as you would send a password. Only the line
    goes to standard output. A newer invitation for the name takes its place.

    Parameters
    ----------
    name
        Name of the holder: the one under which its learner will train.
    address
        Address at which the site reaches this broker, tcp://HOST:PORT.
    valid
        Time until it expires, such as 24h or 30min; at most 366d.
    keys
        Directory of the broker's keys.
    org
        As for `narrows keys allow`.
    role
        As for `narrows keys allow`.
    carries
        As for `narrows keys allow`.
    tokens_per_s_max
        As for `narrows keys allow`.
    """
    from narrows.broker.cli.key_commands import Terms, invite

    invite(keys, name, Terms(org, role, carries, tokens_per_s_max), address=address, valid=valid)


@keys.command
def accept(invitation: Invitation, *, to: Path, timeout_s: float = 20.0) -> None:
    """Make this site's key and have the broker admit it. The secret never leaves the site.

    Was it interrupted, or the answer lost? The same command again goes on with the same key.

    Parameters
    ----------
    invitation
        A file with the line that `narrows keys invite` printed, or `-`: it is read from standard
        input. The line itself will do, but other users of this machine can see it while it runs.
    to
        Key file to make.
    timeout_s
        Seconds to wait for the broker.
    """
    from narrows.broker.cli.key_commands import accept

    accept(invitation, to, timeout_s=timeout_s)


@keys.command
def rotate(
    file: Path | None = None, *, keys: Path = DIRECTORY, now: bool = False, timeout_s: float = 20.0
) -> None:
    """Replace a site's key; or, without FILE, the broker's own key in two steps.

    A site's old key stays valid for a day, and learners that run take the new one by themselves.
    The key before that one ends at once: of three keys a broker admits the newer two.
    The broker's successor is made first, so that all sites can trust it; --now puts it into use.

    Parameters
    ----------
    file
        Key file of a site.
    keys
        Directory of the broker's keys.
    now
        Put the broker's successor into use. The broker has to be started again.
    timeout_s
        Seconds to wait for the broker.
    """
    from narrows.broker.cli.key_commands import rotate_broker, rotate_site

    if file is not None:
        rotate_site(file, timeout_s=timeout_s)
    else:
        rotate_broker(keys, now=now)


@keys.command
def trust(file: Path, key: Key, *, only: bool = False) -> None:
    """Have a site trust one more key of its broker. Learners try the trusted keys in turn.

    Parameters
    ----------
    file
        Key file of the site.
    key
        Public key of the broker.
    only
        Trust no other key any more: the old one may be in wrong hands.
    """
    from narrows.broker.cli.key_commands import trust

    trust(file, key, only=only)
