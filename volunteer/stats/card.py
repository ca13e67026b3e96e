"""A picture to show friends: what somebody's machines gave to a model, before and after, and where
the run is followed. Pure.

The SVG holds no script, nothing that is loaded from elsewhere and no font of its own; all text of
others is escaped and cut.
"""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import Sequence
from urllib.parse import quote, urlsplit
from xml.sax.saxutils import escape, quoteattr

import msgspec

from shared.protocol.accounts import Me
from shared.text import duration, printable
from volunteer.i18n.catalogue import _, number
from volunteer.stats.card_data import Part
from volunteer.text import loss, measured

WIDTH, HEIGHT = 1200, 630
SANS = "Inter, 'Segoe UI', 'Helvetica Neue', Arial, sans-serif"
MONO = "'DejaVu Sans Mono', Menlo, Consolas, monospace"
GROUND, PANEL, LINE = "#0f141a", "#161d26", "#2c3644"
TEXT, DIM, BLUE, AMBER, GREEN = "#e6edf5", "#8b96a5", "#7cc4ff", "#f0b26b", "#8fd694"
FIGURE_ROOM = 360  # of a box: the size of a letter times the letters that fit
NAME_ROOM = 400  # the same for the name below a figure, whose letters are narrower
HERE = ("127.0.0.1", "localhost", "::1")  # addresses of no use to a friend
CURVE_POINTS_MAX = 400
MARKS_MAX = 60
SAMPLE_CHARS, SAMPLE_LINES = 47, 6


class CardFacts(msgspec.Struct, frozen=True, kw_only=True):
    """All that stands on the card."""

    nickname: str
    server: str
    run: str
    description: str
    version: int  # head
    mine: tuple[int, ...]  # versions that hold work of this volunteer
    merged: int  # contributions of this volunteer to this run
    device_s: float | None  # given to this run
    points: tuple[tuple[int, float], ...]  # version, loss
    measure: str = ""  # of the points; empty: a loss on held-out data
    before: tuple[int, str] | None = None  # version and sample
    after: tuple[int, str] | None = None
    drawn_before: tuple[int, bytes] | None = None  # version and PNG
    drawn_after: tuple[int, bytes] | None = None
    page: str = ""  # address of the public page of the run; empty: none that a friend can open


def public_page(coordinator: str, run: str) -> str:
    """Return the address of a run's public page at a coordinator."""
    return f"{coordinator.rstrip('/')}/runs/{quote(run, safe='')}"


def card_facts(me: Me, found: Part, *, server: str, coordinator: str = "") -> CardFacts:
    """Return the facts out of what the coordinator answers; `coordinator` is its address."""
    info = found.info
    ordered = sorted(found.versions, key=lambda v: v.version)
    points = tuple((v.version, v.loss) for v in ordered if _finite(v.loss))
    samples = [(v.version, v.sample) for v in ordered if v.sample.strip()]
    return CardFacts(
        nickname=me.nickname,
        server=server,
        run=info.name,
        description=info.description,
        version=info.version,
        mine=tuple(v.version for v in ordered if v.mine),
        merged=sum(v.mine for v in ordered),
        device_s=found.device_s,
        points=tuple((v, loss) for v, loss in points if loss is not None),
        measure=info.measure,
        before=samples[0] if samples else None,
        after=samples[-1] if len(samples) > 1 else None,
        drawn_before=found.before,
        drawn_after=found.after,
        page=public_page(coordinator, info.name) if _open_to_friends(coordinator) else "",
    )


def _open_to_friends(coordinator: str) -> bool:
    try:
        host = urlsplit(coordinator).hostname
    except ValueError:
        return False
    return bool(host) and host not in HERE


def card(facts: CardFacts) -> str:
    """The SVG."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 '
        f'{WIDTH} {HEIGHT}" '
        f'role="img" aria-label={quoteattr(_summary(facts))}>',
        f"<title>{escape(_summary(facts))}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="{GROUND}"/>',
        f'<rect width="{WIDTH}" height="6" fill="{BLUE}"/>',
        *_head(facts),
        *_numbers(facts),
        *_curve(facts),
        *_samples(facts),
        *_foot(facts),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def share_words(facts: CardFacts) -> str:
    """Return how much of a model is somebody's."""
    run = _clean(facts.run, 40)
    if not facts.mine or facts.version <= 0:
        return _("helps to train {run}", run=run)
    share = min(1.0, len(facts.mine) / facts.version)
    versions, percent = number(facts.version, ","), math.floor(share * 100)
    if percent < 1:
        return _(
            "contributed to under 1 % of the {versions} versions of {run}",
            versions=versions,
            run=run,
        )
    return _(
        "contributed to {percent} % of the {versions} versions of {run}",
        percent=percent,
        versions=versions,
        run=run,
    )


def _summary(facts: CardFacts) -> str:
    return f"{_clean(facts.nickname, 24)} {share_words(facts)}"


def _head(facts: CardFacts) -> list[str]:
    description = _clean(facts.description, 88)
    return [
        _text(60, 74, "VOLUNTEER", 18, BLUE, weight=700, spacing=4),
        _text(WIDTH - 60, 74, _clean(facts.server, 40), 18, DIM, anchor="end"),
        _text(60, 142, _clean(facts.nickname, 24), 56, TEXT, weight=700),
        _text(60, 186, share_words(facts), 26, AMBER, weight=600),
        _text(60, 224, description, 19, DIM),
    ]


def _numbers(facts: CardFacts) -> list[str]:
    figures = [
        (number(facts.merged, ","), _("contributions merged")),
        (number(len(facts.mine), ","), _("versions with my work")),
    ]
    if facts.device_s is not None:
        figures.insert(0, (duration(facts.device_s), _("of computing given")))
    if len(facts.points) > 1:
        figures.append(
            (
                f"{loss(facts.points[0][1])} → {loss(facts.points[-1][1])}",
                measured(facts.measure),
            )
        )
    parts = []
    for place, (value, name) in enumerate(figures):
        x = 60 + place * 274
        parts += [
            _box(x, 252, 258, 92),
            _text(x + 20, 297, value, min(30, FIGURE_ROOM // len(value)), TEXT, weight=700),
            _text(x + 20, 326, name, min(16, NAME_ROOM // len(name)), DIM),
        ]
    return parts


def _curve(facts: CardFacts) -> list[str]:
    x, y, width, height = 60, 360, 532, 196
    parts = [
        _box(x, y, width, height),
        _text(x + 20, y + 30, _("{measure} by version", measure=measured(facts.measure)), 16, DIM),
    ]
    points = _thinned(facts.points)
    if len(points) < 2:
        return [
            *parts,
            _text(x + 20, y + 110, _("the curve begins with the next versions"), 17, DIM),
        ]
    lowest, highest = min(p[1] for p in points), max(p[1] for p in points)
    first, last = points[0][0], points[-1][0]

    def place(version: int, loss: float) -> tuple[float, float]:
        right = (version - first) / max(1, last - first)
        down = (highest - loss) / max(1e-9, highest - lowest)
        return x + 24 + right * (width - 48), y + 48 + down * (height - 74)

    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in (place(*point) for point in points))
    parts.append(
        f'<polyline points="{path}" fill="none" stroke="{BLUE}" stroke-width="3" '
        'stroke-linejoin="round" stroke-linecap="round"/>'
    )
    losses = dict(facts.points)
    mine = [version for version in facts.mine if version in losses]
    for version in mine[:: max(1, math.ceil(len(mine) / MARKS_MAX))]:
        a, b = place(version, losses[version])
        parts.append(
            f'<circle cx="{a:.1f}" cy="{b:.1f}" r="4.5" fill="{GREEN}" stroke="{GROUND}"/>'
        )
    if mine:
        word = _("with my work")
        parts += [
            f'<circle cx="{x + width - 62 - 8 * len(word)}" cy="{y + 25}" r="4.5" fill="{GREEN}"/>',
            _text(x + width - 20, y + 30, word, 15, DIM, anchor="end"),
        ]
    return parts


def _samples(facts: CardFacts) -> list[str]:
    x, y, width, height = 608, 360, 532, 196
    parts = [_box(x, y, width, height)]
    drawn = [shown for shown in (facts.drawn_before, facts.drawn_after) if shown is not None]
    if drawn:
        return [*parts, *_pictures(x, y, drawn)]
    told = [sample for sample in (facts.before, facts.after) if sample is not None]
    if not told:
        return [*parts, _text(x + 20, y + 110, _("samples of the model appear here"), 17, DIM)]
    rows = SAMPLE_LINES if len(told) == 1 else SAMPLE_LINES // 2
    at = y + 30
    for place, (version, text) in enumerate(told):
        newest = place == len(told) - 1
        word = _("now") if newest and len(told) > 1 else _("before")
        parts.append(_text(x + 20, at, _dated(word, version), 16, AMBER if newest else DIM))
        for row in _rows(text, rows):
            at += 22
            parts.append(_text(x + 20, at, row, 17, TEXT if newest else DIM, mono=True))
        at += 30
    return parts


def _dated(word: str, version: int) -> str:
    return _("{word}, version {version}", word=word, version=version)


def _pictures(x: float, y: float, drawn: Sequence[tuple[int, bytes]]) -> list[str]:
    """Return the pictures of one or two versions, each in half of the box."""
    parts = []
    for place, (version, png) in enumerate(drawn):
        newest = place == len(drawn) - 1
        at = x + 20 + place * 256
        word = _("now") if newest and len(drawn) > 1 else _("before")
        parts += [
            _text(at, y + 30, _dated(word, version), 16, AMBER if newest else DIM),
            f'<image x="{at}" y="{y + 44}" width="236" height="138" '
            'preserveAspectRatio="xMinYMin meet" style="image-rendering: pixelated" '
            f'href="data:image/png;base64,{b64encode(png).decode()}"/>',
        ]
    return parts


def _foot(facts: CardFacts) -> list[str]:
    parts = [_text(60, 600, _("trained together on volunteers' machines"), 18, DIM)]
    if facts.page:
        shown = printable(facts.page, 78)
        parts.append(_text(WIDTH - 60, 600, shown, 18, BLUE, anchor="end"))
    return parts


def _box(x: float, y: float, width: float, height: float) -> str:
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="12" '
        f'fill="{PANEL}" stroke="{LINE}"/>'
    )


def _text(
    x: float,
    y: float,
    words: str,
    size: int,
    colour: str,
    **how: str | int | bool,
) -> str:
    """Words at a place; `how` is weight, spacing, anchor, mono."""
    family = MONO if how.get("mono") else SANS
    extra = f' font-weight="{how["weight"]}"' if "weight" in how else ""
    extra += f' letter-spacing="{how["spacing"]}"' if "spacing" in how else ""
    extra += f' text-anchor="{how["anchor"]}"' if "anchor" in how else ""
    return (
        f'<text x="{x}" y="{y}" font-family="{family}" font-size="{size}" fill="{colour}"{extra} '
        f'xml:space="preserve">{escape(words)}</text>'
    )


def _rows(text: str, rows: int) -> list[str]:
    """The first lines of a sample; a long one goes on in the next."""
    found: list[str] = []
    for line in text.strip("\n").expandtabs(4).splitlines():
        line = printable(line.rstrip(), 1000)
        while True:
            found.append(line[:SAMPLE_CHARS])
            line = line[SAMPLE_CHARS:]
            if not line or len(found) >= rows:
                break
        if len(found) >= rows:
            break
    found = [row for row in found if row.strip()][:rows] or ["(nothing)"]
    return found


def _thinned(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    step = max(1, math.ceil(len(points) / CURVE_POINTS_MAX))
    kept = list(points[::step])
    if points and kept[-1] != points[-1]:
        kept.append(points[-1])
    return kept


def _finite(loss: float | None) -> bool:
    return loss is not None and math.isfinite(loss)


def _clean(text: str, limit: int) -> str:
    """Text of others: printable, one line, cut, without what XML does not know."""
    return "".join(
        c for c in printable(" ".join(text.split()), limit) if c == " " or c.isprintable()
    )
