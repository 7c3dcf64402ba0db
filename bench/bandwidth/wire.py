"""Bits that real runs of small models put on the wire, beside the arithmetic of a plan."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from narrows.bench.kit.processes import Processes, work_folder
from narrows.broker.config import BrokerConfig, CodecSection
from narrows.broker.planning import FIRST_COPY_BYTES, frame_bits, payload_bits

CASES: Final = (("nano", 0.5), ("tiny", 0.5), ("tiny", 1.0))
"""Preset of the reference model, and the quantisation step of both directions in units of the rms:
0.5 is 3 bits, 1 is 2."""

LEARNERS: Final = 2
STEPS: Final = 150
TOKENS_PER_STEP: Final = 256
"""Tokens per step, the same for both presets: 4 windows of 64 bytes."""

END_TIMEOUT_S: Final = 300.0
DIRECTIONS: Final = (("up", "push", 1), ("down", "publication", LEARNERS))
"""Direction, what is exchanged, and how many first copies of the model go that way."""


@dataclass(frozen=True)
class WireRow:
    """One direction of one run. Bits per parameter and exchange, headers and topics included."""

    preset: str
    params: int
    learners: int
    rho: float
    direction: str
    exchanges: int
    """Exchanges of a whole fragment with one learner."""
    modelled_bits_per_param: float
    measured_bits_per_param: float
    modelled_first_copy_bytes: int
    """Parameters as version 0: up from one learner, down to each."""
    measured_other_bytes: int
    """First copies and control messages."""

    @property
    def difference_percent(self) -> float:
        return 100 * (self.measured_bits_per_param / self.modelled_bits_per_param - 1)


def measure(steps: int = STEPS, cases: Sequence[tuple[str, float]] = CASES) -> list[WireRow]:
    """Runs broker and learners on loopback, one run per case; about ten seconds each."""
    return [row for preset, rho in cases for row in _case(preset, rho, steps)]


def _case(preset: str, rho: float, steps: int) -> Iterator[WireRow]:
    with work_folder(None, "bandwidth") as folder, Processes(folder) as processes:
        summaries = _run(processes, preset, rho, steps)
    params = int(summaries[0]["parameters"])
    config = BrokerConfig()
    fragment_elements = params / config.fragments.count
    bits = payload_bits(CodecSection().push, rho, 0.0)
    modelled = frame_bits(bits, fragment_elements, config.codec.chunk_elements)
    for direction, what, copies in DIRECTIONS:
        stats = [summary["stats"] for summary in summaries]
        sent_bytes = sum(each[f"{what}_bytes"] for each in stats)
        elements = sum(each[f"{what}_elements"] for each in stats)
        yield WireRow(
            preset=preset,
            params=params,
            learners=LEARNERS,
            rho=rho,
            direction=direction,
            exchanges=round(elements / fragment_elements),
            modelled_bits_per_param=modelled,
            measured_bits_per_param=8 * sent_bytes / elements,
            modelled_first_copy_bytes=round(copies * FIRST_COPY_BYTES * params),
            measured_other_bytes=sum(each[f"{direction}_bytes"] for each in stats) - sent_bytes,
        )


def _run(processes: Processes, preset: str, rho: float, steps: int) -> list[Mapping[str, Any]]:
    """Runs one case; returns the learners' summaries."""
    folder = processes.folder
    address = processes.start_broker(
        "--listen", "tcp://127.0.0.1:0",
        "--state-dir", str(folder / "state"),
        "--goal-tokens", str(steps * LEARNERS * TOKENS_PER_STEP),
        "--set", f"run.learners_at_start={LEARNERS}",
        "--set", f"codec.push_rho={rho}",
        "--set", f"codec.publish_rho={rho}",
    )  # fmt: skip
    names = [f"learner-{index}" for index in range(LEARNERS)]
    for name in names:
        processes.start(
            name, "learner", "--broker", address, "--name", name, "--preset", preset,
            "--json", str(folder / f"{name}.json"),
        )  # fmt: skip
    for name in names:
        processes.wait(name, END_TIMEOUT_S)
    processes.check(*names)
    return [json.loads((folder / f"{name}.json").read_text()) for name in names]
