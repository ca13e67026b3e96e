"""Translations: complete, with the placeholders of the source, and safe where they are not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from string import Formatter

import pytest
from babel.messages.catalog import Message
from babel.messages.pofile import read_po

from tests.support.words import LANGUAGES, begun, extracted, updated, written
from volunteer.control.event_sentences import words
from volunteer.control.events import TaskEnded
from volunteer.i18n import catalogue
from volunteer.i18n.catalogue import (
    Catalogue,
    LanguageChoice,
    _,
    choose,
    languages,
    load,
    ngettext,
    number,
    pgettext,
    use,
)
from volunteer.i18n.formats import (
    credit,
    ordinal,
    size,
)

TEMPLATE = extracted()
SHIPPED = [name for name in languages() if name != "en"]


@pytest.fixture(autouse=True)
def _english_again() -> Iterator[None]:
    yield
    use(LanguageChoice())


def forms(message: Message) -> tuple[str, ...]:
    found = message.string
    return tuple(map(str, found)) if isinstance(found, tuple | list) else (str(found or ""),)


def sources(message: Message) -> tuple[str, ...]:
    return (message.id,) if isinstance(message.id, str) else tuple(map(str, message.id))


def placeholders(text: str) -> set[str]:
    """Return the names of the placeholders; a conversion, a format or an attribute is none."""
    found = set()
    for _text, name, form, conversion in Formatter().parse(text):
        if name is not None:
            assert name.isidentifier(), f'"{{{name}}}" in "{text}" is no name'
            assert not form, f'"{text}" has a format'
            assert not conversion, f'"{text}" has a conversion'
            found.add(name)
    return found


def test_two_languages_are_shipped_beside_english_with_their_names() -> None:
    assert {"de", "es"} <= set(SHIPPED)
    assert set(catalogue.NAMES) == set(languages())


@pytest.mark.parametrize("language", SHIPPED)
def test_every_message_of_the_code_is_translated_and_no_other(language: str) -> None:
    with (LANGUAGES / f"{language}.po").open("rb") as file:
        known = read_po(file, locale=language)
    translated = {(m.context or "", sources(m)[0]) for m in known if m.id and all(forms(m))}
    wanted = {(m.context or "", sources(m)[0]) for m in TEMPLATE if m.id}
    assert wanted - translated == set(), "run `make words` and translate these"
    assert translated - wanted == set(), "run `make words`: these are gone from the code"
    assert [m.id for m in known if m.fuzzy and m.id] == []
    assert len(load(language).messages) == len(wanted)


@pytest.mark.parametrize("language", SHIPPED)
def test_a_translation_has_the_placeholders_of_its_source(language: str) -> None:
    with (LANGUAGES / f"{language}.po").open("rb") as file:
        known = read_po(file, locale=language)
    for message in known:
        if not message.id:
            continue
        source = sources(message)
        wanted = set().union(*map(placeholders, source))
        for form in forms(message):
            got = placeholders(form)
            free = {"n"} if len(source) > 1 else set()  # "one task" needs no number
            assert wanted - free <= got <= wanted, f"{source[0]!r} -> {form!r}"


def test_messages_begin_and_end_with_a_letter_not_with_a_space() -> None:
    found = [text for message in TEMPLATE if message.id for text in sources(message)]
    assert [text for text in found if text != text.strip()] == []


def test_the_files_are_as_make_words_writes_them() -> None:
    for language in SHIPPED:
        file = LANGUAGES / f"{language}.po"
        assert file.read_bytes() == written(updated(file, TEMPLATE)), "run `make words`"
    assert b'"Language: fr' in written(begun("fr"))


@pytest.mark.parametrize(
    ("environ", "language", "locale"),
    [
        ({}, "en", "en"),
        ({"LANG": "de_CH.UTF-8"}, "de", "de_CH"),
        ({"LANG": "de_DE.UTF-8", "LC_MESSAGES": "es_ES@euro"}, "es", "es_ES"),
        ({"LANG": "de_DE", "LC_ALL": "C"}, "en", "en"),
        ({"LC_ALL": "", "LANG": "es"}, "es", "es"),
        ({"LANG": "tlh_KL"}, "en", "en"),
        ({"LANG": "de_../../etc"}, "de", "de"),
        ({"LANG": "\x1b[2J"}, "en", "en"),
    ],
)
def test_auto_follows_the_environment(environ: dict[str, str], language: str, locale: str) -> None:
    assert choose("auto", environ) == LanguageChoice(language=language, locale=locale)


def test_a_language_that_is_missing_gets_a_sentence_and_english() -> None:
    found = choose("klingon\x1b[2J")
    assert found.language == "en"
    assert found.problem == (
        'there is no language "klingon\\x1b[2J": English is used; known: auto, en, de, es'
    )
    assert choose("../../../etc/passwd").language == "en"
    use(found)
    assert _("waiting") == "waiting"


def test_words_numbers_and_dates_are_those_of_the_language() -> None:
    told = {}
    for language in ("en", "de", "es"):
        use(choose(language))
        told[language] = (
            number(1234.5, ",.1f"),
            credit(1_240_500_000),
            size(1_230_000),
            ordinal(3),
            ngettext("{n} task", "{n} tasks", 1),
            ngettext("{n} task", "{n} tasks", 2000),
            pgettext("version", "next"),
        )
    assert told == {
        "en": (
            *("1,234.5", "1,240.50", "1.23 MB", "3rd"),
            *("1 task", "2,000 tasks", "next"),
        ),
        "de": (
            *("1.234,5", "1.240,50", "1,23 MB", "3."),
            *("1 Aufgabe", "2.000 Aufgaben", "nächste"),
        ),
        "es": (
            *("1234,5", "1240,50", "1,23 MB", "3.º"),
            *("1 tarea", "2000 tareas", "próxima"),
        ),
    }


@pytest.mark.parametrize("language", SHIPPED)
def test_how_a_task_ends_is_said_in_the_language(language: str) -> None:
    use(choose(language))
    for how in ("released", "cancelled", "gone", "failed", "saved", "refused"):
        said = words(TaskEnded(task=1, how=how, message=""))
        assert said is not None
        assert how not in said


def test_a_country_has_its_own_numbers_and_an_impossible_one_those_of_the_language() -> None:
    use(choose("de_CH"))
    assert number(1234.5, ",.1f") == "1’234.5"
    use(choose("de_XX"))
    assert number(1234.5, ",.1f") == "1.234,5"


def test_a_language_that_no_table_knows_has_the_numbers_of_english(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(catalogue, "_current", Catalogue(language="xx", locale="xx"))
    assert number(1234.5, ",.1f") == "1,234.5"


@pytest.mark.parametrize(
    ("locale", "thousands", "ten_thousands", "millions"),
    [
        ("es", "+1234,50", "12.345,50", "1.234.567"),
        ("es_ES", "+1234,50", "12.345,50", "1.234.567"),
        ("es_MX", "+1,234.50", "12,345.50", "1,234,567"),
        ("es_AR", "+1.234,50", "12.345,50", "1.234.567"),
        ("de_DE", "+1.234,50", "12.345,50", "1.234.567"),
    ],
)
def test_four_digits_are_one_group_where_the_country_writes_them_so(
    locale: str, thousands: str, ten_thousands: str, millions: str
) -> None:
    use(choose("auto", {"LANG": locale}))
    told = number(1234.5, "+,.2f"), number(12345.5, ",.2f"), number(1_234_567, ",")
    assert told == (thousands, ten_thousands, millions)


@pytest.mark.parametrize("language", SHIPPED)
def test_files_are_read_as_gettexts_tools_read_them(language: str) -> None:
    with (LANGUAGES / f"{language}.po").open("rb") as file:
        known = read_po(file, locale=language)
    wanted = {(m.context or "", sources(m)[0]): forms(m) for m in known if m.id}
    read = load(language)
    assert read.messages == wanted
    assert [read.form(n) for n in (0, 1, 2, 21)] == [1, 0, 1, 1]


def test_what_an_editor_leaves_in_a_file_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "xx.po").write_bytes(EDITED.encode())
    monkeypatch.setattr(catalogue, "FOLDER", tmp_path)
    read = catalogue.load.__wrapped__("xx")
    assert read.messages == {
        ("", 'a "quoted" one\n\\n'): ("uno\t",),
        ("here", "{n} of them"): ("a", "b", "c"),
    }
    assert [read.form(n) for n in (1, 2, 5)] == [0, 1, 2]


EDITED = r"""# Somebody's.
msgid ""
msgstr ""
"Language: xx\n"
"Plural-Forms: nplurals=3; plural=(n==1 ? 0 : n==2 ? 1 : 2);\n"

#: a.py
msgid ""
"a \"quoted\" "
"one\n\\n"
msgstr "uno\t"

#, fuzzy, python-brace-format
msgid "a guess"
msgstr "adivinado"

msgid "not yet"
msgstr ""

#~ msgid "gone"
#~ msgstr "ido"

msgctxt "here"
msgid "{n} of them"
msgid_plural "{n} of them all"
msgstr[0] "a"
msgstr[1] "b"
msgstr[2] "c"
"""


@pytest.mark.parametrize("bad", ["{nobody}", "{n.__class__}", "{", "{0}", "{n!x}", "{n:q}"])
def test_a_translation_with_a_wrong_placeholder_is_passed_over(
    bad: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = Catalogue(language="de", locale="de", messages={("", "{n} of them"): (bad,)})
    monkeypatch.setattr(catalogue, "_current", broken)
    assert _("{n} of them", n=3) == "3 of them"


def test_what_the_other_side_wrote_is_never_a_format() -> None:
    assert _("task {number}", number="{number.__class__}") == "task {number.__class__}"
    assert _("{not_a_placeholder}") == "{not_a_placeholder}"
