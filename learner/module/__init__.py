"""Reads and writes the torch module that trains; nothing here knows of the network.

`parameters_of` gives a `ModuleParameters`, or a `DeviceParameters` that encodes pushes on a GPU
from a `DeviceSnapshot`. `StepLog` and `HostLoss` collect tokens and losses. `GradientWatch` and
`StrangerWatch` notice what a training loop does beside `log`. `ramp_steps` tells how many steps a
newcomer trains before it contributes. Others import these and nothing behind them.
"""

from narrows.learner.module.gpu import (
    DeviceParameters,
    DeviceSnapshot,
    beside_training,
    parameters_of,
)
from narrows.learner.module.gradient_watch import GradientWatch
from narrows.learner.module.parameter_watch import StrangerWatch
from narrows.learner.module.parameters import ModuleParameters
from narrows.learner.module.ramp import RAMP_STEPS_MIN, ramp_steps
from narrows.learner.module.step_log import HostLoss, Loss, StepLog

__all__ = [
    "RAMP_STEPS_MIN",
    "DeviceParameters",
    "DeviceSnapshot",
    "GradientWatch",
    "HostLoss",
    "Loss",
    "ModuleParameters",
    "StepLog",
    "StrangerWatch",
    "beside_training",
    "parameters_of",
    "ramp_steps",
]
