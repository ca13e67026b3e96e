"""A language of Greek letters: in it every word that is not looked up in the catalogue is seen."""

from __future__ import annotations

import re
from functools import cache

from tests.support.words import extracted
from volunteer.i18n.catalogue import Catalogue

LETTERS = str.maketrans(
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ",
    "αβψδεφγηιξκλμνοπϑρστθωςχυζΑΒΨΔΕΦΓΗΙΞΚΛΜΝΟΠΘΡΣΤΥΩϚΧΫΖ",
)
_KEPT = re.compile(r"\{[^}]*\}|`[^`]*`|'<link>'")  # values, commands
ENGLISH = re.compile(r"(?<![\w.=/`-])[A-Za-z]{2,}(?:[ ,:;]+[A-Za-z]{2,})+")


def greek(message: str) -> str:
    """Return a message with its words, but not its values, in Greek letters."""
    done, parts = 0, []
    for kept in _KEPT.finditer(message):
        parts += [message[done : kept.start()].translate(LETTERS), kept[0]]
        done = kept.end()
    return "".join((*parts, message[done:].translate(LETTERS)))


@cache
def pseudo() -> Catalogue:
    """Return a language in which every message of the program is told from English."""
    messages = {}
    for message in extracted():
        if message.id:
            texts = [message.id] if isinstance(message.id, str) else list(message.id)
            messages[str(message.context or ""), texts[0]] = tuple(map(greek, texts))
    return Catalogue(language="xx", locale="de", messages=messages)


def in_english(text: str, others: re.Pattern[str]) -> set[str]:
    """Return the English words of a text, foreign text left out."""
    lines = (others.sub("", line) for line in text.splitlines())
    return {found[0] for line in lines for found in ENGLISH.finditer(line)}
