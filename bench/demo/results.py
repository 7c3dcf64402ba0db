"""Results of the demo: from events, summaries and the final model to one table and one JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeAlias

import torch
from rich.console import Console
from safetensors.torch import load_file

from narrows.bench.demo.story import PRESET, DemoOptions, DemoStory
from narrows.bench.kit.evidence import compare_digests
from narrows.bench.kit.rows import read_rows
from narrows.bench.quality.baselines import Progress, Recipe, train_data_parallel
from narrows.broker.cli import tables
from narrows.broker.cli.tables import Facts, TextLine, wrapped
from narrows.broker.storage import StateDir, export_tensors
from narrows.learner.reference.corpus import fixed_windows, load_corpus
from narrows.learner.reference.gpt import GPT, parameter_count, preset, validation_loss
from narrows.proto.errors import ErrorCode, NarrowsError
from narrows.proto.units import format_bits_per_s, format_bytes, format_count, format_duration_s

Results: TypeAlias = dict[str, Any]

BF16_BYTES = 2

GLOBAL = "validation loss, global model"


def collect(options: DemoOptions, story: DemoStory, folder: Path) -> Results:
    """All results but the data-parallel baseline. Losses are nats per byte on validation text."""
    final = _final_status(folder / "broker.jsonl")
    merges = [
        record for record in read_rows(folder / "broker.jsonl") if record["event"] == "merged"
    ]
    summaries = [json.loads((folder / f"{name}.json").read_text()) for name in options.names]
    alone = json.loads((folder / "alone.json").read_text())
    global_loss, parameters = evaluate_global(folder)
    wall_s = story.ended_at - story.started_at
    published = {(merge["fragment"], merge["version"]): merge["digest"] for merge in merges}
    digests = compare_digests(published, [folder / f"{name}.jsonl" for name in options.names])
    up_bytes, down_bytes = final["up_bytes"], final["down_bytes"]
    parallel_bytes = data_parallel_bytes(options.learners, parameters, options.inner_steps)
    return {
        "learners": options.learners,
        "steps": options.inner_steps,
        "learner_steps": learner_steps(summaries, options, story),
        "parameters": parameters,
        "tokens": final["run_tokens"],
        "loss_global": global_loss,
        "loss_alone": alone["loss"],
        "up_bits_per_param": _bits(summaries, "push"),
        "down_bits_per_param": _bits(summaries, "publication"),
        "up_bytes": up_bytes,
        "down_bytes": down_bytes,
        "up_mbit_per_s": up_bytes * 8e-6 / wall_s,
        "down_mbit_per_s": down_bytes * 8e-6 / wall_s,
        "data_parallel_bytes": parallel_bytes,
        "traffic_ratio": parallel_bytes / (up_bytes + down_bytes),
        "merges": len(merges),
        "contributions_merged": sum(len(merge["contributors"]) for merge in merges),
        "contributions_refused": final["contributions_refused"],
        "longest_merge_gap_s": final["longest_merge_gap_s"],
        "killed": story.killed_at is not None,
        "keys": options.keys,
        "rejoin_s": story.rejoin_s,
        "mean_contributors_per_merge": _mean(len(merge["contributors"]) for merge in merges),
        "mean_live_learners": _mean(merge["live"] for merge in merges),
        "overwritten_fraction": _overwritten(summaries),
        "blocked_fraction": sum(s["stats"]["code_s"] for s in summaries)
        / sum(s["loop_s"] for s in summaries),
        "digests_compared": digests.compared,
        "digests_differing": digests.different,
        "wall_s": wall_s,
        "corpus_digest": alone["corpus_digest"],
    }


def data_parallel(options: DemoOptions, results: Results, *, say: Callable[[str], None]) -> Results:
    """Trains with data parallelism, as many steps as a learner of the run made.

    `recovered` is the share of data parallelism's advantage over one learner alone that the global
    model reaches. `say` gets lines of progress.
    """

    def report(progress: Progress) -> None:
        loss = f"training loss {progress['train_loss']:.3f}"
        say(f"step {progress['step']} of {progress['steps']}, {loss}")

    torch.set_num_threads(1)  # More threads than free cores would spin against each other.
    recipe = Recipe(steps=results["learner_steps"], preset=PRESET)
    baseline = train_data_parallel(load_corpus(None), recipe, names=options.names, report=report)
    loss = baseline.record["loss"]
    recovered = (results["loss_alone"] - results["loss_global"]) / (results["loss_alone"] - loss)
    return {"loss_data_parallel": loss, "recovered": recovered}


def learner_steps(summaries: list[Results], options: DemoOptions, story: DemoStory) -> int:
    """Inner steps that a learner made, the mean of those that lived from beginning to end.

    They are more than the goal asks for: the run counts the tokens that were merged.
    """
    lived: list[int] = [
        summary["steps"]
        for name, summary in zip(options.names, summaries, strict=True)
        if story.killed_at is None or name != story.victim
    ]
    return round(sum(lived) / len(lived))


def data_parallel_bytes(learners: int, parameters: int, steps: int) -> int:
    """Bytes that the links of all learners carry, both ways, under plain data parallelism.

    Assumes bf16 gradients and a ring all-reduce in every step: each learner sends and receives 2 (M
    - 1) / M of the model per step.
    """
    sent_per_learner = 2 * (learners - 1) * parameters * BF16_BYTES * steps // learners
    return 2 * sent_per_learner * learners


def evaluate_global(folder: Path, preset_name: str = PRESET) -> tuple[float, int]:
    """Validation loss and parameter count of the global model in the broker's checkpoint."""
    with StateDir.open(folder / "broker") as state_dir:
        snapshot = state_dir.load()
    if snapshot is None:
        raise NarrowsError(ErrorCode.STATE_DAMAGED, "the broker left no checkpoint")
    path = folder / "global.safetensors"
    export_tensors(snapshot, path)
    model = GPT(preset(preset_name))
    # Tied weights travel under one name only.
    model.load_state_dict(load_file(path), strict=False)
    windows = fixed_windows(load_corpus(None).validation, context=model.config.context)
    return validation_loss(model, windows), parameter_count(model)


def show(console: Console, results: Results) -> None:
    """Prints the last table and the line that says how few bits it took."""
    tables.show(console, facts(results))
    moved = results["up_bytes"] + results["down_bytes"]
    text = (
        f"{format_bytes(moved)} went over the wire; data parallelism (bf16 ring all-reduce in "
        f"every step) would have moved {format_bytes(results['data_parallel_bytes'])}: "
        f"{results['traffic_ratio']:.0f} times as much."
    )
    if results.get("keys"):  # Results of earlier versions had none.
        text += " Every connection was encrypted, and every learner had a key of its own."
    lines = wrapped(text, tables.width_of(console))
    tables.show_lines(console, [TextLine(""), *(TextLine(line, "bold") for line in lines)])


def facts(results: Results) -> Facts:
    """The last table."""
    shown = Facts("What it came to")
    for label, text in _rows(results):
        bad = "bold red" if "DIFFER" in text else ""
        shown.add(label, text, "bold" if label == GLOBAL else bad)
    return shown


def _rows(results: Results) -> Iterable[tuple[str, str]]:
    gain = results["loss_alone"] - results["loss_global"]
    yield GLOBAL, f"{results['loss_global']:.4f} nats/byte"
    yield (
        f"  one learner alone, {results['steps']:,} steps",
        f"{results['loss_alone']:.4f}  ({gain:+.4f} worse)",
    )
    if "recovered" in results:
        yield "  data parallel, as many steps", f"{results['loss_data_parallel']:.4f}"
        yield "  recovered of its advantage", f"{results['recovered']:.0%}"
    up, down = results["up_bits_per_param"], results["down_bits_per_param"]
    yield "bits per parameter and exchange", f"up {up:.2f}, down {down:.2f}"
    yield (
        "bytes, all learners, first copies included",
        f"up {format_bytes(results['up_bytes'])}, down {format_bytes(results['down_bytes'])}",
    )
    yield (
        "mean rate",
        f"up {format_bits_per_s(results['up_mbit_per_s'] * 1e6)}, "
        f"down {format_bits_per_s(results['down_mbit_per_s'] * 1e6)}",
    )
    refused = sum(results["contributions_refused"].values())
    codes = ", ".join(f"{code} {n}" for code, n in results["contributions_refused"].items())
    yield (
        "merges",
        f"{results['merges']}, {results['contributions_merged']} contributions merged, "
        f"{refused} refused" + (f" ({codes})" if codes else ""),
    )
    mean, live = results["mean_contributors_per_merge"], results["mean_live_learners"]
    yield "contributors per merge", f"{mean:.2f} of {live:.2f} live learners"
    yield "longest pause between merges", format_duration_s(results["longest_merge_gap_s"])
    if results.get("killed", True):  # Results of earlier versions always had a kill.
        rejoin = results["rejoin_s"]
        yield (
            "killed learner, from restart to merged again",
            format_duration_s(rejoin) if rejoin is not None else "not before the end",
        )
    if "learner_steps" in results:  # Results of earlier versions had none.
        yield (
            "steps of a learner",
            f"{results['learner_steps']:,}; the goal of {results['steps']:,} counts merged ones",
        )
    yield "work overwritten", f"{results['overwritten_fraction']:.1%}"
    yield "training threads held up by us", f"{results['blocked_fraction']:.2%} of the time"
    differing = results["digests_differing"]
    yield (
        "copies compared with the broker's, bit for bit",
        f"{results['digests_compared']}, "
        + ("all equal" if not differing else f"{differing} DIFFER"),
    )
    yield (
        "size and time",
        f"{format_count(results['parameters'])} parameters, {format_count(results['tokens'])} "
        f"tokens merged, {format_duration_s(results['wall_s'])}",
    )


def _final_status(path: Path) -> dict[str, Any]:
    for record in read_rows(path):
        if record["event"] == "final":
            return dict(record["status"])
    raise NarrowsError(ErrorCode.MISUSE, f"the broker wrote no final status to {path}")


def _bits(summaries: list[Results], what: str) -> float:
    """Bits per parameter of one exchange, headers included."""
    sent_bytes = sum(summary["stats"][f"{what}_bytes"] for summary in summaries)
    elements = sum(summary["stats"][f"{what}_elements"] for summary in summaries)
    return 8 * sent_bytes / elements if elements else 0.0


def _overwritten(summaries: list[Results]) -> float:
    ledgers = [summary["stats"]["ledger"] for summary in summaries]
    lost = sum(ledger["overwritten"] for ledger in ledgers)
    settled = sum(
        ledger[fate]
        for ledger in ledgers
        for fate in ("merged", "overwritten", "refused", "rolled_back")
    )
    return lost / settled if settled else 0.0


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed) if listed else 0.0
