"""Published bandwidth figures, each with its source; the only place where they are written down."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

TABLE_SOURCE: Final = "Streaming DiLoCo (arXiv 2501.18512), appendix, Table 4"

TARGETS_PERCENT: Final = (50, 80, 90, 95, 99)
"""Compute utilisation that each column asks for."""

TABLE: Final[Mapping[tuple[str, str], tuple[float, ...]]] = {
    ("1B", "data_parallel"): (86.8, 152.6, 184.2, 222.3, 569.0),
    ("1B", "diloco"): (1.4, 6.2, 13.3, 23.3, 86.8),
    ("1B", "streaming"): (1.4, 5.2, 9.1, 16.0, 28.1),
    ("1B", "overlap"): (1.4, 4.3, 6.2, 9.1, 11.0),
    ("1B", "overlap_fp4"): (0.4, 0.9, 1.7, 2.0, 3.0),
    ("10B", "data_parallel"): (104.8, 222.3, 222.3, 268.3, 471.5),
    ("10B", "diloco"): (1.7, 7.5, 16.0, 33.9, 104.8),
    ("10B", "streaming"): (1.7, 5.2, 9.1, 13.3, 19.3),
    ("10B", "overlap"): (1.7, 3.6, 5.2, 6.2, 7.5),
    ("10B", "overlap_fp4"): (0.4, 0.9, 1.4, 1.4, 1.7),
}
"""Gbit/s by model and method, one per target. The rows of 100B are left out on purpose: they were
predicted, not fitted."""

HEADLINE_SOURCE: Final = (
    "Decoupled DiLoCo (arXiv 2604.21428), figure of the authors' announcement: 8 data centres"
)
HEADLINE_DATA_PARALLEL_GBPS: Final = 198.0
HEADLINE_DECOUPLED_GBPS: Final = 0.84
