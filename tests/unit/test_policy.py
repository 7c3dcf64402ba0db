"""Weights of `merge.weights = "auto"`, and the warning of keys without a norm bound."""

from __future__ import annotations

import pytest
from machines import Desk, hello

from narrows.broker.cli.broker import unbounded_advice
from narrows.broker.config import load_config
from narrows.broker.merging import policy_of
from narrows.broker.syncer import events as ev
from narrows.proto.key_holder import KeyHolder


def weights(holders: dict[str, KeyHolder | None]) -> str:
    desk = Desk()
    for name, holder in holders.items():
        desk.do(ev.Received(name.encode(), hello(name), f"tcp://{name}", holder=holder))
    return policy_of(desk.state.config, organisations=desk.state.organisations).weights


@pytest.mark.parametrize(
    ("organisations", "expected"),
    [
        ((None, None, None), "tokens"),
        (("uni", "uni", "uni"), "tokens"),
        (("uni", "uni", "lab"), "equal"),
        (("", ""), "equal"),
        (("uni", ""), "equal"),
    ],
)
def test_learners_weigh_alike_unless_all_their_keys_name_one_organisation(
    organisations: tuple[str | None, ...], expected: str
) -> None:
    names = {f"site-{i}": each for i, each in enumerate(organisations)}
    holders = {
        name: None if each is None else KeyHolder(name, organisation=each)
        for name, each in names.items()
    }
    assert weights(holders) == expected


@pytest.mark.parametrize(
    ("settings", "is_told"),
    [
        ({"run.mode": "diloco", "security.keys": "keys"}, True),
        ({"run.mode": "diloco"}, False),
        ({"security.keys": "keys"}, False),
        ({"run.mode": "diloco", "security.keys": "keys", "merge.norm_limit": 1.5}, False),
    ],
)
def test_keys_without_a_norm_bound_are_worth_a_warning(
    settings: dict[str, object], is_told: bool
) -> None:
    assert bool(unbounded_advice(load_config(None, settings))) == is_told
