"""Finds parameters that train and do not travel: unfrozen, added or replaced after the start."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor
from torch.optim import Optimizer

from narrows.learner.module.parameters import ModuleParameters, clean_name
from narrows.proto.errors import ErrorCode, LocalProtocolError

_log = logging.getLogger("narrows.learner")


class StrangerWatch:
    """Watches for parameters that train outside of the run's layout.

    A run exchanges its layout, which its first learner fixes. A parameter that trains beside it
    would make each learner's model another one. Those that freeze stay in the layout: they adopt
    the changes of other learners. Parameters outside of the model that an optimizer has from the
    start may be meant to stay here: they only cause a warning.
    """

    def __init__(self, parameters: ModuleParameters, optimizers: Sequence[Optimizer]) -> None:
        self._parameters, self._optimizers = parameters, optimizers
        #: Tensors that may train, by id. They are kept, so that no other tensor gets the id.
        self._known: dict[int, Tensor] = {}

    def start(self) -> None:
        """Raises LocalProtocolError(MISUSE) as `check_model` does; call it before joining."""
        self.check_model()
        outside = self._strangers(self._optimized())
        self._know(outside)
        if outside:
            _log.warning(
                "parameters of the optimizer do not travel, each learner keeps its own: %s",
                self._described(outside),
            )

    def check(self) -> None:
        """Looks at the optimizers, quickly enough for every step. Raises as `check_model` does."""
        self._raise_for(self._strangers(self._optimized()))

    def check_model(self) -> None:
        """Looks at every parameter of the model.

        Raises LocalProtocolError(MISUSE) that names those that train and do not travel.
        """
        self._raise_for(self._strangers(self._parameters.module.parameters()))

    def _optimized(self) -> Iterator[Tensor]:
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                yield from group["params"]

    def _strangers(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        # Known tensors are passed over first, since this runs at every step.
        new = [t for t in tensors if t.requires_grad and id(t) not in self._known]
        if not new:
            return new
        strangers = self._parameters.strangers(new)
        self._know(t for t in new if not any(t is stranger for stranger in strangers))
        return strangers

    def _know(self, tensors: Iterable[Tensor]) -> None:
        self._known.update((id(tensor), tensor) for tensor in tensors)

    def _raise_for(self, strangers: Sequence[Tensor]) -> None:
        if strangers:
            raise LocalProtocolError(
                ErrorCode.MISUSE,
                f"parameters train that do not travel: {self._described(strangers)}",
                expected="those that required gradients when the Learner was made",
                remedy="What trains is the run's layout: unfreeze or add it before the Learner is "
                "made, at every learner, in a run of its own. Or keep it frozen.",
            )

    def _described(self, tensors: Sequence[Tensor]) -> str:
        named = self._parameters.module.named_parameters(remove_duplicate=False)
        names = {id(tensor): repr(clean_name(name)) for name, tensor in named}
        return ", ".join(
            names.get(id(t), f"one of shape {tuple(t.shape)} outside of the model") for t in tensors
        )
