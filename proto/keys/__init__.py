"""Keys of brokers and sites: CURVE key pairs in files, a broker's key ring, invitations.

A secret stands in a file of its owner alone, and in no other place. The ring holds public keys.
"""

from narrows.proto.keys.broker_key import (
    BrokerKey,
    broker_key_path,
    new_broker_key,
    read_broker_key,
    write_broker_key,
)
from narrows.proto.keys.handshakes import (
    MONITORED,
    Handshake,
    Handshakes,
    allow_command,
    curve_options,
    outcome_of,
)
from narrows.proto.keys.invitation import Invitation, is_invitation, read_invitation
from narrows.proto.keys.pair import KeyPair, check_public_key, new_pair, pair_of_secret
from narrows.proto.keys.ring import (
    Grant,
    Invited,
    Keyring,
    check_holder,
    edit_ring,
    new_ring,
    read_ring,
    ring_path,
    write_ring,
)
from narrows.proto.keys.site_key import (
    SERVERS_MAX,
    SiteKey,
    key_path,
    read_site_key,
    write_site_key,
)

__all__ = [
    "MONITORED",
    "SERVERS_MAX",
    "BrokerKey",
    "Grant",
    "Handshake",
    "Handshakes",
    "Invitation",
    "Invited",
    "KeyPair",
    "Keyring",
    "SiteKey",
    "allow_command",
    "broker_key_path",
    "check_holder",
    "check_public_key",
    "curve_options",
    "edit_ring",
    "is_invitation",
    "key_path",
    "new_broker_key",
    "new_pair",
    "new_ring",
    "outcome_of",
    "pair_of_secret",
    "read_broker_key",
    "read_invitation",
    "read_ring",
    "read_site_key",
    "ring_path",
    "write_broker_key",
    "write_ring",
    "write_site_key",
]
