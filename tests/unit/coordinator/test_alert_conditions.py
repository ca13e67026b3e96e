"""Conditions that alerts are made of."""

from __future__ import annotations

import pytest

from coordinator.upkeep.alert_conditions import PublicAddress


@pytest.mark.parametrize("url", ["http://пример.invalid", "http://host..invalid:8080"])
def test_a_name_that_nobody_can_look_up_ends_no_alerts(url: str) -> None:
    address = PublicAddress(url)
    address.look()
    assert address.condition("this machine") == []
