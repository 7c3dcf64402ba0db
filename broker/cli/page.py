"""`narrows page`: serves a page that shows a run to any number of browsers."""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from narrows.broker.asking import Asker
from narrows.broker.cli.status import find_broker
from narrows.broker.store.history import History as BrokerHistory
from narrows.proto.config import Address, parse_address
from narrows.proto.errors import ConfigError

ANSWER_S = 2.0
"""A broker that has not answered for so long is shown as gone."""
PACKAGES = ("starlette", "uvicorn", "prometheus_client")


def page(
    broker: str | None = None,
    *,
    key: Path | None = None,
    listen: str = "tcp://127.0.0.1:7080",
    behind_proxy: bool = False,
    state_dir: Path | None = None,
) -> None:
    """Show a run in a browser, and serve /metrics for Prometheus. It only reads.

    Args:
        broker: Control address of the broker (default: NARROWS_BROKER, the key's, or
            tcp://127.0.0.1:7070).
        key: Key file of a site, if the broker has keys (default: NARROWS_KEY).
        listen: Where browsers find the page, tcp://HOST:PORT; port 0 means any free one.
        behind_proxy: Allow an address that other machines reach. The page knows no password: a
            proxy in front of it has to ask for one.
        state_dir: The broker's state directory, if it is on this machine: the loss curve then
            begins at version 0, and not when the page was started.
    """
    missing = [each for each in PACKAGES if importlib.util.find_spec(each) is None]
    if missing:
        raise ConfigError(
            f"this command needs {', '.join(missing)}",
            remedy="pip install '.[page]' in the checkout, or 'narrows[page]'",
        )
    place = parse_address(listen, listen=True)
    if not place.is_loopback and not behind_proxy:
        raise ConfigError(
            f"{listen} can be reached from other machines, and the page asks for no password",
            expected="an address of this machine alone, as tcp://127.0.0.1:7080",
            remedy="use an SSH tunnel (ssh -L 7080:127.0.0.1:7080 HOST), or give --behind-proxy if"
            " a proxy with a password stands before it",
        )
    address, site, _ = find_broker(broker, key)
    asker = Asker(address, site)
    try:
        serve(asker, place, state_dir, behind_proxy=behind_proxy)
    finally:
        asker.close()


def losses(state_dir: Path) -> Iterator[tuple[str, int, float]]:
    """Learner, run tokens and loss of each push in the broker's database, since version 0."""
    with closing(BrokerHistory(state_dir)) as rounds:
        for point in rounds.curve():
            if point.loss is not None:
                yield point.learner, point.run_tokens, point.loss


def serve(asker: Asker, place: Address, state_dir: Path | None, *, behind_proxy: bool) -> None:
    """Serves until the process is told to end."""
    import uvicorn

    from narrows.broker.page.history import History
    from narrows.broker.page.server import Watcher, application

    def history() -> History:
        return History(losses(state_dir) if state_dir else ())

    host = place.host
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    bound = "" if host == "*" else host.strip("[]")
    listener = socket.create_server((bound, place.port), family=family)
    shown = f"http://{host}:{listener.getsockname()[1]}"
    watcher = Watcher(lambda: asker.ask(ANSWER_S), history)
    app = application(watcher, behind_proxy=behind_proxy)
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1)
    print(f"the page is at {shown}; Ctrl-C ends it", flush=True)
    uvicorn.Server(config).run(sockets=[listener])
