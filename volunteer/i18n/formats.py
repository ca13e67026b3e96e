"""Numbers as the language in use writes them, rounded beforehand, so that a number has as many
digits in every language.
"""

from __future__ import annotations

from shared import text as plain
from volunteer.i18n.catalogue import ENGLISH, N_, current, localized, number, pgettext

DAYS = (N_("Mon"), N_("Tue"), N_("Wed"), N_("Thu"), N_("Fri"), N_("Sat"), N_("Sun"))
_ENDINGS = {1: "st", 2: "nd", 3: "rd"}


def credit(micro: int, digits: int = 2) -> str:
    """Return micro-credits as credits."""
    return localized(plain.credit(micro, digits))


def exact_credit(micro: int) -> str:
    """Return micro-credits as credits, with two digits or as many as it takes."""
    return localized(plain.exact_credit(micro))


def size(count: float) -> str:
    """Return bytes in powers of ten: 512 B, 1.23 MB."""
    return localized(plain.size(count))


def duration_words(seconds: float) -> str:
    """Return a short time: 2.1 ms, 0.35 s, 12 s, 3.4 min."""
    if seconds < 0.0995:
        return f"{number(seconds * 1000, '.2g')} ms"
    if seconds < 9.95:
        return f"{number(seconds, '.2g')} s"
    return f"{seconds:.0f} s" if seconds < 120 else f"{number(seconds / 60, '.2g')} min"


def ordinal(place: int) -> str:
    """Return an ordinal number: 1st, 2nd, 3rd, 4th, 11th."""
    if current().language != ENGLISH:
        return pgettext("ordinal number, for example of a rank", "{n}th", n=number(place, ","))
    ending = "th" if place % 100 in (11, 12, 13) else _ENDINGS.get(place % 10, "th")
    return f"{place:,}{ending}"
