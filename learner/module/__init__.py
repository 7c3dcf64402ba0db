"""The torch module that trains: its parameters, snapshots, adoption, logged steps."""

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
