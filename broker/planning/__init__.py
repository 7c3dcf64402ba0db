"""The arithmetic of a run before it starts: rates, memory, disk, cores. [pure]

`make_plan` chooses the sync period and the number of brokers for a `Site`; the `RunPlan` has every
figure; `loads_of`, `fits` and `bottleneck` compare needs with what the machines have. `costs` holds
what a parameter costs, measured where arithmetic ends. `narrows plan` prints it, and the bandwidth
bench compares it with measurements. Nothing in here knows a running broker.
"""

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
