"""Outer gradients for the codec benches: drawn from distributions, or recorded in a real run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

from narrows.proto.codec import F32
from narrows.proto.errors import ConfigError
from narrows.proto.fragments import Fragment, build_table
from narrows.proto.messages import LayoutEntry

RECORDING: Final = Path(__file__).with_name("recorded.safetensors")
"""Outer gradients of the demo's model in the middle of its run (`narrows demo --record FILE`)."""

COLUMNS: Final = 1024
ROW_SHARE: Final = 0.03
"""Share of an embedding's rows whose tokens occurred since the last exchange."""


@dataclass(frozen=True)
class Data:
    """Values (n,) of one fragment."""

    name: str
    fragment: Fragment
    values: F32


def fragment_of(*elements: int) -> Fragment:
    """A fragment of one piece per number of elements."""
    layout = [LayoutEntry(f"t{i}", (n,), "float32", "rda") for i, n in enumerate(elements)]
    return build_table(layout, 1)[0]


def _gaussian(rng: np.random.Generator, count: int) -> NDArray[np.float64]:
    return rng.standard_normal(count)


def _laplace(rng: np.random.Generator, count: int) -> NDArray[np.float64]:
    return rng.laplace(size=count)


def _student_t(rng: np.random.Generator, count: int) -> NDArray[np.float64]:
    return rng.standard_t(3, size=count)  # Infinite kurtosis, finite variance.


def _sparse_rows(rng: np.random.Generator, count: int) -> NDArray[np.float64]:
    values = rng.standard_normal(count).reshape(-1, COLUMNS)
    values[rng.random(values.shape[0]) >= ROW_SHARE] = 0.0
    return values.reshape(-1)


_DRAWN: Final[dict[str, Callable[[np.random.Generator, int], NDArray[np.float64]]]] = {
    "gaussian": _gaussian,
    "laplace": _laplace,
    "student_t": _student_t,
    "sparse_rows": _sparse_rows,
}


def drawn_names() -> tuple[str, ...]:
    """Names of the distributions."""
    return tuple(_DRAWN)


def drawn(name: str, count: int, *, seed: int = 0) -> Data:
    """`count` values, a multiple of COLUMNS, of a distribution."""
    rng = np.random.default_rng(seed)
    values = (1e-3 * _DRAWN[name](rng, count)).astype(np.float32)
    return Data(name, fragment_of(count), values)


def recorded(path: Path = RECORDING) -> Data:
    """All outer gradients in a recording, one after the other. Raises ConfigError."""
    try:
        tensors = load_file(path)
        names = [name for name in tensors if name.startswith("outer_grad.")]
        indices = sorted(name.partition(".")[2] for name in names)
        values = np.concatenate([tensors[f"outer_grad.{i}"] for i in indices])
        pieces = [int(n) for i in indices for n in np.diff(tensors[f"bounds.{i}"])]
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ConfigError(
            f"{path} is no recording",
            expected="a file that `narrows demo --record FILE` wrote",
            got=str(error),
        ) from error
    return Data("recorded", fragment_of(*pieces), values.astype(np.float32))
