"""Catalogue of messages: every sentence of the program in the language of its owner.

The message in English is its own key. Values are put in by name after the lookup, so a message is
translated as a whole, and text from the coordinator is never searched for placeholders.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from gettext import c2py
from pathlib import Path
from string import Formatter

import msgspec
from typing_extensions import override

from shared.sentences import FIGURE, Sentence
from shared.text import escaped

AUTO, ENGLISH = "auto", "en"
FOLDER = Path(__file__).parent
BROKEN = (KeyError, IndexError, ValueError, AttributeError)  # errors of a wrong placeholder
# Name of each language in that language, for a list to choose from.
NAMES = {"en": "English", "de": "Deutsch", "es": "Español"}

Key = tuple[str, str]  # context, message


class Catalogue(msgspec.Struct, frozen=True, kw_only=True):
    """Translations of one language, each message with all its plural forms."""

    language: str = ENGLISH
    locale: str = ENGLISH  # for numbers and dates: the language, perhaps with a country
    messages: Mapping[Key, tuple[str, ...]] = msgspec.field(default_factory=dict)
    form: Callable[[int], int] = lambda n: int(n != 1)  # which plural form a number takes


class LanguageChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Language chosen by setting and environment, and the problem with the choice."""

    language: str = ENGLISH
    locale: str = ENGLISH
    problem: str = ""


class _NamesOnly(Formatter):
    """Formatter that fills in values by name only: a translation cannot reach their attributes."""

    @override
    def get_field(self, field_name: str, args: object, kwargs: Mapping[str, object]) -> object:
        return kwargs[field_name], field_name


_NAMES_ONLY = _NamesOnly()
_current = Catalogue()


def current() -> Catalogue:
    """Return the catalogue in use."""
    return _current


def languages() -> tuple[str, ...]:
    """Return the languages that the program speaks, English first."""
    return (ENGLISH, *sorted(file.stem for file in FOLDER.glob("*.po")))


def choose(setting: str, environ: Mapping[str, str] | None = None) -> LanguageChoice:
    """Return the language of a setting; `auto` follows the environment as other programs do.

    The choice is English if there is no translation, with a problem if `setting` names a language.
    """
    environ = os.environ if environ is None else environ
    if setting != AUTO:
        choice = _choice_of(setting)
        names = ", ".join((AUTO, *languages()))
        problem = f'there is no language "{escaped(setting, 20)}": English is used; known: {names}'
        return choice or LanguageChoice(problem=problem)
    named = (environ.get(name, "") for name in ("LC_ALL", "LC_MESSAGES", "LANG"))
    return _choice_of(next(filter(None, named), "")) or LanguageChoice()


def _choice_of(locale: str) -> LanguageChoice | None:
    """Return the choice for a locale's name, such as `de_CH.UTF-8`; None without a translation."""
    name = locale.partition(".")[0].partition("@")[0].replace("-", "_")
    language, _, country = name.partition("_")
    language = language.lower()
    if language not in languages():
        return None
    has_country = len(country) == 2 and country.isascii() and country.isalpha()
    return LanguageChoice(
        language=language, locale=f"{language}_{country.upper()}" if has_country else language
    )


def use(choice: LanguageChoice) -> None:
    """Switch to a language."""
    global _current
    if choice.language == ENGLISH:
        _current = Catalogue()
    else:
        read = load(choice.language)
        _current = msgspec.structs.replace(read, locale=choice.locale)


@cache
def load(language: str) -> Catalogue:
    """Read the translations of a language."""
    messages: dict[Key, tuple[str, ...]] = {}
    plural = "n != 1"
    for entry in _entries((FOLDER / f"{language}.po").read_text(encoding="utf-8")):
        english = entry.pop("msgid", "")
        context = entry.pop("msgctxt", "")
        entry.pop("msgid_plural", None)
        forms = tuple(entry.values())
        if not english and forms:
            head = forms[0].partition("plural=")[2].partition("\n")[0]
            plural = head.strip("; ") or plural
        elif forms and all(forms):
            messages[context, english] = forms
    return Catalogue(language=language, locale=language, messages=messages, form=c2py(plural))


def _entries(text: str) -> Iterator[dict[str, str]]:
    """Yield the fields of each message of a file that is not fuzzy, and of the header, whose msgid
    is "". Babel's reader would take ten times as long, before the first screen.
    """
    for block in text.split("\n\n"):
        entry: dict[str, str] = {}
        field = ""
        for line in block.split("\n"):
            if line.startswith("#"):
                if line.startswith("#,") and "fuzzy" in line:
                    break
                continue
            word, _quote, rest = line.partition('"')
            field = word.strip() or field
            part = rest.rstrip().removesuffix('"')
            if "\\" in part:
                part = _ESCAPE.sub(lambda match: _ESCAPES.get(match[1], match[1]), part)
            entry[field] = entry.get(field, "") + part
        else:
            entry.pop("", None)  # from empty lines before the first field
            yield entry


_ESCAPE = re.compile(r"\\(.)")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}


def N_(message: str) -> str:  # noqa: N802 (the name that gettext and its tools know)
    """Mark a message for the catalogue; it is looked up where it is shown."""
    return message


def NP_(context: str, message: str) -> str:  # noqa: N802
    """Mark a message whose English words have another meaning elsewhere."""
    return message


def _(message: str, /, **values: object) -> str:
    """Return a message in the language in use, with its values."""
    if isinstance(message, Sentence):
        return translated(message)
    forms = _current.messages.get(("", message))
    return _fill(forms[0] if forms else message, message, values)


def pgettext(context: str, message: str, /, **values: object) -> str:
    """Translate a message whose English words have another meaning elsewhere."""
    forms = _current.messages.get((context, message))
    return _fill(forms[0] if forms else message, message, values)


def ngettext(one: str, many: str, count: int, /, **values: object) -> str:
    """Return a message in its plural form for `count`, which replaces `{n}`."""
    english = one if count == 1 else many
    forms = _current.messages.get(("", one))
    at = _current.form(abs(count)) if forms else 0
    form = forms[at] if forms and at < len(forms) else english
    return _fill(form, english, {"n": number(count, ","), **values})


def translated(text: str) -> str:
    """Return a `Sentence` in the language in use; other texts unchanged."""
    if not (isinstance(text, Sentence) and text.message) or _current.language == ENGLISH:
        return str(text)
    if text.message == FIGURE:
        return localized(str(text))
    forms = _current.messages.get(("", text.message))
    if not forms:
        return str(text)
    values, at = dict(text.values), 0
    if text.many and isinstance(count := values.get("n"), int):
        at, values["n"] = _current.form(abs(count)), number(count, ",")
    try:
        return _format(forms[min(at, len(forms) - 1)], values)
    except BROKEN:
        return str(text)


def localized(text: str) -> str:
    """Return a number that was written in English with the signs of the language in use."""
    locale = _current.locale
    if locale == ENGLISH:
        return text
    signs = _signs(locale)
    if signs.whole_thousands and "," in text:
        text = _THOUSANDS.sub(r"\1\2", text)
    return text.translate(signs.table)


_THOUSANDS = re.compile(r"(?<![\d,])(\d),(\d{3})(?![\d,])")


class _Signs(msgspec.Struct, frozen=True, kw_only=True):
    """Signs of a locale in numbers."""

    table: Mapping[int, str]
    whole_thousands: bool  # four digits are not grouped


@cache
def _signs(locale: str) -> _Signs:
    from babel.core import UnknownLocaleError, get_global
    from babel.numbers import get_decimal_symbol, get_group_symbol

    try:
        point, comma = get_decimal_symbol(locale), get_group_symbol(locale)
    except UnknownLocaleError:  # an unknown language, or one not spoken in that country
        language = locale.partition("_")[0]
        return _signs(language if language != locale else ENGLISH)
    # CLDR's minimumGroupingDigits, which Babel leaves out: 2 in Spain, 1 in America.
    american = get_global("parent_exceptions").get(locale) == "es_419"
    whole = locale.partition("_")[0] in _WHOLE_THOUSANDS and not american
    return _Signs(table={ord("."): point, ord(","): comma}, whole_thousands=whole)


_WHOLE_THOUSANDS = {"es"}


def number(value: float, form: str = "") -> str:
    """Return a number in one of Python's formats, with the signs of the language in use."""
    return localized(format(value, form))


def _fill(text: str, english: str, values: Mapping[str, object]) -> str:
    """Fill values in; a translation that cannot take them is ignored."""
    if not values:
        return text
    if text is english:
        return english.format_map(values)
    try:
        return _format(text, values)
    except BROKEN:
        return english.format_map(values)


def _format(text: str, values: Mapping[str, object]) -> str:
    translations = {n: translated(v) if isinstance(v, Sentence) else v for n, v in values.items()}
    return _NAMES_ONLY.vformat(text, (), translations)
