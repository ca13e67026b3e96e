"""Words of the volunteer for clocks, addresses, keys, models and losses."""

from __future__ import annotations

from shared.protocol.accounts import RunInfo
from shared.text import duration, printable, whole_percent
from shared.workloads.declaration import MEASURES, Measure
from volunteer.i18n.catalogue import N_, NP_, _, ngettext, number, pgettext
from volunteer.i18n.formats import size

# Words of the built-in workloads; words of others are shown as they are.
WORKLOADS = (
    N_("loss"),
    N_("tokens"),
    N_("games"),
    N_("problems"),
    N_("answers"),
    N_("solved"),
    N_("images"),
    N_("samples"),
    N_("Fréchet distance"),
    N_("positions"),
    N_("tactical loss"),
)
KEY_STATES = (
    NP_("state of a key", "active"),
    NP_("state of a key", "revoked"),
    NP_("state of a key", "expired"),
)
CLOCK_S = 300.0  # a smaller difference of clocks is ignored


def clock_words(offset_s: float) -> str:
    """Return a sentence about a coordinator's clock that is `offset_s` ahead; "" if it is close
    enough.
    """
    if abs(offset_s) < CLOCK_S:
        return ""
    seconds = abs(offset_s)
    days = round(seconds / 86_400)
    far = ngettext("{n} day", "{n} days", days) if seconds >= 43_200 else duration(seconds)
    behind = _(
        "the clock of this machine is {time} behind the coordinator's: set it right, for hours of "
        "work, times and certificates go by it",
        time=far,
    )
    ahead = _(
        "the clock of this machine is {time} ahead of the coordinator's: set it right, for hours "
        "of work, times and certificates go by it",
        time=far,
    )
    return behind if offset_s > 0 else ahead


def key_state(state: str) -> str:
    """Return an API key's state in the user's language; an unknown state stays as it is."""
    return pgettext("state of a key", state) if state in KEY_STATES else printable(state, 40)


def origin_of(info: RunInfo) -> str:
    """Describe the model that a run starts from: its name, licence, and download size."""
    licence = printable(info.origin_licence, 100) or _("no stated licence")
    sentence = _("{model} under {licence}", model=printable(info.origin, 200), licence=licence)
    if not info.origin_bytes:
        return sentence
    return f"{sentence}, {_('{size} to fetch', size=size(info.origin_bytes))}"


def nobody_at(url: str) -> str:
    """Return the advice for an unreachable loopback address in a link."""
    return _(
        "Nothing answers at {address}, an address of this very machine. If the coordinator runs "
        "here, start it with `coordinator serve`, or check the port; else ask your organiser for a "
        "link with an address that reaches their machine.",
        address=url.partition("://")[2],
    )


def loss(value: float | None, measure: Measure = "loss") -> str:
    """Return a loss with three decimals, fewer for larger values: 3.412, 337.2, 2.1e+30.

    For the measure "share solved" the loss is the share of unsolved problems; return the share of
    solved problems: 63 %.
    """
    if value is None:
        return "-"
    if measure == "share solved":
        return f"{whole_percent(1 - value)} %"
    if abs(value) < 100:
        return number(value, ".3f")
    return number(value, ".1f" if abs(value) < 1e6 else ".2g")


def measure_heading(measure: Measure) -> str:
    """Return the name of a run's loss with a capital letter: Loss, Fréchet distance."""
    name = measure_name(measure)
    return name[:1].upper() + name[1:]


def measure_word(measure: Measure) -> str:
    """Return the loss's name in one word, for a table: loss, Fréchet."""
    return measure_name(measure).partition(" ")[0]


def measure_name(measure: Measure) -> str:
    """Return the loss's name within a sentence: loss, Fréchet distance, solved."""
    if measure == "share solved":
        return _("solved")
    return _(MEASURES[measure].removeprefix("held-out "))
