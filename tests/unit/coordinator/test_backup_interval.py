"""Times between two backups, as an organiser types them."""

from __future__ import annotations

import pytest

from coordinator.cli.maintenance import _seconds
from shared.errors import BadRequest


def test_an_interval_is_a_number_and_a_unit() -> None:
    assert [_seconds(text) for text in ("1d", "6h", "030m")] == [86_400, 21_600, 1_800]


@pytest.mark.parametrize(
    "text",
    ["", "d", "0d", "1w", "-1d", "\u00b2d", "9" * 400 + "d", "9" * 5_000 + "d"],
    ids=lambda text: text[:9],
)
def test_what_is_no_interval_is_refused(text: str) -> None:
    with pytest.raises(BadRequest, match="must look like"):
        _seconds(text)
