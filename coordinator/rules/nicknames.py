"""Nicknames: which are acceptable, and which look alike. Pure.

A nickname is stored as written, after NFKC, and a second time as its **skeleton**, the form that
lookalike names share; no two accounts may have one skeleton. The idea is from Unicode Technical
Standard 39 (confusables), with a small table of our own for letters of Latin, Greek, Cyrillic,
Armenian and Cherokee that look like Latin ones. A name keeps to one script (Chinese, Japanese and
Korean may be mixed with Latin), so the table need not be complete.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator

from shared.errors import InvalidName
from shared.protocol.limits import NICKNAME_MAX, NICKNAME_MIN, fits_nickname
from shared.text import is_undrawn

SKELETON_MAX = 128  # width of the database column
RAW_MAX = 256  # longer names are refused unread
PSEUDONYM = "forgotten"

# Names that suggest the organiser, and the prefix of forgotten accounts.
_RESERVED = (
    "admin",
    "administrator",
    "coordinator",
    "organiser",
    "organizer",
    "root",
    "server",
    "system",
    PSEUDONYM,
)
_BESIDE_LATIN = frozenset({"CJK", "IDEOGRAPHIC", "HIRAGANA", "KATAKANA", "HANGUL", "BOPOMOFO"})

# Every character on the right looks like the letter on the left, in lower or upper case, in some
# common typeface.
_ALIKE_ROWS = {
    "a": "аαɑⲁᎪ", "b": "ЬьвΒβƅʙᏏ", "c": "сϲⲥᏟ", "d": "ԁժᎠ", "e": "еєεҽɛᎬ", "f": "ғƒꞙϝ",
    "g": "ɡցԍᏀ", "h": "һհнηʜᎻ", "j": "јϳյᎫ", "k": "кκĸᏦ", "l": "1i|ıіιӏΙІɩɪӀᎥӀլⲓǀ!", "m": "мμʍᎷⲙ",
    "n": "пոռɴⲛ", "o": "0оοօσⲟᴏσө", "p": "рρᏢⲣ", "q": "ԛգզ", "r": "гᴦʀᎡ", "s": "ѕꜱտᏚ", "t": "тτᎢⲧ",
    "u": "υцսʋᴜ", "v": "νѵᴠᏙ", "w": "ԝωшщաɯᎳ", "x": "хχҳⲭ", "y": "уγүყʏⲩ", "z": "ᴢᏃʐ",
}  # fmt: skip
_TABLE = {
    ord(form): to
    for to, row in _ALIKE_ROWS.items()
    for char in row
    for form in {char, char.casefold(), char.upper()}
    if len(form) == 1
} | {
    ord("ß"): "ss",
    ord("æ"): "ae",
    ord("œ"): "oe",
    ord("ø"): "o",
    ord("đ"): "d",
    ord("ł"): "l",
    ord("ħ"): "h",
}
_PAIRS = (("rn", "m"), ("vv", "w"))  # pairs that look like one letter


def normal(raw: str) -> str:
    """Return the stored form of a nickname: NFKC, single inner blanks. Raises InvalidName."""
    if len(raw) > RAW_MAX:
        raise InvalidName(f"a nickname has at most {NICKNAME_MAX} characters")
    name = " ".join(unicodedata.normalize("NFKC", raw).split(" ")).strip()
    name = re.sub(r" {2,}", " ", name)
    if not NICKNAME_MIN <= len(name) <= NICKNAME_MAX:
        raise InvalidName(
            f"a nickname has {NICKNAME_MIN} to {NICKNAME_MAX} characters; this one has {len(name)}"
        )
    _check_characters(name)
    _check_scripts(name)
    key = skeleton(name)
    if not key or len(key) > SKELETON_MAX:
        raise InvalidName("a nickname needs letters or digits that can be told apart")
    if any(key == skeleton(word) for word in _RESERVED) or key.startswith(skeleton(PSEUDONYM)):
        raise InvalidName(f'"{name}" is reserved: choose another nickname')
    return name


def _check_characters(name: str) -> None:
    for char in name:
        if fits_nickname(char):
            continue
        kind = unicodedata.category(char)
        if kind[0] == "C" or kind in ("Zl", "Zp") or is_undrawn(char):
            raise InvalidName(
                f"a nickname may not hold invisible or control characters (U+{ord(char):04X})"
            )
        raise InvalidName(
            f"a nickname may hold letters, digits, blanks and - _ . ' but not {char!r}"
        )
    if unicodedata.category(name[0])[0] not in "LN" or not skeleton(name[0]):
        raise InvalidName("a nickname begins with a letter or a digit")
    if re.search(r"[-_. ']{3,}", name):
        raise InvalidName("a nickname may not hold three of blank - _ . ' in a row")
    if _marks_in_a_row(name) > 2:
        raise InvalidName("a nickname may not pile up accents")


def _marks_in_a_row(name: str) -> int:
    longest = run = 0
    for char in unicodedata.normalize("NFD", name):
        run = run + 1 if unicodedata.category(char) in ("Mn", "Me") else 0
        longest = max(longest, run)
    return longest


def _script(char: str) -> str:
    """Return the first word of a character's Unicode name, which for letters is the script."""
    return re.split("[ -]", unicodedata.name(char, "?"))[0]


def _check_scripts(name: str) -> None:
    scripts = {_script(char) for char in name if char.isalpha()} - {"MODIFIER"}
    if len(scripts) > 1 and not scripts - _BESIDE_LATIN <= {"LATIN"}:
        listed = " and ".join(sorted(script.capitalize() for script in scripts))
        raise InvalidName(f"a nickname keeps to one script, but this one mixes {listed}")


def _visible(char: str) -> str:
    """Return a character as a hasty reader sees it: digits by value, signs left out."""
    kind = unicodedata.category(char)
    if kind == "Nd":
        return str(unicodedata.decimal(char)).translate(_TABLE)
    counts = kind[0] in "LMN" and fits_nickname(char) and _script(char) != "MODIFIER"
    return char if counts else ""


def skeleton(name: str) -> str:
    """Return the form shared by lookalikes: no case, accents, blanks or signs, and similar letters
    as one.
    """
    text = unicodedata.normalize("NFKC", name).translate(_TABLE)
    text = unicodedata.normalize("NFKC", text.casefold())
    text = "".join(c for c in unicodedata.normalize("NFD", text) if not unicodedata.combining(c))
    text = unicodedata.normalize("NFC", text.translate(_TABLE))
    text = "".join(map(_visible, text))
    for pair, one in _PAIRS:
        text = text.replace(pair, one)
    return text


def alternatives(name: str) -> Iterator[str]:
    """Yield names like `name`, nearest first: "mia" gives "mia 2", "mia 3" and so on."""
    base = name[: NICKNAME_MAX - 4].rstrip(" -_.'")
    for number in range(2, 1000):
        yield f"{base} {number}"


def suggestion(name: str, is_taken: Callable[[str], bool]) -> str:
    """Return the nearest free name; `is_taken` returns True for a skeleton in use. Raises
    InvalidName if every similar name is taken.
    """
    for other in alternatives(name):
        if not is_taken(skeleton(other)):
            return other
    raise InvalidName(f'"{name}" and every similar name are taken: choose a different nickname')


def pseudonym(token: str) -> str:
    """Return the name of a forgotten account; `token` is random and unrelated to the old name."""
    return f"{PSEUDONYM}-{token}"
