"""Nearest known name for an unknown word, as a guess at a typing error."""

from __future__ import annotations

from collections.abc import Iterable

from shared.sentences import Sentence
from shared.text import SHOWN_CHARS_MAX

ALIKE = 0.7  # least share of letters in common, in the same order, of two similar names
SLIP_LETTERS = 2  # largest difference in length of two similar names
BEGUN_LETTERS = 3  # shortest beginning of a name that is completed


def nearest(word: object, known: Iterable[str]) -> str:
    """Return the known name that a word nearly spells, or begins; "" without one."""
    # imported late, since it takes 9 ms and only errors need it
    from difflib import get_close_matches

    meant = str(word)[:SHOWN_CHARS_MAX].lower()
    names = {name.lower(): name for name in known}
    alike = [name for name in names if abs(len(name) - len(meant)) <= SLIP_LETTERS]
    found = get_close_matches(meant, alike, n=1, cutoff=ALIKE)
    if not found:
        found = [name for name in names if sorted(name) == sorted(meant)]  # letters swapped
    if not found and len(meant) >= BEGUN_LETTERS:
        found = [name for name in names if name.startswith(meant)]
    return names[found[0]] if found else ""


def hint(word: object, known: Iterable[str]) -> Sentence:
    """Return the nearest known name as a question, or all names."""
    names = list(known)
    if near := nearest(word, names):
        return Sentence('did you mean "{name}"?', name=near)
    return Sentence("known: {names}", names=", ".join(names) or Sentence("none"))
