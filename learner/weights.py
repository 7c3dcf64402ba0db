"""Notices what else changes the parameters, besides the optimizer and the exchange.

Four faults would spoil a run in silence: parameters that train and do not travel, an optimizer that
undoes adoptions from master weights of its own, averaged or best weights that are swapped in and
left there, and buffers that drift apart. The watch names each of them with its remedy, and an
honest optimizer is not blamed for a coincidence. It costs an operation on at most SAMPLED_TENSORS *
SAMPLED_ELEMENTS elements at each step, and a look at the id of each tensor of the optimizers.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from typing import Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from narrows.learner.parameters import Parameters, addresses_of, clean_name, local_part, misuse

SAMPLED_TENSORS: Final = 16
SAMPLED_ELEMENTS: Final = 16

CLEARLY: Final = 4.0
"""A distance is clearly larger than another one if it is more than so many times as large."""

UNDONE_RUNNING: Final = 5
"""Adoptions undone one after the other before it is called a fault. An optimizer with master
weights undoes each; an honest one undoes some by chance while the learning rate rises, because the
step that was measured is then shorter than those of now."""

KEPT_ENOUGH: Final = 8
"""Adoptions seen to last after which an optimizer is trusted: to compare waits for the device."""

_log = logging.getLogger("narrows.learner")


class WeightWatch:
    """Follows a few elements of the parameters through steps and adoptions, by four samples:

        _after ---- a step ----> _before ---- an adoption ----> _after ---- a step ----> now
                  |                                                           |
        `_step`: how far a step                               Does it lead back to `_before`?
        of this optimizer goes                                Then it undid the adoption (`_judge`).

    Between a boundary and the next step nothing may move the parameters: else somebody has swapped
    other weights in (`changed`).
    """

    def __init__(self, parameters: Parameters, optimizers: Sequence[Optimizer]) -> None:
        self._parameters = parameters
        self._optimizers = optimizers
        self._known: dict[int, Tensor] = {
            id(each): each for each in parameters.module.parameters() if each.requires_grad
        }
        """Tensors that travel or are known to stay, by id: torch hashes one ten times as slowly."""
        self._buffers = self._buffer_samples()
        self._warned_of: set[str] = set()
        stride = math.ceil(len(parameters.tensors) / SAMPLED_TENSORS)
        self._sampled = parameters.tensors[::stride]
        self._elements: list[Tensor] = []
        """A few elements of those on the device of the first, sharing their memory. They are kept:
        to find them anew costs a few operations for each, at every step."""
        self._addresses: list[int] = []
        """Memory of the sampled tensors when the elements were found."""
        self._marks: tuple[list[int], list[int]] = [], []
        """Memory and versions of the sampled tensors at the end of the last boundary."""
        self._adopted = False
        self._undone = self._kept = 0
        self._before: Tensor | None = None
        """Sample after the newest step, if the adoption that followed is to be judged."""
        self._after: Tensor | None = None
        """Sample at the end of the last boundary."""
        self._step: Tensor | None = None
        """Change made by a step that no adoption preceded: how far a step goes."""
        self._steps = self._steps_after_change = 0
        """Steps of the optimizer, and those before which something else changed parameters."""

    def start(self) -> None:
        """Call before joining. Raises LocalProtocolError MISUSE for parameters of the model that
        train and do not travel, and for optimizers that hold none of those that do. Others may be
        meant to stay here: a warning names them."""
        self._parameters.reshard()  # Else `parameters()` yields what FSDP2 has gathered.
        self._raise_for_strangers(self._parameters.module.parameters())
        if self._known.keys().isdisjoint(map(id, self._optimized())):
            raise misuse(
                "the optimizer holds no parameter of this model",
                expected="an optimizer over model.parameters()",
                remedy="Make it after whatever replaces the parameters. One that keeps master"
                " weights of its own cannot take part.",
            )
        if outside := self._strangers(self._optimized()):
            self._known |= {id(each): each for each in outside}
            self._warn(
                f"parameters of the optimizer do not travel, each learner keeps its own:"
                f" {self._described(outside)}"
            )

    def changed(self) -> bool:
        """Whether something else than the optimizer and the exchange has changed the parameters
        since the last boundary. To swap others in and back is no change. It waits for the device.
        """
        now = self._sample()
        # A nan is equal to a nan here: the optimizer has made it.
        return self._after is not None and not torch.allclose(
            self._after, now, rtol=0.0, atol=0.0, equal_nan=True
        )

    def is_foreign(self) -> bool:
        """Call when the loop is over: whether others' parameters were left in, such as averaged
        ones. A loop that clips its weights after each step has changed them before most steps."""
        return self.changed() and 2 * self._steps_after_change <= self._steps

    def before_step(self) -> None:
        """Call before the optimizer's step: compares with the end of the last boundary."""
        self._steps += 1
        if self._marks != (addresses_of(self._sampled), self._versions()) and self.changed():
            self._steps_after_change += 1
            self._warn(
                "something else than the optimizer has changed the parameters since the last step;"
                " the change travels to all learners. If averaged or best weights were swapped in,"
                " swap them back before the next step"
            )

    def stepped(self) -> None:
        """Call after the optimizer's step, before anything is adopted. Raises LocalProtocolError
        MISUSE for new parameters that train and do not travel, and for an optimizer that took back
        two adoptions running."""
        self._raise_for_strangers(self._optimized())
        sample = self._sample()
        if self._after is None:
            self.look_at_buffers()  # A buffer that changes at all does so at the first step.
        elif self._before is not None:
            self._judge(self._before, self._after, sample)
        elif self._kept < KEPT_ENOUGH:
            self._step = sample - self._after
        self._before = self._after = sample

    def adopting(self) -> None:
        """Call before parameters move at this boundary. An exception may still keep them where they
        are."""
        self._parameters.reshard()  # Else the next forward pass would not see the move.
        self._adopted = True

    def boundary_over(self) -> None:
        """Call at the end of a boundary: what changes from now on is nobody's step."""
        if self._adopted:
            self._after = self._sample()
        if not self._adopted or self._kept >= KEPT_ENOUGH or self._step is None:
            self._before = None
        self._marks = self._addresses, self._versions()
        self._adopted = False

    def look_at_buffers(self) -> None:
        """Warns of persistent buffers that have changed: they do not travel."""
        now = self._buffer_samples()
        changed = [name for name, sample in now.items() if self._buffers.get(name) != sample]
        if changed:
            names = ", ".join(changed)
            self._warn(f"buffers change but do not travel, each learner keeps its own: {names}")

    def _judge(self, before: Tensor, after: Tensor, now: Tensor) -> None:
        """Judges the adoption from `before` to `after` by the step from there to `now`.

        An optimizer with master weights of its own copies them over the parameters, so its step
        leads back to where they were before:

            honest:   before ----------- adoption -----------> after --step--> now
            undone:   before ----------- adoption -----------> after
                      now <------------------- step -------------'

        An honest step may lead back by chance, if the adoption was about one step long. So only
        adoptions that are clearly longer than a step are judged, and UNDONE_RUNNING ones raise.
        """
        assert self._step is not None
        moved = after != before
        adoption = float(((after - before) * moved).norm())
        back = float(((now - before) * moved).norm())
        step = float((self._step * moved).norm())
        if adoption > CLEARLY * step:
            if adoption > CLEARLY * back:
                self._undone += 1
                self._kept = 0
            else:
                self._undone = 0
                self._kept += 1
        if self._undone >= UNDONE_RUNNING:
            raise misuse(
                f"the optimizer's step took back what was adopted, {UNDONE_RUNNING} times running:"
                " it seems to keep master weights of its own and to copy them over the model's"
                " parameters",
                expected="steps that start from the values of the model's parameters",
                remedy="Use an optimizer that updates the model's parameters themselves, for"
                " instance on a float32 model under torch.autocast.",
            )

    def _versions(self) -> list[int]:
        """Changes when somebody writes to a sampled tensor. A DTensor counts writes in its wrapper,
        but not those of foreach and fused operations, and its local part counts none."""
        return [tensor._version for tensor in self._sampled]

    def _sample(self) -> Tensor:
        """A few elements of tensors all over the model: a float32 copy on their device."""
        addresses = addresses_of(self._sampled)
        if addresses != self._addresses:  # As after model.to(...).
            device = self._sampled[0].device
            if self._after is not None and self._after.device != device:
                self._before = self._after = self._step = None  # They are on another device.
            near = [tensor for tensor in self._sampled if tensor.device == device]
            self._elements = [_elements(local_part(tensor)) for tensor in near]
            self._addresses = addresses
        return torch.cat(self._elements).float()

    def _optimized(self) -> list[Tensor]:
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        return [tensor for group in groups for tensor in group["params"]]

    def _strangers(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        return [each for each in tensors if id(each) not in self._known and each.requires_grad]

    def _raise_for_strangers(self, tensors: Iterable[Tensor]) -> None:
        if strangers := self._strangers(tensors):
            raise misuse(
                f"parameters train that do not travel: {self._described(strangers)}",
                expected="those that required gradients when the Learner was made",
                remedy="Unfreeze or add what trains before the Learner is made, at every learner,"
                " in a run of its own. Or keep it frozen.",
            )

    def _described(self, tensors: Sequence[Tensor]) -> str:
        named = self._parameters.module.named_parameters(remove_duplicate=False)
        names: dict[Tensor, str] = {tensor: repr(clean_name(name)) for name, tensor in named}
        return ", ".join(
            names.get(each, f"one of shape {tuple(each.shape)} outside of the model")
            for each in tensors
        )

    def _buffer_samples(self) -> dict[str, list[float]]:
        """A few elements of each persistent floating-point buffer."""
        module = self._parameters.module
        persistent = module.state_dict(keep_vars=True).keys()
        return {
            clean_name(name): _elements(local_part(buffer)).tolist()
            for name, buffer in module.named_buffers()
            if name in persistent and buffer.is_floating_point() and buffer.numel()
        }

    def _warn(self, line: str) -> None:
        if line not in self._warned_of:
            self._warned_of.add(line)
            _log.warning("%s", line)


def _elements(tensor: Tensor) -> Tensor:
    """At most SAMPLED_ELEMENTS elements (n,), sharing the tensor's memory. A rank may hold none.
    They lie together in the middle, so all samples are copied without a kernel for each."""
    while tensor.dim() > 1 and len(tensor):
        tensor = tensor[tensor.shape[0] // 2]
    flat = tensor.reshape(-1)
    first = max(0, flat.numel() - SAMPLED_ELEMENTS) // 2
    return flat[first : first + SAMPLED_ELEMENTS]
