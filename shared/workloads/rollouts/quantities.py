"""Numbers as people and models write them: decimals, fractions, powers of ten, percent, units.

`quantity` reads one number that is a whole text, so that no other text is paid as a number. All
patterns match in time proportional to a text, which is at most `CHARS_MAX` long.
"""

from __future__ import annotations

import re
from fractions import Fraction

import msgspec

CHARS_MAX = 512
DIGITS_MAX = 18  # digits of a number, and the largest exponent

_SIGNS = str.maketrans(
    {
        **dict.fromkeys("\u2212\u2013\uff0d", "-"),
        **dict.fromkeys("\u00d7\u22c5\u00b7", "*"),
        **dict.fromkeys("\u00f7\u2044\u2215", "/"),
        **dict.fromkeys("\u00a0\u2009\u202f\u2007", " "),
        "\u2019": "'",
        "\u2248": "=",
        "\u00bd": " 1/2",
        "\u00bc": " 1/4",
        "\u00be": " 3/4",
        "\u2153": " 1/3",
        "\u2154": " 2/3",
    }
)
_LATEX = (
    (re.compile(r"\\(?:left|right|displaystyle)(?![a-zA-Z])|\\!|\{,\}(?=[0-9])"), ""),
    (
        re.compile(r"\\[dtc]?frac\s*\{?\s*(-?[0-9]{1,18})\s*\}?\s*\{?\s*([0-9]{1,18})\s*\}?"),
        r" \1/\2",
    ),
    (re.compile(r"\\(?:cdot|times)(?![a-zA-Z])"), "*"),
    (re.compile(r"\\(?:approx|simeq)(?![a-zA-Z])"), "="),
    (re.compile(r"\\(?:text|mathrm|textbf|mathbf|operatorname)\s*\{([^{}]*)\}"), r" \1 "),
    (re.compile(r"(?:\^\s*)?\{?\\(?:circ|degree)(?![a-zA-Z])\}?"), "°"),
    (re.compile(r"\\([%$#&])"), r"\1"),
    (re.compile(r"\\[,;:() \[\]]|~"), " "),
)
_AROUND = re.compile(r"^[\s$*_`\"']+|[\s$*_`\"'.,;]+$")
_LEAD = re.compile(
    r"(?:(?:it|that|this|which|is|are|equals?|about|approximately|exactly|roughly|only|just)\s+)+",
    re.IGNORECASE,
)
_BRACKET = re.compile(r"(?<=\S)\s*\((?![^()]*\bor\b)[^()]*\)$")
_WRAPPED = re.compile(r"\(([^()]*)\)")
_CURRENCY = re.compile(r"(?:US|CA|AU)?[$€£¥₹]\s*|(?:USD|EUR|GBP)\s+")
_WHOLE = r"[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,3}(?: [0-9]{3})+|[0-9]{1,3}(?:['_][0-9]{3})+|[0-9]+"
_NUMBER = re.compile(
    rf"(?P<sign>[-+]?)\s*(?:US)?[$€£¥₹]?\s*(?:"
    rf"(?P<mixed>[0-9]{{1,9}})\s+(?P<mixed_top>[0-9]{{1,9}})/(?P<mixed_below>[0-9]{{1,9}})"
    rf"|(?P<top>{_WHOLE})\s*/\s*(?P<below>[-+]?[0-9]{{1,18}})"
    rf"|(?:(?P<value>(?:{_WHOLE})(?:\.[0-9]*)?|\.[0-9]+)"
    r"(?:[eE](?P<exponent>[-+]?[0-9]{1,3})"
    r"|\s*[*x]\s*10\s*\^\s*\{?\s*(?P<times>[-+]?[0-9]{1,3})\s*\}?)?)"
    rf")(?![0-9.])"
)
_TEN = re.compile(
    r"(?P<sign>[-+]?)10\s*\^\s*(?:\{\s*(?P<braced>[-+]?[0-9]{1,3})\s*\}|(?P<bare>[-+]?[0-9]{1,3}))"
)
_SCALES = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SCALE = re.compile(rf"\s*({'|'.join(_SCALES)})(?![a-zA-Z])", re.IGNORECASE)
_PERCENT = re.compile(r"\s*(?:%|percent(?![a-zA-Z])|per cent(?![a-zA-Z]))", re.IGNORECASE)
_UNIT = re.compile(
    r"\s*(?:[^\W\d_]|[°€$£¥₹²³])+(?:\s*\^\s*\{?-?[1-9]\}?)?"
    r"(?:(?:\s*[/*]\s*|\s+)(?:[^\W\d_]|[°²³])+(?:\s*\^\s*\{?-?[1-9]\}?)?){0,3}\s*"
)
_DENIALS = frozenset(
    [
        "or",
        "and",
        "nor",
        "not",
        "no",
        "maybe",
        "but",
        "plus",
        "minus",
        "times",
        "to",
        "is",
        "are",
        "was",
        "if",
        "wrong",
        "false",
    ]
)


class Quantity(msgspec.Struct, frozen=True):
    """Value of a written number; `percent` if it is written in per cent."""

    value: Fraction
    percent: bool = False

    def matches(self, expected: Quantity, tolerance: Fraction = Fraction(0)) -> bool:
        """Return True for the same amount: 50 % equals the number 0.5, and the number 50 as the
        answer to a question for per cent.
        """
        candidates = {self.value}
        if self.percent != expected.percent:
            candidates |= {self.value * 100 if self.percent else self.value / 100}
        return any(abs(value - expected.value) <= tolerance for value in candidates)


def quantity(text: str) -> Quantity | None:
    """Return the number that a text consists of, after a last "=" if there is one, with a unit or a
    remark in brackets; None for any other text.
    """
    if len(text) > CHARS_MAX:
        return None
    plain = _without_marks(text)
    wrapped = _WRAPPED.fullmatch(plain)
    plain = wrapped[1] if wrapped else _BRACKET.sub("", plain).strip()
    plain = _AROUND.sub("", plain.rpartition("=")[2])
    plain = _LEAD.sub("", plain, count=1) if _LEAD.match(plain) else plain
    number = _leading(plain)
    if number is None:
        return None
    value, rest = number
    if scale := _SCALE.match(rest):
        value, rest = value * 10 ** _SCALES[scale[1].lower()], rest[scale.end() :]
    if percent := _PERCENT.match(rest):
        rest = rest[percent.end() :]
        value /= 100
    words = rest.lower().split()
    if rest.strip() and (_UNIT.fullmatch(rest) is None or not _DENIALS.isdisjoint(words)):
        return None
    return Quantity(value, percent=percent is not None)


def _without_marks(text: str) -> str:
    """Return a text without LaTeX, Markdown and signs of typography."""
    plain = text.translate(_SIGNS)
    for pattern, replacement in _LATEX:
        plain = pattern.sub(replacement, plain)
    return _AROUND.sub("", _AROUND.sub("", plain))


def _leading(text: str) -> tuple[Fraction, str] | None:
    """Return the number at the beginning of a text, and the text after it; None if the text begins
    with no number.
    """
    if ten := _TEN.match(text):
        value = _power(Fraction(1), int(ten["braced"] or ten["bare"]))
        return None if value is None else (_signed(value, ten["sign"]), text[ten.end() :])
    match = _NUMBER.match(_CURRENCY.sub("", text, count=1) if _CURRENCY.match(text) else text)
    if match is None:
        return None
    value = _value(match)
    return None if value is None else (_signed(value, match["sign"]), match.string[match.end() :])


def _value(match: re.Match[str]) -> Fraction | None:
    """Return the unsigned value of a match of `_NUMBER`; None if it is too long or impossible."""
    try:
        if match["mixed"] is not None:
            part = Fraction(int(match["mixed_top"]), int(match["mixed_below"]))
            return int(match["mixed"]) + part if part < 1 else None
        if match["top"] is not None:
            top = _digits(match["top"])
            return None if top is None else Fraction(top) / int(match["below"])
    except ZeroDivisionError:
        return None
    value = _digits(match["value"])
    exponent = int(match["exponent"] or match["times"] or 0)
    return None if value is None else _power(Fraction(value), exponent)


def _digits(text: str) -> Fraction | None:
    plain = re.sub(r"[,_' ]", "", text)
    if not plain.isascii() or sum(map(str.isdigit, plain)) > DIGITS_MAX:
        return None
    return Fraction(plain.rstrip(".") or "0")


def _power(value: Fraction, exponent: int) -> Fraction | None:
    return value * Fraction(10) ** exponent if abs(exponent) <= DIGITS_MAX else None


def _signed(value: Fraction, sign: str) -> Fraction:
    return -value if sign == "-" else value
