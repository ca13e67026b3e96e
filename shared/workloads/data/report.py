"""Report on a dataset of texts: how long they are, and in which languages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

SAMPLED = 500  # texts whose language is looked at: the first ones
SAMPLED_CHARS = 2000  # of each
_NAMED = 5  # languages
_LETTERS_MIN = 20  # of a text whose language can be told
_LETTERS_SHARE = 0.5  # of its characters: less is numbers, or code

Meta = dict[str, str | int | float]


def lengths(sizes: Sequence[int], unit: str) -> Meta:
    """Return median, 95th percentile and maximum of lengths, as a description's keys."""
    if not sizes:
        return {}
    middle, long = np.percentile(sizes, (50, 95))
    return {
        "length_unit": unit,
        "length_median": round(float(middle)),
        "length_95": round(float(long)),
        "length_longest": max(sizes),
    }


def told_languages(texts: Sequence[str]) -> Meta:
    """Return the languages of some texts with their shares ("en 93 %, de 7 %"), with the library
    py3langid and text enough; otherwise an empty list.
    """
    try:
        from py3langid import langid
    except ImportError:
        return {}
    long = [text for text in texts if _is_prose(text)]
    counts = Counter(langid.classify(text)[0] for text in long)
    if not counts:
        return {}
    named = [f"{name} {100 * n / len(long):.0f} %" for name, n in counts.most_common(_NAMED)]
    return {"languages": ", ".join(named)}


def _is_prose(text: str) -> bool:
    letters = sum(map(str.isalpha, text))
    return letters >= _LETTERS_MIN and letters > _LETTERS_SHARE * len(text)
