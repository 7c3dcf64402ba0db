"""`narrows mirror`: a copy of a state directory in an object store, and a broker's way back."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Annotated, TypeAlias

import cyclopts
from cyclopts import Parameter

from narrows.broker.cli.journal import audit
from narrows.proto.errors import ConfigError
from narrows.proto.units import Duration, Size

try:
    from obstore.exceptions import BaseError

    from narrows.broker import mirror as copies
except ModuleNotFoundError as error:
    raise ConfigError(
        "a part of Narrows is not installed",
        expected="the package obstore",
        got="none",
        remedy="pip install '.[mirror]' in the checkout, or 'narrows[mirror]'",
    ) from error

Url: TypeAlias = Annotated[
    str, Parameter(help="Place in a store: s3://BUCKET/RUN, gs://..., az://... or file:///FOLDER.")
]

mirror = cyclopts.App(
    name="mirror", help="Copy a state directory to an object store while its broker runs, and back."
)

_log = logging.getLogger("narrows.mirror")


@mirror.command
def push(directory: Path, url: Url, *, every: str = "10s") -> None:
    """Keep a copy up to date until the run ends.

    Credentials come from the environment: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (with
    AWS_ENDPOINT, AWS_REGION), GOOGLE_SERVICE_ACCOUNT, or AZURE_STORAGE_ACCOUNT_NAME and _KEY.

    Args:
        directory: State directory of a broker.
        every: Time from one copy to the next.
    """
    every_s = Duration.parse(every, "--every: ")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    store = copies.opened(url)
    with copies.store_errors(url):
        made = copies.Mirror(directory, store)
    is_ended = False
    while not is_ended:
        began = time.monotonic()
        try:
            pushed = made.push()
        except (BaseError, OSError) as error:
            _log.warning("%s; the copy before stays", copies.first_line(error))
            pushed = None
        took_s = time.monotonic() - began
        if pushed is not None:
            manifest, sent_bytes = pushed
            size = Size(sent_bytes).text()
            _log.info("round %d is in %s: %s in %.1f s", manifest.seq, url, size, took_s)
            is_ended = manifest.is_ended
        if not is_ended:
            time.sleep(max(0.0, every_s - took_s))
    _log.info("the run has ended")


@mirror.command
def pull(url: Url, directory: Path) -> None:
    """Make a state directory of the newest copy, and check every byte of it.

    Args:
        directory: New directory; start the broker with it, under the address of the old one.
    """
    store = copies.opened(url)
    with copies.store_errors(url):
        manifest = copies.pull(store, directory)
    age_s = max(0.0, time.time() - manifest.at_unix)
    print(f"{directory} holds the run as of round {manifest.seq}, {age_s:,.0f} s ago")
    audit(directory)
    print(f"narrows broker --resume --state-dir {directory}")
