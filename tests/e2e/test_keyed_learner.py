"""A learner at a broker's door: admitted, refused, revoked, with a wrong key, or with none."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import pytest
from key_door import Door
from running import LAYOUT, ToyHost, vector, wait_until

from narrows.learner.transport.client import Client
from narrows.learner.transport.options import ClientOptions
from narrows.learner.transport.thread import Background
from narrows.proto.errors import BrokerUnreachable, NarrowsError, Refused
from narrows.proto.keys import SiteKey, new_pair, write_site_key
from narrows.proto.messages import ControlMessage, Hello


def silence(_name: str, _message: ControlMessage) -> None:
    """The door lets in, and then says nothing."""


def options(key: SiteKey | None, broker: str = "", **more: object) -> ClientOptions:
    return ClientOptions(
        broker=broker or (key.broker if key else ""),
        name=key.name if key else "site-a",
        layout=LAYOUT,
        frozen_digest=0,
        host=ToyHost(vector(1)),
        key=key,
        **more,  # type: ignore[arg-type]
    )


def join_error(key: SiteKey | None, broker: str = "") -> NarrowsError:
    """The error of a join that fails."""
    client = Client(options(key, broker, join_timeout_s=6.0))
    with pytest.raises(NarrowsError) as caught:
        client.start()
    return caught.value


class Learner:
    """The background of a learner, without a training loop."""

    def __init__(self, key: SiteKey, key_file: Path | None = None) -> None:
        self.background = Background(options(key, key_file=key_file))

    def __enter__(self) -> Background:
        self.background.start()
        return self.background

    def __exit__(self, *_: object) -> None:
        self.background.close()


def test_an_admitted_key_says_hello_under_its_name() -> None:
    with Door(silence) as door, Learner(door.admit(door.key("site-a"))):
        wait_until(lambda: door.heard, "a Hello")
        name, message = door.heard[0]
        assert name == "site-a" and isinstance(message, Hello) and message.name == "site-a"


def test_a_learner_whose_key_is_unknown_prints_the_command_and_joins_once_it_was_typed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Door(silence) as door, caplog.at_level(logging.WARNING):
        key = door.key("site-a")
        with Learner(key):
            wait_until(lambda: "narrows keys allow" in caplog.text, "the line")
            assert f"narrows keys allow site-a '{key.pair.public}'" in caplog.text
            assert not door.heard
            door.admit(key)
            # Its socket never dials again: there is another one some seconds later.
            wait_until(lambda: door.heard, "a Hello")
        assert caplog.text.count("narrows keys allow") == 1
        assert key.pair.secret not in caplog.text


def test_joining_with_an_unknown_key_ends_with_the_command() -> None:
    with Door(silence) as door:
        key = door.key("site-a")
        error = join_error(key)
        assert isinstance(error, Refused)
        assert f"narrows keys allow site-a '{key.pair.public}'" in str(error)


def test_joining_with_a_wrong_key_of_the_broker_names_the_key() -> None:
    with Door(silence) as door:
        wrong = new_pair().public
        error = join_error(door.admit(door.key("site-a", wrong)))
        assert isinstance(error, BrokerUnreachable)
        assert wrong in str(error) and "narrows keys trust" in str(error)


def test_joining_with_a_key_at_a_broker_without_keys_says_so() -> None:
    with Door(silence, keys=False) as door:
        error = join_error(door.key("site-a"))
        assert isinstance(error, Refused) and "has no keys" in str(error)


def test_joining_without_a_key_at_a_broker_with_keys_says_so() -> None:
    with Door(silence) as door:
        error = join_error(None, door.address)
        assert isinstance(error, Refused) and "narrows keys accept" in str(error)


def test_the_keys_of_a_broker_are_tried_until_one_fits() -> None:
    with Door(silence) as door:
        wrong = (new_pair().public, new_pair().public)
        with Learner(door.admit(door.key("site-a", *wrong, door.server.public))):
            wait_until(lambda: door.heard, "a Hello")


def test_a_rotated_key_file_is_read_again_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Door(silence) as door, caplog.at_level(logging.WARNING):
        old = door.key("site-a")
        new = door.admit(dataclasses.replace(old, pair=new_pair()))
        write_site_key(tmp_path / "a.key", new)
        with Learner(old, tmp_path / "a.key"):
            wait_until(lambda: door.heard, "a Hello")
        assert "narrows keys allow" not in caplog.text


def test_a_broker_key_that_comes_to_be_trusted_is_taken_while_the_learner_runs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Door(silence) as door, caplog.at_level(logging.WARNING):
        key = door.admit(door.key("site-a", new_pair().public))
        write_site_key(tmp_path / "a.key", key)
        with Learner(key, tmp_path / "a.key"):
            wait_until(lambda: "narrows keys trust" in caplog.text, "the line")
            trusting = dataclasses.replace(key, servers=(*key.servers, door.server.public))
            write_site_key(tmp_path / "a.key", trusting, replace=True)
            wait_until(lambda: door.heard, "a Hello")


def test_secrets_are_in_no_printed_form_of_the_options() -> None:
    with Door(silence) as door:
        key = door.key("site-a")
        assert key.pair.secret not in repr(options(key))
