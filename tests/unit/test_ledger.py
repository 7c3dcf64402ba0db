"""Every token has one fate per fragment."""

from __future__ import annotations

import pytest

from narrows.learner.session.ledger import FragmentAccount, Ledger
from narrows.proto.messages import TokenLedger


def ledger() -> Ledger:
    """Two fragments, two steps of 100 tokens."""
    book = Ledger((FragmentAccount(), FragmentAccount()))
    book.step(100)
    book.step(100)
    return book


def test_tokens_are_pending_until_the_fragment_is_adopted() -> None:
    assert ledger().total() == TokenLedger(logged=200, pending=400)


def test_adoption_splits_merged_and_overwritten() -> None:
    book = ledger()
    book.accounts[0].adopt(1, merged=100, refused=0, rolled_back=False)
    assert book.total() == TokenLedger(logged=200, pending=200, merged=100, overwritten=100)
    assert (book.accounts[0].tokens, book.accounts[0].steps) == (0, 0)


def test_refused_and_rolled_back() -> None:
    book = ledger()
    book.accounts[0].adopt(1, merged=0, refused=150, rolled_back=True)
    assert book.total() == TokenLedger(logged=200, pending=200, refused=150, rolled_back=50)


def test_a_broker_that_falls_back_undoes_what_was_merged_after() -> None:
    book = ledger()
    book.accounts[0].adopt(1, merged=200, refused=0, rolled_back=False)
    book.step(50)
    book.accounts[0].adopt(2, merged=50, refused=0, rolled_back=False)
    book.accounts[0].roll_back(1)
    total = book.total()
    assert (total.merged, total.rolled_back) == (200, 50)


def test_skipped_tokens_count_for_every_fragment() -> None:
    book = ledger()
    book.skip(30)
    assert book.total() == TokenLedger(logged=230, pending=400, skipped=60)


def test_closing_settles_the_last_push_and_leaves_the_rest_pending() -> None:
    book = ledger()
    book.accounts[1].close(3, merged=150, refused=0)
    assert book.total() == TokenLedger(logged=200, pending=250, merged=150)


def test_more_settled_than_there_is_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        FragmentAccount(tokens=10, steps=1).adopt(1, merged=11, refused=0, rolled_back=False)
