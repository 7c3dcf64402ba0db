"""Carries out the commands of `narrows keys`. Each says what to type next; none prints a secret."""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from narrows.broker.cli import enrolling
from narrows.broker.cli.tables import Facts, Table, show_lines, terminal, width_of
from narrows.broker.cli.tables import show as show_table
from narrows.proto.address import parse_address
from narrows.proto.config import nearest
from narrows.proto.errors import ConfigError
from narrows.proto.key_holder import KeyHolder, KeyRole
from narrows.proto.keys import (
    SERVERS_MAX,
    BrokerKey,
    Grant,
    Invitation,
    Invited,
    Keyring,
    SiteKey,
    allow_command,
    check_holder,
    check_public_key,
    edit_ring,
    is_invitation,
    new_broker_key,
    new_pair,
    new_ring,
    read_broker_key,
    read_invitation,
    read_ring,
    read_site_key,
    write_broker_key,
    write_site_key,
)
from narrows.proto.units import parse_duration_s

FILE_CHARACTERS_MAX = 4096
"""Characters of a file with an invitation that are read. The longest invitation has 1024."""


VALID_MAX_S = 366 * 86_400
"""Longest validity of an invitation: whoever finds an old one may become its name."""


@dataclass(frozen=True)
class Terms:
    """Role, organisation and bounds of a holder as the command line gives them; None: not given."""

    org: str | None = None
    role: str | None = None
    carries: str | None = None
    tokens_per_s_max: float | None = None

    def holder(self, name: str, ring: Keyring) -> KeyHolder:
        """The holder `name` on these terms; those that are not given stay as they are in `ring`.

        Raises ConfigError, also if the keys that the name has are on other terms.
        """
        known = [each.holder for each in ring.everybody if each.holder.name == name]
        before = known[0] if known else KeyHolder(name)
        carries = before.carries if self.carries is None else _names(self.carries)
        tokens_per_s_max = self.tokens_per_s_max
        holder = KeyHolder(
            name,
            before.role if self.role is None else _role(self.role),
            before.organisation if self.org is None else self.org,
            carries,
            before.tokens_per_s_max if tokens_per_s_max is None else tokens_per_s_max,
        )
        check_holder(holder, "keys")
        if known and holder != before:
            raise ConfigError(
                f"{name} is known on other terms",
                expected=_terms(before),
                got=_terms(holder),
                remedy=f"`narrows keys revoke {name}`, then type this again",
            )
        return holder


def _names(text: str) -> tuple[str, ...]:
    return tuple(each.strip() for each in text.split(","))


def _role(text: str) -> KeyRole:
    roles = [str(role) for role in KeyRole if role is not KeyRole.ENROL]
    if text not in roles:
        raise ConfigError(
            "--role", expected=", ".join(roles), got=repr(text), remedy=nearest(text, roles)
        )
    return KeyRole(text)


def _terms(holder: KeyHolder) -> str:
    return (
        f"role {holder.role}, organisation {holder.organisation!r}, carries "
        f"{','.join(holder.carries) or 'nobody'}, tokens_per_s_max {holder.tokens_per_s_max:g}"
    )


def new_broker(directory: Path) -> None:
    """Makes a broker's directory of keys."""
    key = new_broker_key(directory)
    new_ring(directory)
    option = _option(directory)
    print(f"The broker's keys are in {directory}. Its public key: {key.current.public}")
    print("Next, for each site:")
    print(f"    narrows keys invite NAME --address tcp://HOST:7070{option} > NAME.invite")
    print("Then:")
    print(f"    narrows broker --keys {_quoted(directory)} --founder NAME --listen 'tcp://*:7070'")


def new_site(file: Path, name: str, broker: str, server: str) -> None:
    """Makes a site's key without an invitation."""
    for option, value in {"--name": name, "--broker": broker, "--server": server}.items():
        if not value:
            raise ConfigError(
                f"{option} is missing",
                expected="--name, --broker and --server for the key of a site",
                remedy="`narrows keys show` prints the broker's key at its site; with an "
                f"invitation: narrows keys accept INVITATION --to {_quoted(file)}",
            )
    check_holder(KeyHolder(name), "--name")
    parse_address(broker, "--broker")
    check_public_key(server, "--server")
    key = SiteKey(name, new_pair(), broker, (server,))
    write_site_key(file, key)
    print(f"The key of {name} is in {file}. Next, at the broker:")
    print(f"    {allow_command(name, key.pair.public)}")
    print("Then here:")
    print(f"    narrows learner --key {_quoted(file)}")


def show(path: Path) -> None:
    """Prints the public parts of a site's key file or of a broker's directory."""
    facts = Facts()
    if path.is_dir():
        key = read_broker_key(path)
        facts.add("broker's public key", key.current.public)
        if key.next is not None:
            facts.add("its successor", key.next.public)
    else:
        site = read_site_key(path)
        facts.add("name", site.name)
        facts.add("public key", site.pair.public)
        facts.add("broker", site.broker)
        for server in site.servers:
            facts.add("trusted broker", server)
    show_table(terminal(), facts)


def show_ring(directory: Path, *, as_json: bool) -> None:
    """Prints everybody whom a broker admits, and the open invitations."""
    now, ring = time.time(), _ring(directory)
    rows = [_row(each) for each in ring.everybody if now < each.until]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    words = ("name", "state", "role", "organisation", "key", "until")
    table = Table(words, keys=1, left=words)
    for row in rows:
        table.add(*(str(row[word] or "-") for word in words))
    console = terminal()
    show_lines(console, table.lines(width_of(console)))
    if not rows:
        print("nobody is admitted yet: `narrows keys invite NAME --address tcp://HOST:PORT`")


def _row(entry: Grant | Invited) -> Mapping[str, object]:
    is_key, holder = isinstance(entry, Grant), entry.holder
    until = None if entry.until == math.inf else _written(entry.until)
    return {
        "name": holder.name,
        "state": "key" if is_key else "invited",
        "role": str(holder.role),
        "organisation": holder.organisation,
        "carries": list(holder.carries),
        "tokens_per_s_max": holder.tokens_per_s_max,
        "key": entry.public if is_key else "",
        "until": until,
    }


def allow(directory: Path, name: str, public: str, terms: Terms) -> None:
    """Admits a key."""
    _ring(directory)
    with edit_ring(directory) as rings:
        holder, now, before = terms.holder(name, rings[0]), time.time(), rings[0].of(name)
        rings[0] = rings[0].allow(holder, public, now=now)
        ends = [grant for grant in rings[0].of(name) if grant.until < math.inf]
        kept = {grant.public for grant in rings[0].of(name)}
    print(f"{name} is admitted with this key ({_terms(holder)}).")
    for grant in ends:
        print(f"Its key before, {grant.public}, ends at {_written(grant.until)}.")
    for grant in before:
        if grant.public not in kept and now < grant.until:
            print(f"Its key {grant.public} ends at once: a name has two keys at most.")


def revoke(directory: Path, name: str) -> None:
    """Removes a name from the ring."""
    _ring(directory)
    with edit_ring(directory) as rings:
        before = rings[0]
        rings[0] = before.revoke(name)
        removed = len(before.everybody) - len(rings[0].everybody)
        if not removed:
            names = sorted({each.holder.name for each in before.everybody})
            raise ConfigError(
                f"{name} has neither a key nor an invitation",
                remedy=nearest(name, names) or "`narrows keys list` has the names",
            )
    print(f"{name} is revoked. A broker that runs cuts it off within 2 s.")


def invite(directory: Path, name: str, terms: Terms, *, address: str, valid: str) -> None:
    """Prints an invitation: the line on standard output, all else on standard error."""
    parse_address(address, "--address")
    _ring(directory)
    server = read_broker_key(directory).current.public
    token, until = new_pair(), int(time.time() + _validity_s(valid))
    with edit_ring(directory) as rings:
        holder = terms.holder(name, rings[0])
        rings[0] = rings[0].invite(holder, token.public, until=until)
    print(Invitation(address, server, name, token, until))
    print(
        f"An invitation for {name}, until {_written(until)}. Send it as you would send a password. "
        f"At the other site:\n    narrows keys accept FILE --to {name}.key\n"
        f"FILE holds the line; `-` reads it from standard input.",
        file=sys.stderr,
    )


def _validity_s(text: str) -> float:
    seconds = parse_duration_s(text)
    if not 0 < seconds <= VALID_MAX_S:
        most = f"at most {VALID_MAX_S // 86_400}d"
        raise ConfigError("--valid", expected=f"more than 0 and {most}", got=repr(text[:64]))
    return seconds


def accept(text: str, to: Path, *, timeout_s: float) -> None:
    """Makes the key of this site from an invitation: its file, `-`, or the line itself."""
    key = enrolling.accept(read_invitation(_invitation_text(text)), to, timeout_s=timeout_s)
    print(f"The broker at {key.broker} admits this site as {key.name}. The key is in {to}. Next:")
    print(f"    narrows learner --key {_quoted(to)}")


def _invitation_text(given: str) -> str:
    if given == "-":
        return sys.stdin.read(FILE_CHARACTERS_MAX)
    if is_invitation(given):
        return given
    try:
        with Path(given).open(encoding="utf-8", errors="replace") as file:
            return file.read(FILE_CHARACTERS_MAX)
    except OSError as error:
        raise ConfigError(
            f"cannot read the invitation {given[:80]!r}: {error.strerror}",
            expected="a file with the line that `narrows keys invite` printed, or `-`",
        ) from error


def rotate_site(file: Path, *, timeout_s: float) -> None:
    """Replaces the pair of a site."""
    key = enrolling.rotate(file, timeout_s=timeout_s)
    print(f"{file} has a new key, which the broker admits: {key.pair.public}")
    print("The old one stays valid for a day. One that it replaced within a day ends at once.")
    print("Learners that run take the new one by themselves.")


def rotate_broker(directory: Path, *, now: bool) -> None:
    """Makes a successor of the broker's key, or puts it into use."""
    key = read_broker_key(directory)
    if now:
        _switch(directory, key)
        return
    if key.next is None:
        key = dataclasses.replace(key, next=new_pair())
        write_broker_key(directory, key)
    assert key.next is not None
    print("The broker has a successor of its key. Type at each site:")
    print(f"    narrows keys trust FILE {shlex.quote(key.next.public)}")
    print("When all sites have done so:")
    print(f"    narrows keys rotate{_option(directory)} --now")


def _switch(directory: Path, key: BrokerKey) -> None:
    if key.next is None:
        raise ConfigError(
            f"{directory} has no successor of the broker's key",
            remedy=f"`narrows keys rotate{_option(directory)}` makes one, and says what the sites "
            "have to type",
        )
    write_broker_key(directory, BrokerKey(key.next))
    print(f"The broker's key is {key.next.public} from its next start on. Start it again.")
    print("Sites that do not trust it yet learn it with `narrows keys trust`.")


def trust(file: Path, public: str, *, only: bool) -> None:
    """Adds a key of the broker to those that a site trusts."""
    key = read_site_key(file)
    check_public_key(public, "the broker's key")
    others = () if only else tuple(each for each in key.servers if each != public)
    if len(others) >= SERVERS_MAX:
        raise ConfigError(
            f"{file} trusts {len(others)} keys already",
            expected=f"at most {SERVERS_MAX}",
            remedy="--only trusts this one and forgets the others",
        )
    write_site_key(file, dataclasses.replace(key, servers=(*others, public)), replace=True)
    print(f"{file} trusts: {', '.join((*others, public))}")
    print("Learners that run take it over when their broker refuses the other keys.")


def _ring(directory: Path) -> Keyring:
    """The ring of a broker. Raises ConfigError, naming the command that makes it."""
    read_broker_key(directory)
    new_ring(directory)
    return read_ring(directory)


def _option(directory: Path) -> str:
    return "" if directory == Path("keys") else f" --keys {_quoted(directory)}"


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))


def _written(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(sep=" ", timespec="seconds")
