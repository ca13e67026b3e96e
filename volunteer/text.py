"""Sentences of the volunteer about clocks, addresses and losses."""

from __future__ import annotations

from shared.protocol.accounts import RunInfo
from shared.text import duration, printable, size

CLOCK_S = 300.0  # clocks that differ by less are good enough


def clock_words(offset_s: float) -> str:
    """Return what is to be said of a clock when the coordinator's is `offset_s` ahead of it;
    nothing while they nearly agree.
    """
    if abs(offset_s) < CLOCK_S:
        return ""
    seconds = abs(offset_s)
    days = round(seconds / 86_400)
    far = f"{days} day{'' if days == 1 else 's'}" if seconds >= 43_200 else duration(seconds)
    side = "behind" if offset_s > 0 else "ahead of"
    return (
        f"the clock of this machine is {far} {side} the coordinator's: set it right, for hours "
        "of work, "
        "times and certificates go by it"
    )


def origin_of(info: RunInfo) -> str:
    """Describe the model that a run goes on from: its name, its licence, what is fetched of it."""
    fetched = f", {size(info.origin_bytes)} to fetch" if info.origin_bytes else ""
    licence = printable(info.origin_licence, 100) or "no stated licence"
    return f"{printable(info.origin, 200)} under {licence}{fetched}"


def nobody_at(url: str) -> str:
    """Return what to do when nothing answers at an address that means the very machine it is used
    on.
    """
    return (
        f"Nothing answers at {url.partition('://')[2]}. This address means the very machine it "
        "is used on: ask your "
        "organiser for a link with an address that reaches their machine."
    )


def loss(value: float | None) -> str:
    """Three decimals; what is larger needs fewer: 3.412, 337.2, 2.1e+30."""
    if value is None:
        return "-"
    if abs(value) < 100:
        return f"{value:.3f}"
    return f"{value:.1f}" if abs(value) < 1e6 else f"{value:.2g}"


def measured(measure: str) -> str:
    """Return what the loss of a run is, as a heading begins: Loss, Fréchet distance."""
    what = _measure(measure)
    return what[:1].upper() + what[1:]


def measure_word(measure: str) -> str:
    """The same in one word, for a table: loss, Fréchet."""
    return _measure(measure).partition(" ")[0]


def _measure(measure: str) -> str:
    return printable(measure.removeprefix("held-out ") or "loss", 24)
