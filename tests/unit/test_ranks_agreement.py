"""The vector that ranks agree on, as plain data."""

import numpy as np
import pytest

from narrows.learner.ranks.agreement import (
    HEALTHS,
    NOTHING_SAID,
    Act,
    Doing,
    Order,
    Said,
    led,
    read_vector,
    vector_of,
)
from narrows.learner.session import View
from narrows.proto.errors import LocalProtocolError


def test_the_leader_speaks_for_the_clock_and_all_for_their_tokens() -> None:
    """Holds `vector_of`, `read_vector`."""
    view = View(True, 1234.5, 96.0, 5000, 7, 20, "waiting")
    leader = led(view, due=True)._replace(tokens=10, loss_sum=25.0, loss_tokens=10)
    other = Said(tokens=30, loss_sum=15.0, loss_tokens=30, exhausted=1)
    order = Order(Act.MOVE, 3, 4, 0.5)
    vectors = [
        vector_of(leader, 0, 3, 7, Doing.EXCHANGING, order),
        vector_of(other, 1, 3, 7, Doing.EXCHANGING),
        vector_of(NOTHING_SAID, 2, 3, 7, Doing.EXCHANGING),
    ]
    assert {vector.size for vector in vectors} == {vectors[0].size}, "gloo ends the process"
    told, said = read_vector(np.sum(vectors, axis=0))
    assert told == order and said.due and said.exhausted
    assert (said.tokens, said.loss) == (40, 1.0)
    assert said.view(steps=7) == view
    assert NOTHING_SAID.loss is None


def test_every_word_of_health_travels() -> None:
    """Holds `led`."""
    for health in HEALTHS:
        view = View(False, 0.0, 0.0, 0, 0, 0, health)
        assert led(view, due=False).view(0) == view


@pytest.mark.parametrize(
    ("places", "words"),
    [
        (
            [(25, Doing.STEPPING), (25, Doing.LEAVING)],
            "rank 0 has made 25 steps; rank 1 leaves after 25 steps .*until_end",
        ),
        (
            [(4, Doing.ASKING), (4, Doing.BREAKING_OFF), (4, Doing.ASKING)],
            "rank 0, rank 2 asks for a batch after 4 steps; rank 1 has broken off .*log of rank 1",
        ),
        (
            [(0, Doing.ENTERING)] * 10 + [(0, Doing.EXCHANGING)],
            "rank 7 and 2 more enters; rank 10 exchanges",
        ),
    ],
)
def test_ranks_at_several_places_are_named(places: list[tuple[int, Doing]], words: str) -> None:
    """Holds `check_places`."""
    vectors = [
        vector_of(NOTHING_SAID, rank, len(places), steps, doing)
        for rank, (steps, doing) in enumerate(places)
    ]
    with pytest.raises(LocalProtocolError) as caught:
        read_vector(np.sum(vectors, axis=0))
    caught.match(words.replace(" .*", r".*"))
