"""When and how hard a machine works: every rule, with the clock and the facts in our hands."""

from __future__ import annotations

from datetime import datetime, timedelta

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shared.units import GIB
from volunteer.i18n.catalogue import LanguageChoice, choose, translated, use
from volunteer.machine.policy import (
    Decision,
    Hold,
    MachineFacts,
    PolicyState,
    Rule,
    decide,
    lift,
    rest_after,
)
from volunteer.settings.schedule import WEEK_MIN, Schedule, parse_schedule, weekday_words
from volunteer.settings.work_rules import WorkRules

MONDAY = datetime.fromisoformat("2026-03-02")  # a Monday, 00:00
NOTHING_KNOWN = MachineFacts()
NOON = MONDAY + timedelta(hours=12)


def at(day: int, clock: str) -> datetime:
    hour, minute = map(int, clock.split(":"))
    return MONDAY + timedelta(days=day, hours=hour, minutes=minute)


def ask(
    rules: WorkRules,
    facts: MachineFacts = NOTHING_KNOWN,
    now: datetime = NOON,
    state: PolicyState | None = None,
) -> Decision:
    return decide(rules, facts, now, ("cuda:0", "cuda:1"), state)


def only(decision: Decision) -> Hold:
    (hold,) = decision.holds
    return hold


# ---------------------------------------------------------------------------------------- schedule


@pytest.mark.parametrize(
    ("entries", "open_at", "closed_at"),
    [
        (["mon-fri 18:00-08:00"], [(0, "18:00"), (1, "07:59"), (5, "07:00")], [(0, "07:00")]),
        (["mon-fri 18:00-08:00"], [(4, "23:00")], [(4, "17:59"), (5, "08:00"), (6, "20:00")]),
        (["sat-sun"], [(5, "00:00"), (6, "23:59")], [(4, "23:59"), (0, "00:00")]),
        (["22:00-6:00"], [(0, "05:59"), (3, "22:00"), (6, "23:00")], [(2, "06:00"), (2, "21:59")]),
        (["sun 22:00-06:00"], [(6, "23:59"), (0, "00:00"), (0, "05:59")], [(0, "06:00")]),
        (["sun 22:00-06:00"], [(6, "22:00")], [(6, "21:59"), (5, "23:00"), (6, "05:00")]),
        (["fri-mon 12:00-13:00"], [(4, "12:00"), (0, "12:59")], [(1, "12:30"), (0, "13:00")]),
        (["Tuesday 00:00-24:00"], [(1, "00:00"), (1, "23:59")], [(2, "00:00"), (0, "23:59")]),
        (["mon 10:00-11:00", "mon 11:00-12:00"], [(0, "10:30"), (0, "11:30")], [(0, "12:00")]),
    ],
)
def test_hours_are_read_as_people_mean_them(
    entries: list[str], open_at: list[tuple[int, str]], closed_at: list[tuple[int, str]]
) -> None:
    hours = parse_schedule(entries)
    assert all(hours.allows(at(*moment)) for moment in open_at)
    assert not any(hours.allows(at(*moment)) for moment in closed_at)


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("someday 10:00-12:00", "is not a day"),
        ("sunny", "is not a day"),
        ("mo 10:00-12:00", "is not a day"),
        ("mon-fri 10-12", "is not a time of the week"),
        ("10:00-10:00", "begins when it ends"),
        ("10:61-12:00", "no clock shows"),
        ("24:00-12:00", "no clock shows"),
        ("mon 10:00-12:00 tue", "is not a time of the week"),
        ("", "is not a time of the week"),
    ],
)
def test_a_slip_in_the_hours_is_named_when_it_is_set(entry: str, says: str) -> None:
    if not entry:
        assert parse_schedule([entry]).allows(NOON)  # nothing said: every day, all day
        return
    with pytest.raises(msgspec.ValidationError, match=says):
        msgspec.convert({"schedule": [entry]}, WorkRules)


def test_touching_hours_do_not_change_in_between() -> None:
    hours = parse_schedule(["mon 10:00-11:00", "mon 11:00-12:00"])
    assert hours.changes(at(0, "10:30")) == at(0, "12:00")
    night = parse_schedule(["sun 22:00-06:00"])
    assert night.changes(at(6, "23:00")) == at(0, "06:00") + timedelta(days=7)
    assert parse_schedule([]).changes(NOON) is None
    assert parse_schedule(["mon-sun"]).changes(NOON) is None


_days = st.sampled_from(["", "mon ", "fri-sun ", "sun-tue ", "wed "])
_clock = st.tuples(st.integers(0, 23), st.integers(0, 59))
_entry = st.builds(
    lambda day, a, b: f"{day}{a[0]}:{a[1]:02}-{b[0]}:{b[1]:02}",
    _days,
    _clock,
    _clock,
).filter(lambda text: len(set(text.split()[-1].split("-"))) == 2)


@given(st.lists(_entry, min_size=1, max_size=4), st.integers(0, WEEK_MIN - 1))
@example(["sun 22:00-06:00"], WEEK_MIN - 1)
@example(["sun 22:00-06:00"], 0)
@example(["mon 10:00-11:00", "mon 11:00-12:00"], 10 * 60 + 30)
@example(["0:00-24:00"], 0)
def test_nothing_changes_before_the_announced_minute_and_then_it_does(
    entries: list[str], minute: int
) -> None:
    hours: Schedule = parse_schedule(entries)
    now = MONDAY + timedelta(minutes=minute)
    change = hours.changes(now)
    if change is None:
        assert hours.spans == ((0, WEEK_MIN),)
        return
    assert timedelta(0) < change - now <= timedelta(days=7)
    assert hours.allows(change) != hours.allows(now)
    assert hours.allows(change - timedelta(minutes=1)) == hours.allows(now)


def test_outside_of_the_hours_the_end_is_told_by_day_and_clock() -> None:
    rules = WorkRules(schedule=("mon-fri 18:00-08:00",))
    hold = only(ask(rules, now=at(0, "12:00")))
    assert (hold.rule, hold.until) == (Rule.SCHEDULE, "18:00")
    assert only(ask(rules, now=at(5, "9:00"))).until == "Mon 18:00"
    assert not ask(rules, now=at(0, "18:00")).holds
    use(choose("de"))
    try:
        tuesday = weekday_words(at(1, "6:05"), NOON)
        assert (tuesday, translated(tuesday)) == ("Tue 06:05", "Di 06:05")
    finally:
        use(LanguageChoice())


# ------------------------------------------------------------------------------------ other rules


def test_by_default_only_battery_metered_connections_and_a_full_disk_pause() -> None:
    busy = MachineFacts(
        on_battery=False,
        unused_s=0,
        temperatures={"cuda:0": 99},
        programs=("steam",),
        disk_free_bytes=5 * GIB,
    )
    assert ask(WorkRules(), busy) == Decision()
    for facts, rule in (
        (MachineFacts(on_battery=True), Rule.BATTERY),
        (MachineFacts(metered=True), Rule.METERED),
        (MachineFacts(disk_free_bytes=GIB - 1), Rule.DISK),
    ):
        assert only(ask(WorkRules(), facts)).rule == rule


def test_every_pause_says_why_and_what_ends_it() -> None:
    rules = WorkRules(
        schedule=("sun",),
        in_use="pause",
        idle_minutes=3,
        programs=("OBS.exe",),
        temperature_max=80,
    )
    facts = MachineFacts(
        on_battery=True,
        battery_percent=41.6,
        unused_s=179,
        temperatures={"cuda:0": 81, "cuda:1": 60},
        programs=("bash", "obs"),
        metered=True,
        disk_free_bytes=GIB // 2,
    )
    said = {hold.rule: (hold.message, hold.until) for hold in ask(rules, facts).holds}
    assert said == {
        Rule.SCHEDULE: ("outside of your hours (sun)", "Sun 00:00"),
        Rule.IN_USE: (
            "this computer is in use",
            "keyboard and mouse rest for 3 min",
        ),
        Rule.BATTERY: ("on battery (42 %)", "it is plugged in"),
        Rule.PROGRAM: ("OBS.exe is running", "OBS.exe ends"),
        Rule.METERED: ("the network connection is metered", "the connection is not metered"),
        Rule.DISK: ("only 0.5 GiB of disk are free", "1 GiB are free"),
        Rule.TEMPERATURE: ("cuda:0 is at 81 °C, your limit is 80 °C", "it is below 75 °C"),
    }


@pytest.mark.parametrize(
    ("rules", "facts"),
    [
        (WorkRules(on_battery=True), MachineFacts(on_battery=True)),
        (WorkRules(in_use="pause"), MachineFacts(unused_s=300)),
        (WorkRules(in_use="work"), MachineFacts(unused_s=0)),
        (WorkRules(programs=("game",)), MachineFacts(programs=("gamepad",))),
        (WorkRules(metered="work"), MachineFacts(metered=True)),
        (WorkRules(disk_free_gb=0), MachineFacts(disk_free_bytes=0)),
        (WorkRules(temperature_max=80), MachineFacts(temperatures={"cuda:0": 80, "cuda:1": 20})),
    ],
)
def test_what_is_allowed_does_not_pause(rules: WorkRules, facts: MachineFacts) -> None:
    assert not ask(rules, facts).holds


def test_only_the_hot_device_rests_and_until_it_has_cooled_down() -> None:
    rules = WorkRules(temperature_max=80)
    first = ask(rules, MachineFacts(temperatures={"cuda:0": 84, "cuda:1": 70}))
    assert [hold.device for hold in first.holds] == ["cuda:0"]
    warm = MachineFacts(temperatures={"cuda:0": 78, "cuda:1": 78})
    second = ask(rules, warm, state=first.state)
    assert [hold.device for hold in second.holds] == ["cuda:0"]  # 78 °C is not yet cool
    cool = MachineFacts(temperatures={"cuda:0": 75, "cuda:1": 78})
    assert not ask(rules, cool, state=second.state).holds


def test_what_cannot_be_measured_holds_nothing_back_but_is_told() -> None:
    rules = WorkRules(in_use="pause", programs=("game",), temperature_max=80)
    decision = ask(rules, MachineFacts(temperatures={"cuda:1": 50}))
    assert not decision.holds
    assert len(decision.unknown) == 3
    assert "temperature of cuda:0 cannot be read" in decision.unknown[2]
    assert not ask(WorkRules()).unknown


# ------------------------------------------------------------------------------------- how hard


def test_gentle_halves_the_share_while_somebody_is_there() -> None:
    rules = WorkRules(in_use="gentle", idle_minutes=2, duty_percent=80)
    assert ask(rules, MachineFacts(unused_s=10)).shares == {"": 0.4}
    assert ask(rules, MachineFacts(unused_s=120)).shares == {"": 0.8}
    assert ask(rules, MachineFacts()).shares == {"": 0.8}
    own = msgspec.structs.replace(rules, device_duty={"cuda:0": 50})
    assert ask(own, MachineFacts(unused_s=10)).shares == {"": 0.4, "cuda:0": 0.25}


@given(st.floats(0, 60), st.floats(0.05, 1))
def test_resting_gives_the_share_that_was_asked_for(busy: float, share: float) -> None:
    rest = rest_after(busy, share)
    assert 0 <= rest <= 2
    if busy > 0.01 and rest < 2:
        assert busy / (busy + rest) == pytest.approx(share)


# ------------------------------------------------------------------------------------- going on


def test_going_on_lifts_a_pause_until_its_reason_has_passed() -> None:
    on, off = MachineFacts(on_battery=True), MachineFacts(on_battery=False)
    standing, kept = lift(ask(WorkRules(), on))
    assert not kept
    again = ask(WorkRules(), on, state=standing)
    assert not again.holds  # still on battery, but you said so
    plugged = ask(WorkRules(), off, state=again.state)
    assert ask(WorkRules(), on, state=plugged.state).holds  # unplugged anew: asks anew


def test_heat_and_a_full_disk_cannot_be_lifted() -> None:
    rules = WorkRules(temperature_max=70)
    facts = MachineFacts(temperatures={"cuda:0": 90, "cuda:1": 20}, disk_free_bytes=0, metered=True)
    standing, kept = lift(ask(rules, facts))
    assert {hold.rule for hold in kept} == {Rule.TEMPERATURE, Rule.DISK}
    after = ask(rules, facts, state=standing)
    assert {hold.rule for hold in after.holds} == {Rule.TEMPERATURE, Rule.DISK}


def test_lifting_one_reason_does_not_lift_another_that_comes_later() -> None:
    standing, _ = lift(ask(WorkRules(), MachineFacts(metered=True)))
    later = ask(WorkRules(), MachineFacts(metered=True, on_battery=True), state=standing)
    assert [hold.rule for hold in later.holds] == [Rule.BATTERY]
