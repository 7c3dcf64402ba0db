"""The `narrows` command: it parses the command line and turns errors into exit codes.

Commands are imported when they run: torch, numba and matplotlib take seconds to load.
"""

from __future__ import annotations

import logging
import signal
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import cyclopts
from cyclopts import Parameter

from narrows import __version__
from narrows.bench.commands import bench
from narrows.bench.demo.command import demo
from narrows.bench.kit.torch_needed import need_torch
from narrows.broker.cli.journal import journal
from narrows.broker.cli.keys import keys
from narrows.broker.cli.wire import wire
from narrows.exit_codes import EXIT_CODES, EXIT_FAILURE, EXIT_USAGE, exit_code
from narrows.proto.errors import NarrowsError

app = cyclopts.App(
    name="narrows",
    version=__version__,
    help="Train one network on several islands of compute over an ordinary network.",
    help_epilogue=EXIT_CODES,
    # Otherwise the library ends the process without a word, before main() can say why.
    suppress_keyboard_interrupt=False,
)


app.command(bench)
app.command(demo)
app.command(journal)
app.command(keys)
app.command(wire)


@app.command
def broker(
    *,
    config: Path | None = None,
    listen: str | None = None,
    state_dir: Path | None = None,
    goal_tokens: str | None = None,
    mode: str | None = None,
    init: Path | None = None,
    founder: str | None = None,
    rollback_to: int | None = None,
    keys: Path | None = None,
    new_run_secret: Annotated[bool, Parameter(negative="")] = False,
    insecure: bool = False,
    setting: Annotated[list[str], Parameter(name=["--set", "-s"], negative="")] | None = None,
    events: Path | None = None,
    ready_file: Path | None = None,
) -> None:
    """Run the standalone broker, which holds the global model and merges the learners' pushes.

    Stops with SIGINT or SIGTERM: a checkpoint is written first; a second signal ends at once.

    Parameters
    ----------
    config
        TOML file; every key has a default, flags win over the file.
    listen
        Control port, tcp://HOST:PORT (default 127.0.0.1:7070); the two ports after it carry data.
    state_dir
        Directory of journal and checkpoints (default runs/broker), from which a run goes on.
    goal_tokens
        Tokens of all learners after which the run ends, such as 12e9; 0: never (default).
    mode
        decoupled (default), streaming or diloco.
    init
        Safetensors file that becomes version 0 instead of the founder's parameters.
    founder
        Name of the learner whose model becomes the run's; without it the first one founds. A new
        run with keys needs it, also with --init.
    rollback_to
        Version to go back to, as `narrows journal show` prints it "in all"; for one start.
    keys
        Directory of keys that `narrows keys new` made: only the holders of its keys may connect.
    new_run_secret
        Make a new run.secret in the state directory, say what that costs, and end.
    insecure
        Allow to listen beyond loopback, although nothing is encrypted or authenticated.
    setting
        Any other setting as KEY=VALUE, for example `--set merge.quorum=2`; repeatable.
    events
        File that gets one JSON line per merge and per note.
    ready_file
        File that gets the address once the broker serves.
    """
    from narrows.broker.cli.broker import BrokerCommand, renew_run_secret, run_broker

    named = {
        "broker.listen": listen,
        "broker.state_dir": str(state_dir) if state_dir else None,
        "broker.init": str(init) if init else None,
        "broker.rollback_to": rollback_to,
        "run.goal_tokens": goal_tokens,
        "run.mode": mode,
        "run.founder": founder,
        "broker.insecure": insecure or None,
        "security.keys": str(keys) if keys else None,
    }
    flags: dict[str, object] = {k: value for k, value in named.items() if value is not None}
    command = BrokerCommand(config, flags, setting or [], events, ready_file)
    (renew_run_secret if new_run_secret else run_broker)(command)


@app.command
def learner(
    *,
    broker: str | None = None,
    name: str | None = None,
    key: Path | None = None,
    data: Path | None = None,
    preset: str = "tiny",
    part: str = "1/1",
    batch: int = 0,
    seed: int = 0,
    threads: int = 1,
    peak_learning_rate: float = 0.0,
    steps_max: int = 0,
    step_wait_s: float = 0.0,
    join_timeout_s: float = 60.0,
    events: Path | None = None,
    json: Path | None = None,
    record: Path | None = None,
) -> None:
    """Run the reference worker: a compact GPT over bytes, trained as one learner of a run.

    Parameters
    ----------
    broker
        Address that `narrows broker` prints, tcp://HOST:PORT (default: the key's).
    name
        Name of this learner, unique in the run; a restarted learner takes its old name (default:
        the key's).
    key
        Key file of this site, as `narrows keys accept` writes it (default: the one that the
        environment names in NARROWS_KEY, if it names any).
    data
        Folder with text files (default: the sources of Python's standard library).
    preset
        Size of the model: nano (0.1 M parameters), micro, tiny (0.8 M), small or medium (25 M); the
        same for all learners.
    part
        i/n: read the i-th of n disjoint parts of the text (default: all of it).
    batch
        Windows per inner step; 0: the preset's.
    seed
        Changes the order of the text.
    threads
        CPU threads of PyTorch.
    peak_learning_rate
        Peak of the schedule; 0: the preset's.
    steps_max
        Number of own inner steps after which it leaves; 0: it stays to the end of the run.
    step_wait_s
        Seconds added to every inner step, to act as a slower machine.
    join_timeout_s
        Seconds to wait for a broker, and for its data ports to let something through.
    events
        File that gets one JSON line per version installed.
    json
        File for the summary at the end.
    record
        File for one outer gradient of each fragment, for `narrows bench codec --recording`.
    """
    need_torch()
    from narrows.learner.reference.worker import WorkerOptions, run_worker
    from narrows.learner.site import site_of

    site = site_of(broker, name, key)
    options = WorkerOptions(
        site.broker, site.name, data, preset, part, batch, seed, threads, peak_learning_rate,
        steps_max, step_wait_s, join_timeout_s, events, json, record, site.key_file,
    )  # fmt: skip
    run_worker(options)


@app.command
def status(
    broker: str | None = None,
    *,
    key: Path | None = None,
    json: bool = False,
    timeout_s: float = 5.0,
) -> None:
    """Show the learners, the progress of the run, and the reason why it waits.

    Parameters
    ----------
    broker
        Address of the broker, tcp://HOST:PORT (default: the key's, else tcp://127.0.0.1:7070).
    key
        Key file (default: the one that NARROWS_KEY names, if it names any). The key's role says how
        much the broker tells.
    json
        Print JSON instead of a table.
    timeout_s
        Seconds to wait for an answer.
    """
    from narrows.broker.cli.status import show_status

    show_status(broker, key_file=key, as_json=json, timeout_s=timeout_s)


@app.command
def plan(
    *,
    params: str,
    step: str,
    learners: int,
    wan: str,
    broker_wan: str = "",
    broker_memory: str = "256GiB",
    broker_cores: int = 4,
    disk: str = "500MB/s",
    config: Path | None = None,
    setting: Annotated[list[str], Parameter(name=["--set", "-s"], negative="")] | None = None,
    json: bool = False,
) -> None:
    """Plan a run before anything is started: rates, memory, disk, brokers.

    Chooses fragments and sync period unless they are set; names the bottleneck and a remedy. Exit
    code 1 if it does not fit.

    Parameters
    ----------
    params
        Parameters of the model, such as 12e9 or 12B.
    step
        Time of one inner step of a learner, such as 2s or 300ms.
    learners
        Number of learners.
    wan
        Line of one learner, in each direction, such as 2Gbit/s.
    broker_wan
        Line of the broker, in each direction (default: as --wan).
    broker_memory
        Memory of the broker's machine, such as 256GiB.
    broker_cores
        Cores of the broker's machine.
    disk
        Rate of the broker's disk, such as 500MB/s.
    config
        TOML file of the broker: its settings instead of the defaults.
    setting
        A setting of the broker as KEY=VALUE, for example `--set fragments.sync_period_steps=30`;
        repeatable.
    json
        Print JSON instead of tables.
    """
    from narrows.broker.cli.plan import PlanCommand, run_plan

    command = PlanCommand(
        params, step, learners, wan, broker_wan, broker_memory, broker_cores, disk, config,
        setting or [], json,
    )  # fmt: skip
    if not run_plan(command):
        sys.exit(EXIT_FAILURE)


@app.command(name="export")
def export_(state_dir: Path, *, to: Path, seal_key: Path | None = None) -> None:
    """Write the newest global model of a run as safetensors, with the tensors' own names.

    Parameters
    ----------
    state_dir
        Directory of the broker, which must not be running.
    to
        File to write; replaced only by a complete one.
    seal_key
        File with the seal key of the run: all seals are compared first.
    """
    from narrows.broker.cli.journal_report import export_model

    export_model(state_dir, to, seal_key=seal_key)


@app.command
def layout(state_dir: Path) -> None:
    """Print a run's layout as JSON, for a learner that is not made from the run's model code.

    Parameters
    ----------
    state_dir
        Directory of the broker. It is only read, and the broker may be running.
    """
    from narrows.broker.cli.journal_report import show_layout

    show_layout(state_dir)


def main() -> NoReturn:
    """Runs a command. Every expected failure is one line and an exit code, never a traceback."""
    if not __debug__:
        _fail("python -O removes the assertions that guard the model; run without it", EXIT_USAGE)
    logging.getLogger("numexpr").setLevel(logging.WARNING)  # It greets whoever loads Blosc2.
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    if sys.argv[1:2] in (["bench"], ["demo"]):
        # As an exception, SIGTERM lets them end the processes and namespaces that they have
        # started.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    if sys.argv[1:2] == ["broker"] and {"--help", "-h"} & set(sys.argv):
        from narrows.broker.cli.broker import settings_help

        app["broker"].help_epilogue = f"{settings_help()}\n\n{EXIT_CODES}"
    try:
        app(sys.argv[1:])
    except NarrowsError as error:
        _fail(str(error), exit_code(error))
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    except BrokenPipeError:
        _fail("", EXIT_FAILURE)
    except OSError as error:
        _fail(str(error), EXIT_FAILURE)
    sys.exit(0)


def _fail(text: str, code: int) -> NoReturn:
    if text:
        print(f"narrows: {text}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
