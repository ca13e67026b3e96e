"""Nearest known name for an unknown word, as a guess at a typing error."""

from __future__ import annotations

from collections.abc import Iterable

from shared.sentences import Sentence
from shared.text import SHOWN_CHARS_MAX

SIMILARITY_MIN = 0.7  # similar names share at least this part of their letters, in order
LENGTH_DIFFERENCE_MAX = 2  # similar names differ in length by this many letters at most
LISTED_MAX = 16  # most names that a hint lists in full
NEAREST_LISTED = 4  # names that a hint lists when there are more than LISTED_MAX
PREFIX_LETTERS_MIN = 3  # shortest beginning of a name that is completed


def nearest(word: object, choices: Iterable[str]) -> str:
    """Return the known name that a word nearly spells or begins; "" if no name is near."""
    # imported late, since it takes 9 ms and only errors need it
    from difflib import get_close_matches

    meant = str(word)[:SHOWN_CHARS_MAX].lower()
    names = {name.lower(): name for name in choices}
    similar = [name for name in names if abs(len(name) - len(meant)) <= LENGTH_DIFFERENCE_MAX]
    names_near = get_close_matches(meant, similar, n=1, cutoff=SIMILARITY_MIN)
    if not names_near:
        names_near = [name for name in names if sorted(name) == sorted(meant)]  # letters swapped
    if not names_near and len(meant) >= PREFIX_LETTERS_MIN:
        names_near = [name for name in names if name.startswith(meant)]
    return names[names_near[0]] if names_near else ""


def hint(word: object, choices: Iterable[str]) -> Sentence:
    """Return a question with the nearest known name. If no name is near, return the list of all
    names, or of the NEAREST_LISTED nearest if there are more than LISTED_MAX.
    """
    names = list(choices)
    if near := nearest(word, names):
        return Sentence('did you mean "{name}"?', name=near)
    if len(names) > LISTED_MAX:
        from difflib import get_close_matches

        text = str(word)[:SHOWN_CHARS_MAX].lower()
        close = get_close_matches(text, names, NEAREST_LISTED, cutoff=0.0)
        return Sentence("the nearest of {count}: {names}", count=len(names), names=", ".join(close))
    return Sentence("known: {names}", names=", ".join(names) or Sentence("none"))
