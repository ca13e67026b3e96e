"""The end of a pause, as its owner writes it."""

from __future__ import annotations

import time
from datetime import datetime

import pytest

from shared.errors import BadRequest
from volunteer.settings.schedule import end_of_pause, moment_words

NOW = datetime.fromisoformat("2026-11-27T21:30:15")  # on the wall


@pytest.mark.parametrize(
    ("length", "until", "words"),
    [
        ("45m", "", "22:15"),
        ("2h", "", "23:30"),
        ("1H30m", "", "23:00"),
        ("1d", "", "tomorrow 21:30"),
        ("3d", "", "2026-11-30 21:30"),
        ("", "22:00", "22:00"),
        ("", "7:05", "tomorrow 07:05"),
        ("", "21:30", "tomorrow 21:30"),  # it is over
    ],
)
def test_a_length_or_a_time_of_the_day(length: str, until: str, words: str) -> None:
    end = end_of_pause(length, until, NOW)
    assert end is not None
    assert moment_words(end, NOW) == words


@pytest.mark.parametrize("asked", ["2026-10-24T23:00", "2027-03-28T00:30"])
def test_a_night_in_which_the_clocks_change_ends_at_the_time_on_the_wall(
    monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        end = end_of_pause("", "07:00", datetime.fromisoformat(asked).astimezone())
        assert end is not None
        assert time.strftime("%H:%M", time.localtime(end.timestamp())) == "07:00"
    finally:
        monkeypatch.undo()
        time.tzset()


def test_without_either_there_is_no_end() -> None:
    assert end_of_pause("", "", NOW) is None


@pytest.mark.parametrize(
    ("length", "until", "said"),
    [
        ("2h", "22:00", "not both"),
        ("soon", "", "write it like 45m"),
        ("0m", "", "write it like 45m"),
        ("-2h", "", "write it like 45m"),
        ("31d", "", "write it like 45m"),
        (" ", "", "write it like 45m"),
        ("٣h", "", "write it like 45m"),
        ("", "24:00", "write it like 22:00"),
        ("", "9", "write it like 22:00"),
        ("", "22:00\x1b[31m", "write it like 22:00"),
    ],
)
def test_anything_else_gets_a_sentence(length: str, until: str, said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        end_of_pause(length, until, NOW)
