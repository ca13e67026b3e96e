"""A repeated verdict is announced once, and never takes a later one back."""

from __future__ import annotations

import pytest

from shared.protocol.base import ContributionState
from shared.protocol.contributions import Verdict
from volunteer.control.status import is_news


def verdict(state: ContributionState, at: float) -> Verdict:
    return Verdict(contribution=1, task=1, run="r", state=state, at=at)


@pytest.mark.parametrize(
    ("new", "known", "news"),
    [
        (verdict("accepted", 1.0), None, True),
        (verdict("merged", 2.0), verdict("accepted", 1.0), True),
        (verdict("merged", 1.0), verdict("accepted", 1.0), True),  # in one transaction
        (verdict("accepted", 1.0), verdict("merged", 2.0), False),  # repeated, because it is young
        (verdict("accepted", 1.0), verdict("merged", 1.0), False),
        (verdict("merged", 2.0), verdict("merged", 2.0), False),
        (verdict("rejected", 3.0), verdict("accepted", 1.0), True),  # set aside by a merge
    ],
)
def test_only_a_later_word_is_news(new: Verdict, known: Verdict | None, news: bool) -> None:
    assert is_news(new, known) is news
