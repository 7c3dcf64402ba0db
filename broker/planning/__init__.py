"""The arithmetic of a run before it starts: rates, memory, disk, cores. [pure]"""

from narrows.broker.planning import costs
from narrows.broker.planning.capacity import (
    LATE_STEPS_MAX,
    USABLE,
    Load,
    bottleneck,
    fits,
    loads_of,
    make_plan,
)
from narrows.broker.planning.costs import (
    FIRST_COPY_BYTES,
    PACKET_FACTOR,
    frame_bits,
    gaussian_bits,
    payload_bits,
)
from narrows.broker.planning.demand import RunPlan, Site

__all__ = [
    "FIRST_COPY_BYTES",
    "LATE_STEPS_MAX",
    "PACKET_FACTOR",
    "USABLE",
    "Load",
    "RunPlan",
    "Site",
    "bottleneck",
    "costs",
    "fits",
    "frame_bits",
    "gaussian_bits",
    "loads_of",
    "make_plan",
    "payload_bits",
]
