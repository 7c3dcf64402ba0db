"""Files of keys: a broker's ring and key, a site's key; read, written and read again.

The first byte of an input chooses the file.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from any_messages import mutated
from fuzz.target import Target
from hypothesis import strategies as st

from narrows.proto.errors import ConfigError
from narrows.proto.keys import read_broker_key, read_ring, read_site_key, write_site_key
from narrows.proto.keys.broker_key import write_broker_key
from narrows.proto.keys.ring import write_ring

PUBLIC = "Yne@$w-vo<fVvi]a<NY6T1ed:M$fCG*[IaLV{hID"
SECRET = "D:)Q[IlAW!ahhC2ac:9*A}h:p?([4%wOTJ%JR%cs"
"""The pair in the documentation of CURVE, which is no secret of anybody."""

_folder = tempfile.TemporaryDirectory(prefix="narrows-fuzz-")
FOLDER = Path(_folder.name)
NAMES = ("allowed.toml", "broker.key", "site.key")


def run(data: bytes) -> None:
    if not data:
        return
    kind = data[0] % len(NAMES)
    path = FOLDER / NAMES[kind]
    path.write_bytes(data[1:])
    path.chmod(0o600)
    try:
        (ring, broker, site)[kind](path)
    except ConfigError as error:
        # In the ring everything is public; in the others a secret may stand in any place.
        assert kind == 0 or SECRET not in str(error)


def ring(path: Path) -> None:
    found = read_ring(path.parent)
    write_ring(path.parent, found)
    assert read_ring(path.parent) == found
    for each in found.everybody:
        assert found.holder(each.public, 0.0) or each.until <= 0.0


def broker(path: Path) -> None:
    found = read_broker_key(path.parent)
    write_broker_key(path.parent, found)
    assert read_broker_key(path.parent) == found and SECRET not in repr(found)


def site(path: Path) -> None:
    found = read_site_key(path)
    write_site_key(path, found, replace=True)
    assert read_site_key(path) == found and SECRET not in repr(found)


RING = f'''format = 1
[[key]]
name = "site-a"
public = "{PUBLIC}"
role = "relay"
organisation = "org"
carries = ["b", "c"]
tokens_per_s_max = 1e6
until = "2027-01-31T12:00:00+00:00"
[[invitation]]
name = "d"
public = "{SECRET}"
until = "2027-01-31"
'''
FILES = (
    (0, RING), (0, "format = 1\n"), (0, RING.replace(' "c"]', ' "c",]\n')),
    (1, f'format = 1\nsecret = "{SECRET}"\n'),
    (1, f'format = 1\nsecret = "{SECRET}"\nnext_secret = "{SECRET}"\n'),
    (2, f'format = 1\nname = "a"\nbroker = "tcp://h:1"\nservers = ["{PUBLIC}"]\n'
        f'secret = "{SECRET}"\n'),
)  # fmt: skip


def seeds() -> list[bytes]:
    return [bytes([kind]) + text.encode() for kind, text in FILES]


EXAMPLES = mutated(st.sampled_from(seeds()))

TARGET = Target("keys", run, seeds, EXAMPLES, bytes_max=1024)
