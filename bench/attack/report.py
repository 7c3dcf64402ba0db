"""The results of `narrows bench attack poison`: losses relative to undisturbed runs, and alarms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, TypeAlias

from rich.table import Table

from narrows.bench.quality.run import learner_name

Row: TypeAlias = dict[str, Any]


def key_of(row: Mapping[str, Any]) -> str:
    """Key of a run: everything that was chosen."""
    names = ("group", "rules", "learners", "attack", "claims", "texts", "steps", "seed")
    return "/".join(str(row[name]) for name in names)


def summary(rows: Sequence[Row]) -> list[Row]:
    """One row per cell: loss relative to the same learners undisturbed under the defaults."""
    undisturbed = {
        (row["learners"], row["steps"], row["seed"]): row["test_loss"]
        for row in rows
        if _is_honest(row) and row["rules"] == "defaults" and not row["texts"]
    }
    cells: dict[str, list[Row]] = {}
    for row in rows:
        cells.setdefault(key_of({**row, "seed": ""}), []).append(row)
    return [_summarised(own, undisturbed) for own in cells.values()]


def _summarised(runs: Sequence[Row], undisturbed: Mapping[tuple[int, int, int], float]) -> Row:
    first, attacker = runs[0], learner_name(0)
    names = ("group", "rules", "learners", "attack", "claims", "texts", "steps")
    losses = [run["test_loss"] for run in runs]
    base = [undisturbed.get((run["learners"], run["steps"], run["seed"])) for run in runs]
    ratios = [
        loss / reference
        for loss, reference in zip(losses, base, strict=True)
        if loss is not None and reference
    ]
    named = [run["named"].get(attacker) for run in runs]
    is_attacked = not _is_honest(first)
    others = {name for run in runs for name in run["named"] if name != attacker or not is_attacked}
    return {name: first[name] for name in names} | {
        "seeds": [run["seed"] for run in runs],
        "rounds": [run["rounds"] for run in runs],
        "attacker_share": _mean_of([run["attacker_share"] for run in runs]),
        "test_loss": fmean(losses) if None not in losses else None,
        "loss_ratio": fmean(ratios) if len(ratios) == len(runs) else None,
        "loss_ratio_max": max(ratios, default=None) if len(ratios) == len(runs) else None,
        "named_after_rounds": [each for each in named if is_attacked],
        "others_named": sorted(others),
        "pieces_clipped": sum(run["clipped"] for run in runs) / sum(run["pieces"] for run in runs),
    }


def _is_honest(row: Row) -> bool:
    """Nobody pushes or claims anything else than its work."""
    return row["attack"] == "nobody" and not row["claims"]


def _mean_of(values: Sequence[float | None]) -> float | None:
    known = [each for each in values if each is not None]
    return fmean(known) if known else None


def honest_alarms(rows: Sequence[Row]) -> Row:
    """Alarms in the runs without an attacker, per learner and round."""
    honest = [row for row in rows if _is_honest(row)]
    by_texts: dict[str, Row] = {}
    for texts in ("", "parts", "kinds"):
        own = [row for row in honest if row["texts"] == texts]
        by_texts[texts or "the same text"] = {
            "runs": len(own),
            "learner_rounds": sum(sum(row["contributed"].values()) for row in own),
            "rounds": sum(row["rounds"] for row in own),
            "learners_named": sum(len(row["named"]) for row in own),
            "rounds_with_an_alarm": sum(sum(row["alarms"].values()) for row in own),
        }
    return by_texts


def table(rows: Sequence[Row]) -> Table:
    """The table that is printed."""
    made = Table(
        "rules", "learners", "attack", "share", "loss / undisturbed", "worst", "named after", "also"
    )
    for row in rows:
        attack = row["attack"] + (f", claims {row['claims']}" if row["claims"] else "")
        ratio, worst = row["loss_ratio"], row["loss_ratio_max"]
        made.add_row(
            row["rules"],
            str(row["learners"]),
            attack if not row["texts"] else f"{attack}, {row['texts']} of text",
            f"{share:.2f}" if (share := row["attacker_share"]) is not None else "-",
            f"{ratio:.3f}" if ratio is not None else "-",
            f"{worst:.3f}" if worst is not None else "-",
            ", ".join(str(each or "never") for each in row["named_after_rounds"]),
            ", ".join(row["others_named"]),
        )
    return made
