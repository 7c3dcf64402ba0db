"""`narrows status`: asks a broker for the state of the run and shows it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec

from narrows.broker.cli.asking import ask
from narrows.broker.cli.tables import Table, show, terminal
from narrows.proto.errors import ErrorCode, RemoteProtocolError, printable
from narrows.proto.keys import SiteKey, key_path, read_site_key
from narrows.proto.messages import AskStatus, LearnerStatus, Status
from narrows.proto.units import counted, format_bytes, format_count, format_duration_s

DEFAULT_BROKER = "tcp://127.0.0.1:7070"


def ask_status(broker: str, *, timeout_s: float, key: SiteKey | None = None) -> Status:
    """The status of the run. Raises ConfigError, Refused, or BrokerUnreachable after
    `timeout_s`."""
    answer = ask(broker, key, AskStatus(), timeout_s=timeout_s)
    if not isinstance(answer, Status):
        raise RemoteProtocolError(
            ErrorCode.BAD_MESSAGE, f"answer of {broker}", expected="Status", got=str(answer)[:200]
        )
    return answer


def show_status(
    broker: str | None, *, key_file: Path | None, as_json: bool, timeout_s: float
) -> None:
    """Prints the status as a table or as JSON."""
    path = key_path(key_file)
    key = read_site_key(path) if path else None
    address = broker or (key.broker if key else DEFAULT_BROKER)
    status = ask_status(address, timeout_s=timeout_s, key=key)
    if as_json:
        # With ASCII alone: escape sequences that a peer has written do nothing to a terminal.
        print(json.dumps(json.loads(msgspec.json.encode(status)), indent=2))
        return
    console = terminal()
    for line in headline(status):
        console.print(printable(line))
    if status.waiting_for:
        console.print(f"waiting: {printable(status.waiting_for)}")
    if status.contributions_refused:
        refused = ", ".join(f"{code} {n}" for code, n in status.contributions_refused.items())
        console.print(f"refused: {printable(refused)}")
    show(console, learner_table(status.learners))


def headline(status: Status) -> tuple[str, str]:
    """The run in two lines."""
    goal = f" of {format_count(status.goal_tokens)}" if status.goal_tokens else ""
    versions = f"{min(status.versions)}..{max(status.versions)}" if status.versions else "none"
    return (
        f"run {status.run_id}  epoch {status.epoch[0]}.{status.epoch[1]}  {status.mode}  "
        f"{status.phase}  up {format_duration_s(status.uptime_s)}",
        f"{format_count(status.run_tokens)}{goal} tokens at {format_count(status.tokens_per_s)}/s"
        f"  versions {versions}, {sum(status.versions)} in all  {counted(status.merges, 'merge')}, "
        f"{status.mean_contributors_per_merge:.2f} contributors each, longest pause "
        f"{format_duration_s(status.longest_merge_gap_s)}  "
        f"in {format_bytes(status.up_bytes)}  out {format_bytes(status.down_bytes)}",
    )


def overwritten_share(learner: LearnerStatus) -> str:
    """Share of the tokens with a known fate that no merge took."""
    ledger = learner.ledger
    settled = ledger.merged + ledger.overwritten + ledger.refused + ledger.rolled_back
    return f"{ledger.overwritten / settled:.0%}" if settled else "-"


COLUMNS: dict[str, Callable[[LearnerStatus], str]] = {
    "learner": lambda s: s.name,
    "state": lambda s: s.state,
    "heard": lambda s: format_duration_s(s.last_heard_s),
    "step": lambda s: str(s.step),
    "s/step": lambda s: f"{s.step_s:.3f}",
    "loss": lambda s: "-" if s.loss is None else f"{s.loss:.3f}",
    "merged": lambda s: str(s.contributions),
    "refused": lambda s: str(s.refused),
    "overwritten": overwritten_share,
    "up": lambda s: format_bytes(s.up_bytes),
    "down": lambda s: format_bytes(s.down_bytes),
    "from": lambda s: s.address,
}


def learner_table(learners: tuple[LearnerStatus, ...]) -> Table:
    """One row per learner."""
    table = Table(tuple(COLUMNS), keys=2, left=("from",))
    for learner in learners:
        table.add(*(printable(cell(learner)) for cell in COLUMNS.values()))
    return table
