"""The energy of today: counted or added up, over midnight and restarts, never over a sleep."""

from __future__ import annotations

from datetime import datetime

from hypothesis import given
from hypothesis import strategies as st

from volunteer.control.events import Sensed
from volunteer.machine.energy import GAP_S, STORE_S, EnergyMeter, Today

NOON = datetime.fromisoformat("2026-03-02T12:00").timestamp()


def metered(joules: float, watts: float | None = None) -> Sensed:
    return Sensed(device="cuda:0", watts=watts, metered_joules=joules)


def powered(watts: float, *, estimated: bool = False) -> Sensed:
    return Sensed(device="cpu", watts=watts, estimated=estimated)


def test_a_counter_is_believed_also_over_a_sleep() -> None:
    meter = EnergyMeter(Today(), lambda today: None)
    assert meter.count(metered(1000.0), NOON).joules == 0.0
    assert meter.count(metered(1500.0), NOON + 3 * GAP_S).joules == 500.0
    assert meter.count(metered(100.0), NOON + 4 * GAP_S).joules == 500.0  # the driver began anew


def test_power_is_added_up_and_a_sleep_left_out() -> None:
    meter = EnergyMeter(Today(), lambda today: None)
    meter.count(powered(10.0), NOON)
    assert meter.count(powered(30.0), NOON + 10).joules == 200.0
    assert meter.count(powered(30.0), NOON + 10 + 2 * GAP_S).joules == 200.0
    assert meter.count(powered(30.0), NOON).joules == 200.0  # a clock that goes back


def test_what_was_estimated_stays_marked_for_the_day_and_the_next_begins_with_nothing() -> None:
    meter = EnergyMeter(Today(), lambda today: None)
    meter.count(powered(10.0, estimated=True), NOON)
    assert meter.count(powered(10.0, estimated=True), NOON + 10).estimated
    assert meter.count(powered(10.0), NOON + 20).estimated
    tomorrow = meter.count(powered(10.0), NOON + 86_400)
    assert (tomorrow.joules, tomorrow.estimated) == (0.0, False)


def test_the_day_goes_on_after_a_restart_and_is_stored_now_and_then() -> None:
    stored: list[Today] = []
    meter = EnergyMeter(Today(), stored.append)
    meter.count(powered(10.0), NOON)
    for second in range(10, 600, 10):
        meter.count(powered(10.0), NOON + second)
    assert len(stored) == 1 + 590 // STORE_S
    meter.store()
    again = EnergyMeter(stored[-1], stored.append)
    again.count(powered(10.0), NOON + 700)
    assert again.today.joules == {"cpu": 5900.0}


def test_a_device_without_a_meter_has_no_energy() -> None:
    meter = EnergyMeter(Today(), lambda today: None)
    nothing = Sensed(device="cpu", utilisation=0.5)
    assert meter.count(nothing, NOON) is nothing
    assert meter.today.joules == {}


@given(st.lists(st.tuples(st.floats(0, 500), st.floats(0.1, GAP_S)), min_size=2, max_size=20))
def test_the_sum_lies_between_the_least_and_the_most_power(
    looks: list[tuple[float, float]],
) -> None:
    meter, now = EnergyMeter(Today(), lambda today: None), NOON
    for watts, step_s in looks:
        meter.count(powered(watts), now)
        now += step_s
    spent_s = sum(step_s for _, step_s in looks[:-1])
    powers = [watts for watts, _ in looks]
    found = meter.today.joules["cpu"]
    slack = 1e-6 + 1e-5 * max(powers)  # an instant of the clock is no finer than that
    assert min(powers) * spent_s - slack <= found <= max(powers) * spent_s + slack
