"""Conditions that alerts are made of."""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest
from typing_extensions import override

from coordinator.traffic import TrafficCounter
from coordinator.upkeep.alert_conditions import (
    PublicAddress,
    is_old,
    many_refused,
)
from shared.units import DAY_S


@pytest.mark.parametrize("url", ["http://пример.invalid", "http://host..invalid:8080"])
def test_a_name_that_nobody_can_look_up_ends_no_alerts(url: str) -> None:
    address = PublicAddress(url)
    address.look()
    assert address.condition("this machine") == []


def test_a_balancer_that_does_not_know_the_server_yet_is_no_alert() -> None:
    class Away(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(503)

        @override
        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Away) as balancer:
        Thread(target=balancer.serve_forever, args=(0.05,), daemon=True).start()
        address = PublicAddress(f"http://127.0.0.1:{balancer.server_port}")
        address.look()
        assert address.condition("this machine") == []
        address.look()
        assert "answers 503" in address.condition("this machine")[0].message
        balancer.shutdown()


def test_a_stopping_server_says_so_and_fails_nothing() -> None:
    traffic = TrafficCounter()
    traffic.count("GET", "/ready", 503, 0.0)
    traffic.count("GET", "/health", 200, 0.0)
    traffic.count("POST", "/claims", 500, 0.0)
    assert traffic.answered() == (2, 1)


def test_a_backup_is_old_after_the_days_that_the_organiser_sets() -> None:
    assert is_old(2 * DAY_S, 2)
    assert not is_old(2 * DAY_S - 1, 2)
    assert not is_old(1000 * DAY_S, 0)


def test_what_was_said_stays_said_a_little_longer() -> None:
    assert not many_refused(29, 29)  # too few to tell
    assert many_refused(11, 30)
    assert not many_refused(9, 30)
    assert many_refused(9, 30, open_before=True)
