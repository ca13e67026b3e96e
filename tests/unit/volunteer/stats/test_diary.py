"""The diary of an account: bounded, exact where the ledger is known, each mark told once."""

from __future__ import annotations

from datetime import date, timedelta

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.tui.scenes import ME, NOW
from volunteer.stats.diary import DAYS_MAX, Day, Diary, by_day, level, noted, ranks, weeks

DAY_S = 86_400.0
NEW = replace(ME, earned_micro=0, merged=0, device_s=0.0, rank=None)


def test_an_account_with_a_past_celebrates_nothing_and_then_each_mark_once() -> None:
    diary, passed = noted(Diary(), ME, NOW)
    assert passed == ()
    diary, passed = noted(diary, replace(ME, merged=49), NOW)
    assert passed == ()
    diary, passed = noted(diary, replace(ME, merged=50), NOW)
    assert [mark.sentence for mark in passed] == ["50 contributions merged"]
    diary, passed = noted(diary, replace(ME, merged=51), NOW)
    assert passed == ()
    diary, passed = noted(diary, replace(ME, merged=30), NOW)  # taken back by the organiser
    assert passed == ()
    _, passed = noted(diary, replace(ME, merged=60), NOW)
    assert passed == ()


def test_the_first_of_all_is_a_mark() -> None:
    diary, _ = noted(Diary(), NEW, NOW)
    _, passed = noted(diary, replace(NEW, merged=1), NOW)
    assert [mark.sentence for mark in passed] == ["your first contribution is merged"]


def test_a_day_is_what_the_account_grew_by() -> None:
    diary = Diary()
    for n, micro in enumerate((5, 9, 9, 40)):
        diary, _ = noted(diary, replace(ME, earned_micro=micro, rank=9 - n), NOW + n * DAY_S)
        diary, _ = noted(diary, replace(ME, earned_micro=micro, rank=9 - n), NOW + n * DAY_S + 1)
    first = date.fromisoformat(diary.days[0].day)
    days = [first + timedelta(days=n) for n in range(4)]
    assert by_day(diary, {}, None) == {days[1]: 4, days[2]: 0, days[3]: 31}
    assert by_day(diary, {days[3]: 30}, days[2]) == {days[1]: 4, days[3]: 30}
    assert ranks(diary) == tuple(zip(days, (9, 8, 7, 6), strict=True))


@given(st.lists(st.tuples(st.integers(0, 10**9), st.integers(-(10**6), 10**6)), max_size=30))
def test_any_clock_and_account_keep_it_bounded_and_in_order(
    seen: list[tuple[int, int]],
) -> None:
    diary = Diary()
    for at, micro in seen:
        diary, _ = noted(diary, replace(ME, earned_micro=micro), float(at))
    named = [day.day for day in diary.days]
    assert named == sorted(set(named))
    assert all(micro >= 0 for micro in by_day(diary, {}, None).values())


def test_it_forgets_the_oldest_days_and_survives_damaged_ones() -> None:
    long = Diary(days=tuple(Day(day=f"{n:04}-01-01", earned_micro=n) for n in range(1, 900)))
    diary, _ = noted(long, ME, NOW)
    assert len(diary.days) == DAYS_MAX
    odd = Diary(days=(Day(day="no day", earned_micro=1, rank=1), Day(day="x", earned_micro=2)))
    assert by_day(odd, {}, None) == {}
    assert ranks(odd) == ()


def test_a_week_begins_on_monday_and_the_days_to_come_are_empty() -> None:
    wednesday = date(2023, 11, 15)
    found = weeks({wednesday: 7, date(2023, 11, 6): 2}, wednesday, 2)
    assert found == [[2, 0, 0, 0, 0, 0, 0], [0, 0, 7, None, None, None, None]]


def test_the_best_day_is_full_and_a_little_work_is_seen() -> None:
    assert [level(n, (0, 1, 100)) for n in (0, 1, 100)] == [0, 1, 4]
    assert level(5, ()) == 0
