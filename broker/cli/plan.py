"""`narrows plan`: the plan of a run in plain words, or as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, cast

from rich.console import Console

from narrows.broker.cli.broker import assigned, read_configuration
from narrows.broker.cli.tables import Facts, Table, show, terminal
from narrows.broker.config import BrokerConfig
from narrows.broker.planning import (
    LATE_STEPS_MAX,
    USABLE,
    Load,
    RunPlan,
    Site,
    bottleneck,
    costs,
    fits,
    loads_of,
    make_plan,
)
from narrows.proto.config import read_table
from narrows.proto.errors import ConfigError
from narrows.proto.messages import Mode
from narrows.proto.units import (
    format_bits_per_s,
    format_bytes,
    format_count,
    format_duration_s,
    parse_bits_per_s,
    parse_bytes,
    parse_count,
    parse_duration_s,
)

FORMATS: Final[Mapping[str, Callable[[float], str]]] = {
    "bit/s": format_bits_per_s,
    "bytes": format_bytes,
    "bytes/s": lambda value: f"{format_bytes(value)}/s",
    "cores": lambda value: f"{value:.1f} cores",
    "steps": lambda value: f"{value:.1f} steps",
    "rounds": lambda value: f"{value:.1f} rounds",
}
"""The function that writes a value, by the unit of a load."""


@dataclass(frozen=True)
class PlanCommand:
    """The arguments of the command line, as texts with units."""

    params: str
    step: str
    learners: int
    wan: str
    broker_wan: str
    """Line of the broker; "": as `wan`."""
    broker_memory: str
    broker_cores: int
    disk: str
    """A size per second. "/s" may be left out."""
    config: Path | None
    assignments: Sequence[str]
    """KEY=VALUE texts of `--set`."""
    as_json: bool


def run_plan(command: PlanCommand) -> bool:
    """Prints the plan. True if it fits, on one broker. Raises ConfigError."""
    config = read_configuration(command.config, command.assignments)
    if config.run.mode is Mode.DILOCO:
        raise ConfigError(
            "narrows plan does not cover run.mode diloco, in which all wait for the whole model",
            expected="decoupled or streaming",
            got=str(config.run.mode),
        )
    plan = make_plan(_site(command, config), config)
    if command.as_json:
        print(json.dumps(as_dict(plan), indent=2))
    else:
        _show(terminal(), plan)
    return fits(plan) and plan.brokers == 1


def _site(command: PlanCommand, config: BrokerConfig) -> Site:
    """The site that the arguments describe.

    The plan chooses fragments and sync period unless the file or `--set` names them. A value equal
    to the default counts as named, so the texts are read again here.
    """
    given = _given(command)
    return Site(
        params=_parsed("--params", parse_count, command.params),
        step_s=_parsed("--step", parse_duration_s, command.step),
        learners=command.learners,
        line_bits_per_s=_parsed("--wan", parse_bits_per_s, command.wan),
        broker_line_bits_per_s=_parsed(
            "--broker-wan", parse_bits_per_s, command.broker_wan or command.wan
        ),
        broker_memory_bytes=_parsed("--broker-memory", parse_bytes, command.broker_memory),
        broker_cores=command.broker_cores,
        disk_bytes_per_s=_parsed("--disk", parse_bytes, command.disk.strip().removesuffix("/s")),
        fragments=config.fragments.count if "count" in given else 0,
        sync_period_steps=config.fragments.sync_period_steps if "sync_period_steps" in given else 0,
    )


def _given(command: PlanCommand) -> set[str]:
    """Keys of the section `fragments` that the file or `--set` names."""
    table = read_table(command.config) if command.config else {}
    of_file = cast(Mapping[str, object], table.get("fragments", {}))
    section = "fragments."
    keys = (key for key in assigned(command.assignments) if key.startswith(section))
    return {*of_file, *(key.removeprefix(section) for key in keys)}


def _parsed(flag: str, parse: Callable[[str], Any], text: str) -> Any:
    """The value of a text. An error names the flag."""
    try:
        return parse(text)
    except ConfigError as error:
        raise ConfigError(
            f"{flag}: {error.message}",
            expected=error.expected,
            got=error.got,
            remedy=error.remedy,
        ) from error


def as_dict(plan: RunPlan) -> dict[str, Any]:
    """The plan, ready for JSON. Units are in the names."""
    return {
        "fits": fits(plan),
        "bottleneck": bottleneck(plan).name,
        "site": asdict(plan.site),
        "fragments": plan.fragments,
        "sync_period_steps": plan.sync_period_steps,
        "overlap_steps": plan.overlap_steps,
        "push_wire_bits_per_param": plan.push_bits,
        "publish_wire_bits_per_param": plan.publish_bits,
        "learner_up_bits_per_s": plan.up_bits_per_s,
        "learner_down_bits_per_s": plan.down_bits_per_s,
        "hub_in_bits_per_s": plan.up_bits_per_s * plan.site.learners,
        "hub_out_bits_per_s": plan.down_bits_per_s * plan.site.learners,
        "exchange_s": plan.exchange_s,
        "join_s": plan.join_s if math.isfinite(plan.join_s) else None,
        "brokers": plan.brokers,
        "broker_memory_bytes": plan.broker_memory_bytes,
        "learner_memory_bytes": plan.learner_memory_bytes,
        "learner_cores": plan.learner_cores,
        "journal_bytes_per_h": plan.journal_bytes_per_s * 3600,
        "checkpoint_bytes": plan.checkpoint_bytes,
        "checkpoint_versions": plan.checkpoint_versions,
        "disk_bytes": plan.disk_bytes,
        "replay_s": plan.replay_s,
        "loads": [
            {**asdict(load), "share": load.share, "fits": load.fits} for load in loads_of(plan)
        ],
    }


def _show(console: Console, plan: RunPlan) -> None:
    site = plan.site
    console.print(
        f"{format_count(site.params)} parameters, {site.learners} learners, a step of "
        f"{format_duration_s(site.step_s)}, lines of {format_bits_per_s(site.line_bits_per_s)} "
        f"(learner) and {format_bits_per_s(site.broker_line_bits_per_s)} (broker) each way\n"
    )
    show(console, facts(plan))
    console.print()
    show(console, load_table(loads_of(plan)))
    console.print()
    for line in verdict(plan):
        console.print(line)


def facts(plan: RunPlan) -> Facts:
    """The choices of the plan and the resources that they take."""
    shown = Facts()
    for label, text in _lines(plan):
        shown.add(label, text)
    return shown


def _lines(plan: RunPlan) -> list[tuple[str, str]]:
    learners, spacing_s = plan.site.learners, plan.spacing_s
    up, down = plan.up_bits_per_s, plan.down_bits_per_s
    journal = plan.journal_bytes_per_s * 3600
    return [
        ("fragments.count (P)", f"{plan.fragments}, {format_count(plan.fragment_params)} each"),
        ("fragments.sync_period_steps (H)", str(plan.sync_period_steps)),
        ("fragments.overlap_steps (tau)", str(plan.overlap_steps)),
        ("broker.checkpoint_versions", f"{plan.checkpoint_versions}"),
        ("bits per parameter", f"up {plan.push_bits:.2f}, down {plan.publish_bits:.2f}, on the "
         "wire, all headers included"),
        ("a learner's rate", f"up {format_bits_per_s(up)}, down {format_bits_per_s(down)}"),
        ("the hub's rate", f"in {format_bits_per_s(up * learners)}, "
         f"out {format_bits_per_s(down * learners)}"),
        ("a round every", format_duration_s(spacing_s)),
        ("snapshot to update", f"{format_duration_s(plan.exchange_s)}, nobody waits meanwhile"),
        ("first copy to a joiner", f"{format_bytes(costs.FIRST_COPY_BYTES * plan.site.params)}, "
         f"{format_duration_s(plan.join_s) if math.isfinite(plan.join_s) else 'no line left'}"),
        ("brokers", str(plan.brokers)),
        ("memory of a broker", format_bytes(plan.broker_memory_bytes)),
        ("memory of a learner's host", f"{format_bytes(plan.learner_memory_bytes)} beside the "
         f"training; {plan.learner_cores:.1f} cores"),
        ("journal", f"{format_bytes(journal)} per hour, cut back at checkpoints"),
        ("a checkpoint", f"{format_bytes(plan.checkpoint_bytes)} every "
         f"{format_duration_s(plan.checkpoint_pause_s)}"),
        ("disk", f"{format_bytes(plan.disk_bytes)} at most"),
        ("a restart replays at most", format_duration_s(plan.replay_s)),
    ]  # fmt: skip


def load_table(loads: Sequence[Load]) -> Table:
    """The need for each resource beside the amount there is."""
    table = Table(("", "needed", "there is", "share"))
    for load in loads:
        form = FORMATS[load.unit]
        mark = "" if load.fits else "  too much"
        cells = form(load.needed), form(load.available), f"{load.share:.0%}{mark}"
        table.add(load.name, *cells)
    return table


def verdict(plan: RunPlan) -> list[str]:
    """The fullest resource and the remedy, in sentences."""
    load = bottleneck(plan)
    lines: list[str] = []
    if plan.brokers > 1:
        lines.append(
            "This version cannot run it: one broker is not enough, and it runs one per run."
            f" {plan.brokers} are, each with fragments, a machine and a line of its own."
        )
    if fits(plan):
        lines.append(f"It fits. Fullest: {load.name}, {load.share:.0%}. For more: {load.remedy}.")
    else:
        lines += [_too_much(other) for other in loads_of(plan) if not other.fits]
    lines.append(
        "Times and cores are those of two virtual cores (docs/lab-notes.md); the bits are the "
        "entropy of Gaussian data, real outer gradients take up to 6% less."
    )
    lines.append(
        '"there is" comes from --wan, --broker-wan, --broker-memory, --broker-cores (at most'
        f" {costs.CORES_OF_A_BROKER} are used) and --disk, the rounds from merge.rounds_in_flight;"
        f" an update may be {LATE_STEPS_MAX} steps late before it costs quality."
    )
    lines.append(
        "Names with a dot are settings of the broker: write them into its TOML file (--config), or"
        f" pass each to `narrows broker`, as in --set fragments.count={plan.fragments}."
    )
    return lines


def _too_much(load: Load) -> str:
    form = FORMATS[load.unit]
    return (
        f"It does not fit: {load.name} takes {form(load.needed)}, and of {form(load.available)} "
        f"only {USABLE:.0%} can be planned with. What helps: {load.remedy}."
    )
