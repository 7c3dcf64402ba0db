"""Parameters that torch has sharded, in a group of one process: DTensors as several ranks have."""

from collections.abc import Callable, Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from sharded_cases import CASES, fsdp, mesh, whole_model
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Partial

from narrows.learner.parameters import Parameters
from narrows.learner.ranks.exchange import RanksExchange, RanksIsland
from narrows.learner.ranks.meeting import TIMEOUT, Ranks
from narrows.learner.session import View
from narrows.proto.errors import LocalProtocolError
from narrows.proto.layout import build_table
from narrows.proto.ports import Prepared


@pytest.fixture(autouse=True)
def group() -> Generator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("case", CASES)
def test_one_process(case: Callable[[Path], None], tmp_path: Path) -> None:
    """Holds `Parameters`, `WeightWatch`."""
    case(tmp_path)


def test_one_rank_is_read_and_written_as_a_process_without_ranks() -> None:
    """Holds `Parameters.view`."""
    sharded = Parameters(fsdp())
    plain = Parameters(whole_model())
    for fragment in build_table(plain.layout.entries, 2):
        values = np.empty((2, fragment.elements), np.float32)
        for written in (True, False):
            sharded.read(fragment, values[0])
            plain.read(fragment, values[1])
            assert values[0].tobytes() == values[1].tobytes()
            if written:
                sharded.write(fragment, values[0] * 2)
                plain.write(fragment, values[0] * 2)


def test_every_step_of_an_island_counts_its_tokens_and_its_loss() -> None:
    """They come one boundary late, or at once where ranks meet. Holds `RanksExchange.boundary`."""
    heard: list[tuple[int, float | None, bool]] = []
    leader: Any = SimpleNamespace(
        view=lambda: View(False, 0.0, 0.0, 0, 0, 0, "connected"),
        due=lambda: len(heard) % 3 == 1,
        join=lambda ramp_steps: None,
        boundary=lambda tokens, loss, exchanges=True: heard.append((tokens, loss, exchanges)),
        abort=lambda: None,
    )
    ranks = Ranks(Parameters(whole_model()), counts=True)
    exchange = RanksExchange(ranks, lambda island: leader, lambda: None)
    exchange.join(0)
    for loss in (1.0, 2.0, 3.0, 4.0, 8.0):
        exchange.boundary(8, loss)
    assert heard[:2] == [(0, None, False), (16, 1.5, True)]
    assert heard[2:] == [(0, None, False), (8, 3.0, False), (16, 6.0, True)]
    exchange.abort()
    assert exchange.view().health == "ended"


def test_a_leader_that_is_interrupted_behind_its_order_waits_for_nobody() -> None:
    """The others wait for what it was to send, and would never hear of the error."""
    ranks = Ranks(Parameters(whole_model()), counts=True)

    def interrupted(*order: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        RanksIsland(ranks, interrupted).adopt(ranks.fragment(0, 1), Prepared(None, 0.0))
    assert ranks.apart
    with pytest.raises(torch.OutOfMemoryError), ranks.exchanging():
        raise torch.OutOfMemoryError("CUDA out of memory: no rank is lost")


def test_an_error_of_the_momentum_rule_loses_no_rank() -> None:
    """But nobody goes on with half a fragment. Holds `Ranks.hand_over`."""
    moments = Mock(mend=Mock(side_effect=RuntimeError("the rule is wrong")))
    ranks = Ranks(Parameters(whole_model()), counts=True, moments=moments)
    fragment = ranks.fragment(0, 1)
    values = np.zeros(fragment.elements, np.float32)
    leader = RanksIsland(ranks, lambda *order: None)
    ways: list[Callable[[], None]] = [
        lambda: leader.adopt(fragment, Prepared(values, 1, 0.5, values)),
        lambda: ranks.hand_over(fragment, values, 0.5),
    ]
    for adopt in ways:
        ranks.apart = False
        with pytest.raises(RuntimeError, match=r"^the rule is wrong"):
            adopt()
        assert ranks.apart


@pytest.mark.parametrize(
    ("leave", "ended_groups"),
    [(lambda exchange: exchange.finish(None), 2), (RanksExchange.abort, 1)],
    ids=["together", "alone"],
)
def test_nccl_groups_end_only_where_all_ranks_leave(
    leave: Callable[[RanksExchange], None], ended_groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To destroy one waits for the others, which may train on. Holds `Ranks.leave`."""
    leader = Mock(
        view=lambda: View(False, 0.0, 0.0, 0, 0, 0, "connected"),
        due=lambda: False,
    )
    ranks = Ranks(Parameters(whole_model()), counts=True)
    groups = [ranks._words, ranks._carrier]
    ended: list[object] = []
    monkeypatch.setattr(dist, "destroy_process_group", ended.append)
    exchange = RanksExchange(ranks, lambda island: leader, lambda: None)
    exchange.join(0)
    ranks._device = torch.device("cuda")  # As with NCCL.
    leave(exchange)
    assert ended == groups[:ended_groups]


def test_a_group_in_which_a_sum_may_have_begun_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal comes before anybody has the sum in hand. Holds `Ranks.start_sum`."""
    ranks = Ranks(Parameters(whole_model()), counts=True)
    carrier = ranks._carrier
    ended: list[object] = []
    monkeypatch.setattr(dist, "destroy_process_group", ended.append)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(dist, "all_reduce", Mock(side_effect=KeyboardInterrupt))
        ranks.start_sum(np.zeros(2))
    ranks.start_sum(np.zeros(2))(TIMEOUT)  # As `RanksExchange.abort` does.
    ranks.leave()
    assert ended == [carrier]


def test_a_sum_that_is_not_made_yet_is_refused() -> None:
    """Holds `Parameters`."""
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(DTensor.from_local(torch.ones(2, 2), mesh(), [Partial()]))
    with pytest.raises(LocalProtocolError, match=r"'weight' is a partial DTensor.*[Rr]edistribute"):
        Parameters(model)
    model.weight = nn.Parameter(distribute_tensor(torch.ones(2, 2), mesh()))
    assert [entry.name for entry in Parameters(model).layout.entries] == ["weight", "bias"]
