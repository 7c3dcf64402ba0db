"""Islands of ranks beside a broker, and the judgement of what they leave."""

import json
from pathlib import Path
from typing import Any

from acceptance.kit import Site
from ranks.island import Island, learn

from narrows.bench.kit.processes import Child

SOLO = Island(kind="solo", ranks=1)


def start(site: Site, name: str, island: Island) -> list[Child]:
    """Starts the ranks of a learner; `site.broker` has been called."""
    return [
        site.fork(f"{name}-{rank}", learn, site.folder, name, site.address, island, rank)
        for rank in range(island.ranks)
    ]


def left(site: Site, name: str, ranks: int) -> list[dict[str, Any]]:
    """Reads what each rank has told at its end."""
    return [json.loads(told(site.folder, name, rank).read_text()) for rank in range(ranks)]


def told(folder: Path, name: str, rank: int) -> Path:
    return folder / f"{name}.{rank}.json"
