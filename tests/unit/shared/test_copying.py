"""Structs made of others."""

from __future__ import annotations

import msgspec
import pytest

from shared.copying import copying


class _Told(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    size: int
    note: str = ""


class _Row(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    size: int
    hidden: str = "never copied"


def test_fields_of_one_name_are_copied_and_those_that_the_call_names_are_not() -> None:
    row = _Row(name="a", size=1)
    assert copying(_Told, row)() == _Told(name="a", size=1)
    assert copying(_Told, row)(size=2, note="b") == _Told(name="a", size=2, note="b")


def test_the_first_source_that_has_a_field_gives_it() -> None:
    assert copying(_Told, {"size": 3}, _Row(name="a", size=1))() == _Told(name="a", size=3)


def test_a_field_that_nobody_gives_is_missing() -> None:
    with pytest.raises(TypeError, match="name"):
        copying(_Told, {"size": 3})()
