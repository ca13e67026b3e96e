"""Nicknames: what is refused, with which sentence, and which names count as the same."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.rules.nicknames import (
    SKELETON_MAX,
    alternatives,
    normal,
    pseudonym,
    skeleton,
    suggestion,
)
from coordinator.rules.reports import line
from shared.errors import InvalidName
from shared.protocol.limits import NICKNAME_MAX, NICKNAME_MIN

# Hangul fillers, the grapheme joiner, variation selectors, Khmer and Mongolian signs
UNDRAWN = "\u3164\u1160\u115f\uffa0\u034f\ufe00\ufe0f\U000e0100\u17b4\u180b"


@pytest.mark.parametrize(
    ("raw", "stored"),
    [
        ("  Mia  Meyer ", "Mia Meyer"),
        ("ＭＩＡ", "MIA"),  # full width
        ("𝕄𝕚𝕒", "Mia"),  # mathematical
        ("Mia\u00a0Meyer", "Mia Meyer"),
        ("Zoe\u0308", "Zoë"),
        ("O'Neil", "O'Neil"),
        ("李小龙", "李小龙"),
        ("हिन्दी", "हिन्दी"),
        ("Ирина", "Ирина"),
        ("7of9", "7of9"),
        ("Mia 美", "Mia 美"),
    ],
)
def test_a_name_is_stored_normalised(raw: str, stored: str) -> None:
    assert normal(raw) == stored


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        ("", "2 to 24 characters"),
        ("x", "this one has 1"),
        ("x" * 25, "this one has 25"),
        ("x" * 1_000_000, "at most 24"),
        ("mia\x00", "control"),
        ("mia\nadmin", "control"),
        ("mia\x1b[31m", "control"),
        ("mi\u200ba", "invisible"),
        ("mia\u202etxt", "invisible"),  # turns the reading direction round
        ("ab\ud800", "invisible"),
        *((f"ada{char}", "invisible") for char in UNDRAWN),
        *((f"{char}ada", "invisible") for char in UNDRAWN),
        ("\u115f\u115f\u115f", "invisible"),
        ("\uffa0\uffa0", "invisible"),
        ("[bold]mia", "but not '['"),
        ("=cmd", "but not '='"),  # a formula, in a spreadsheet
        ("-mia", "begins with"),
        ("a---b", "in a row"),
        ("z\u0351\u036b\u0343\u036a\u0302", "accents"),
        ("Аnna", "mixes Cyrillic and Latin"),
        ("Adm1n", "reserved"),
        ("forgotten-3f2a", "reserved"),
        ("SYSTEM", "reserved"),
        ("ٓ..", "begins with"),
        ("miaס", "mixes Hebrew and Latin"),
        ("〇oo", "but not '〇'"),
    ],
)
def test_what_cannot_be_a_name_is_refused_with_the_reason(raw: str, sentence: str) -> None:
    with pytest.raises(InvalidName, match=sentence.replace("[", r"\[")):
        normal(raw)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("mia", "MIA"),
        ("mia", "m-i.a"),
        ("mia", "mía"),
        ("anna1", "annaI"),
        ("anna1", "annal"),
        ("Bob", "B0b"),
        ("barn", "bam"),
        ("vvilma", "wilma"),
        ("coco", "сосо"),  # all Cyrillic
        ("paypal", "раураӏ"),
        ("TOM", "ТОМ"),
        ("KATE", "ΚΑΤΕ"),  # all Greek
        ("strasse", "straße"),
        ("anna 10", "anna १०"),  # Devanagari digits
        ("okina", "oʻkina"),
    ],
)
def test_lookalikes_collide(one: str, other: str) -> None:
    assert skeleton(normal(one)) == skeleton(normal(other))


@pytest.mark.parametrize(
    ("one", "other"), [("mia", "mio"), ("anna 2", "anna 3"), ("李小龙", "李小虎"), ("कि", "की")]
)
def test_different_names_do_not_collide(one: str, other: str) -> None:
    assert skeleton(normal(one)) != skeleton(normal(other))


def test_a_taken_name_gets_the_nearest_free_one() -> None:
    taken = {skeleton("mia"), skeleton("mia 2")}
    assert suggestion("mia", taken.__contains__) == "mia 3"


@given(st.text(min_size=1, max_size=30))
def test_what_is_accepted_is_printable_and_stable(raw: str) -> None:
    try:
        name = normal(raw)
    except InvalidName:
        return
    assert NICKNAME_MIN <= len(name) <= NICKNAME_MAX
    assert normal(name) == name
    assert all(unicodedata.category(c)[0] != "C" for c in name)
    key = skeleton(name)
    assert 0 < len(key) <= SKELETON_MAX
    assert skeleton(key) == key
    assert skeleton(name.upper()) == skeleton(name.lower()) == key


@given(st.text(alphabet=st.characters(categories=["L", "Nd"]), min_size=2, max_size=24))
def test_every_acceptable_name_has_an_acceptable_alternative(raw: str) -> None:
    try:
        name = normal(raw)
    except InvalidName:
        return
    other = suggestion(name, {skeleton(name)}.__contains__)
    assert normal(other) == other
    assert skeleton(other) != skeleton(name)


def test_a_pseudonym_cannot_be_registered() -> None:
    with pytest.raises(InvalidName, match="reserved"):
        normal(pseudonym("3f2a"))


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("mia", "mia 2"),
        ("x" * 24, "x" * 20 + " 2"),
        ("x" * 19 + " - . y", "x" * 19 + " 2"),
        ("-_.' mia -_.'", "-_.' mia 2"),
    ],
)
def test_the_nearest_name_has_room_for_its_number(name: str, other: str) -> None:
    assert suggestion(name, lambda key: False) == other
    assert next(iter(alternatives(name))) == other


def test_after_a_thousand_names_another_one_is_asked_for() -> None:
    assert list(alternatives("mia"))[-1] == "mia 999"
    with pytest.raises(InvalidName) as error:
        suggestion("mia", lambda key: True)
    assert error.value.message == (
        '"mia" and every similar name are taken: choose a different nickname'
    )


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("Mia Meyer", "mlameyer"),
        ("O'Neil_7.1-x", "onell7lx"),
        ("æœøđłħß", "aeoeodlhss"),
        ("l1Iı|", "lllll"),
        ("٣٤", "34"),
        ("rnvv", "mw"),
        ("ʰa", "ha"),
    ],
)
def test_a_skeleton_is_what_a_skimming_eye_keeps(name: str, key: str) -> None:
    assert skeleton(name) == key


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        ("x" * 257, "a nickname has at most 24 characters"),
        ("x" * 256, "a nickname has 2 to 24 characters; this one has 256"),
        ("a" * 25, "a nickname has 2 to 24 characters; this one has 25"),
        ("mia\u2028x", "a nickname may not hold invisible or control characters (U+2028)"),
        ("mi\x01a", "a nickname may not hold invisible or control characters (U+0001)"),
        ("mi@a", "a nickname may hold letters, digits, blanks and - _ . ' but not '@'"),
        (".mia", "a nickname begins with a letter or a digit"),
        ("a-_.b", "a nickname may not hold three of blank - _ . ' in a row"),
        ("Root", '"Root" is reserved: choose another nickname'),
        ("Аnna", "a nickname keeps to one script, but this one mixes Cyrillic and Latin"),
    ],
)
def test_what_is_refused_reads_what_to_change(raw: str, sentence: str) -> None:
    with pytest.raises(InvalidName) as error:
        normal(raw)
    assert error.value.message == sentence


@pytest.mark.parametrize("name", ["ab", "ấa", "a" * 24, "a-.b", "a__b", "ẍa", "rooty", "mia root"])
def test_what_lies_on_a_bound_is_a_name(name: str) -> None:
    assert normal(name) == name


@pytest.mark.parametrize("char", UNDRAWN)
def test_a_name_with_an_undrawn_character_is_the_name_without(char: str) -> None:
    assert skeleton(f"ada{char}") == skeleton("ada")
    assert line(f"my{char} laptop") == "my laptop"
