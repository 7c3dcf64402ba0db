"""Parameters that two ranks share, as each of them sees and saves them."""

import itertools
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from model_cases import VOCABULARY, loss_of
from safetensors.torch import load_file
from sharded_cases import evaluate, fsdp, whole_model

from narrows.learner import Learner
from narrows.learner.parameters import Parameters, check_same_model
from narrows.proto.errors import LocalProtocolError
from narrows.proto.layout import fingerprint

RANKS = 2
STRANGER_AT = 22
"""The step after which somebody else writes to the parameters."""


def meet(case: Callable[[Path], None], folder: Path, rank: int) -> None:
    """One rank: meets the others at a file in the folder. Its exit code is 1 if the case fails."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    place = f"file://{folder / 'meeting'}"
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=RANKS)
    case(folder)
    dist.barrier()
    dist.destroy_process_group()


def stages_of_a_pipeline_are_refused(folder: Path) -> None:
    """Each rank has other layers."""
    mine = whole_model().get_submodule("table" if dist.get_rank() == 0 else "hidden")
    told = [""] * RANKS
    dist.all_gather_object(told, fingerprint(Parameters(mine).layout))
    with pytest.raises(LocalProtocolError, match=r"ranks 1 have other parameters than rank 0"):
        check_same_model(told)


def evaluates_at_any_time_and_a_stranger_is_told(folder: Path) -> None:
    """Before there is a Learner, in a pause, last in the block: the model that is saved is the one
    that computes. Every rank warns of what somebody else has written."""
    warned: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("narrows.learner").addHandler(handler)
    model = fsdp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    evaluate(model)
    address = (folder / "broker.ready").read_text().strip()
    learner = Learner(model, optimizer, broker=address, name="island", leave_timeout_s=25.0)
    with learner:
        for step in learner.until_end(itertools.count()):
            loss = loss_of(model)
            loss.backward()  # type: ignore[no-untyped-call]
            learner.log(tokens=VOCABULARY, loss=loss)
            optimizer.step()
            optimizer.zero_grad()
            if step == STRANGER_AT:
                assert not any("something else" in line for line in warned)
                with torch.no_grad():
                    for each in model.parameters():
                        each.copy_(each * 1.01)
            elif step in (8, 16):
                with learner.pause():
                    evaluate(model)
        evaluate(model)
    assert learner.health == "final" and any("something else" in line for line in warned)
    saved = folder / "island.safetensors"
    learner.save(saved)
    dist.barrier()
    fresh = whole_model()
    fresh.load_state_dict(load_file(saved), strict=True)
    assert torch.equal(evaluate(model), evaluate(fresh))
