"""The `narrows` command: it parses the command line and turns errors into exit codes.

A command's module is imported when the command runs: numpy, numba, ZeroMQ and torch take seconds.
"""

from __future__ import annotations

import logging
import signal
import sys
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Final, NoReturn

import cyclopts
from cyclopts import Parameter

from narrows import __version__

EXIT_CODES: Final = (
    "Exit codes: 0 ok, 1 failure, 2 usage or configuration, 3 refused by the peer, 4 broker not "
    "reachable, 130 interrupted."
)
PACKAGE: Final = "narrows"

LAZY: Final = {
    "demo": ("bench.demo:demo", "Train a small model with four learners; one is killed."),
    "learner": ("bench.reference.worker:learner", "Train a small GPT as one learner."),
    "relay": ("broker.cli.relay:relay", "Pass publications on to the learners of a site."),
    "status": ("broker.cli.status:status", "Say how a run is, and show its learners."),
    "watch": ("broker.cli.status:watch", "Follow a run: a line now and then, also as JSON."),
    "doctor": ("broker.cli.doctor:doctor", "Say what is wrong with a line, a run or its broker."),
    "page": ("broker.cli.page:page", "Show a run in a browser, and serve its metrics."),
    "plan": ("broker.cli.plan:plan", "Say what a run will need: rates, memory, disk."),
    "keys": ("broker.cli.keys:keys", "Make, show, admit and revoke keys."),
    "journal": ("broker.cli.journal:journal", "Show, check or roll back a state directory."),
    "export": ("broker.cli.journal:export", "Write the global model, or its layout."),
    "mirror": ("broker.cli.mirror:mirror", "Copy a state directory to an object store, and back."),
    "bench": ("bench.cli:bench", "Measure codec, bandwidth, rounds, lives under failure."),
    "debug frame": ("broker.cli.debug:frame", "Show a message of the wire."),
    "debug replay": ("bench.replay:replay", "Play again what a broker or a learner has decided."),
}  # fmt: skip


app = cyclopts.App(
    name="narrows",
    version=__version__,
    help="Train one model at several sites over ordinary lines.",
    help_epilogue=EXIT_CODES,
    default_parameter=Parameter(negative=()),
    # Otherwise the library ends the process without a word, before main() can say why.
    suppress_keyboard_interrupt=False,
)
debug = cyclopts.App(name="debug", help="Look at bytes of the wire, or play decisions again.")
app.command(debug)
for _name, (_path, _help) in LAZY.items():
    _group, _, _own = _name.rpartition(" ")
    (debug if _group else app).command(f"{PACKAGE}.{_path}", name=_own, help=_help)


@app.command
def broker(
    config: Path | None = None,
    *,
    listen: str | None = None,
    state_dir: str | None = None,
    goal_tokens: str | None = None,
    mode: str | None = None,
    keys: str | None = None,
    seeder: str | None = None,
    setting: Annotated[list[str], Parameter(name=["--set", "-s"])] | None = None,
    events: Path | None = None,
    ready_file: Path | None = None,
    resume: bool = False,
) -> None:
    """Run the standalone broker, which holds the global model and merges the learners' pushes.

    SIGINT or SIGTERM stop it in order; a second signal ends it at once.

    Args:
        config: TOML file; every key has a default, flags win over the file.
        listen: Control port, tcp://HOST:PORT (default 127.0.0.1:7070); the two ports after it
            carry data.
        state_dir: Directory of the run (default runs/broker), from which it goes on.
        goal_tokens: Tokens of all learners after which the run ends, such as 12e9; 0: never
            (default).
        mode: decoupled (default), streaming or diloco.
        keys: Folder of keys that `narrows keys new` made: only sites on its allow list may connect.
        seeder: Learner whose parameters become version 0; without it the first that joins.
        setting: Any setting as KEY=VALUE, for example `--set merge.quorum=2`; repeatable.
        events: File that gets one JSON line per merge and per note.
        ready_file: File that gets the address once the broker serves.
        resume: Go on with the run in the state directory, and end with an error if there is none,
            as where a volume is not mounted. For unit files.
    """
    from narrows.broker.cli.broker import run_broker

    flags = {
        "broker.listen": listen,
        "broker.state_dir": state_dir,
        "broker.keys": keys,
        "run.mode": mode,
        "run.goal_tokens": goal_tokens,
        "run.seeder": seeder,
    }
    run_broker(config, flags, setting or (), events=events, ready_file=ready_file, resume=resume)


def main() -> NoReturn:
    """Runs a command. Every expected failure is one line and an exit code, never a traceback."""
    if not __debug__:
        _fail("python -O removes the assertions that guard the model; run without it", 2)
    logging.getLogger("numexpr").setLevel(logging.WARNING)  # It greets whoever loads Blosc2.
    if sys.argv[1:2] in (["bench"], ["demo"]):
        # As an exception, SIGTERM lets them end the processes that they have started.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    if sys.argv[1:2] == ["broker"] and {"--help", "-h"} & set(sys.argv):
        _describe_settings()
    _check_command(sys.argv[1:2])
    try:
        result = app(sys.argv[1:], exit_on_error=False, print_error=False)
    except cyclopts.CycloptsError as error:
        _fail(" ".join(str(error).split()), 2)
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    except BrokenPipeError:
        _fail("", 1)
    except Exception as error:
        from narrows.proto.errors import NarrowsError, exit_code, printable

        if not isinstance(error, NarrowsError | OSError):
            raise
        _fail(printable(str(error)), exit_code(error))
    sys.exit(result if isinstance(result, int) else 0)


def _check_command(given: list[str]) -> None:
    """Names the nearest command. The parser would import all of them to do so."""
    names = [*{name.split()[0] for name in LAZY}, "broker"]
    if given and not given[0].startswith("-") and given[0] not in names:
        near = get_close_matches(given[0], names, 1)
        hint = f", did you mean {near[0]}?" if near else f": one of {', '.join(sorted(names))}"
        _fail(f"no command {given[0]!r}{hint}", 2)


def _describe_settings() -> None:
    from narrows.broker.config import BrokerConfig
    from narrows.proto.config import describe

    lines = [f"{key} = {default}. {text}" for key, default, text in describe(BrokerConfig)]
    settings = "\n\n".join(" ".join(line.split()) for line in lines)
    app["broker"].help_epilogue = f"Settings (--set KEY=VALUE)\n\n{settings}\n\n{EXIT_CODES}"


def _fail(text: str, code: int) -> NoReturn:
    if text:
        print(f"narrows: {text}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
