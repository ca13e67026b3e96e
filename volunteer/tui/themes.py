"""Our own themes: a calm dark one, a light one, one for colour-blind eyes (Okabe and Ito 2008) and
one of high contrast.

Screens use the theme's colours and the variables of `DARK` below, which Textual's own themes get
too; only QR codes and pictures have colours of their own.
"""

from __future__ import annotations

from textual.css.stylesheet import Stylesheet
from textual.theme import Theme
from typing_extensions import override

DEFAULT = "volunteer-dark"

# Variables beyond Textual's, as defaults for Textual's own themes.
DARK = {
    "dim": "#8b96a5",
    "faint": "#566172",
    "line": "#2c3644",
    "track": "#455264",
    "raw": "#4f7aa8",
    "mean": "#7cc4ff",
    "model": "#f0b26b",
    "mark": "#8fd694",
}
LIGHT = {
    "dim": "#5d6875",
    "faint": "#8a94a0",
    "line": "#cfd6dd",
    "track": "#b4bfc9",
    "raw": "#8fb3d6",
    "mean": "#1f6fb2",
    "model": "#b35c00",
    "mark": "#2d7d3a",
}


def _scroll(colour: str, ground: str) -> dict[str, str]:
    return {
        "scrollbar": colour,
        "scrollbar-hover": colour,
        "scrollbar-active": colour,
        "scrollbar-background": ground,
        "scrollbar-background-hover": ground,
        "scrollbar-background-active": ground,
        "scrollbar-corner-color": ground,
    }


THEMES = (
    Theme(
        name="volunteer-dark",
        primary="#7cc4ff",
        secondary="#6fd3c1",
        accent="#f0b26b",
        success="#8fd694",
        warning="#e8c872",
        error="#f28b82",
        foreground="#d6dde6",
        background="#0f141a",
        surface="#141a22",
        panel="#1b232d",
        variables={**DARK, **_scroll("#36414f", "#0f141a")},
    ),
    Theme(
        name="volunteer-light",
        primary="#1f6fb2",
        secondary="#0f7a68",
        accent="#b35c00",
        success="#2d7d3a",
        warning="#8a6300",
        error="#b3261e",
        foreground="#1f2933",
        background="#f8f9fa",
        surface="#ffffff",
        panel="#e9edf1",
        dark=False,
        variables={**LIGHT, **_scroll("#c3ccd5", "#f8f9fa")},
    ),
    Theme(
        name="volunteer-colour-blind",
        primary="#56b4e9",
        secondary="#cc79a7",
        accent="#e69f00",
        success="#56b4e9",
        warning="#f0e442",
        error="#e69f00",
        foreground="#e6e6e6",
        background="#101214",
        surface="#16191c",
        panel="#1e2226",
        variables={
            **DARK,
            **_scroll("#3c444c", "#101214"),
            "dim": "#a0a7ae",
            "raw": "#3f77a0",
            "mean": "#56b4e9",
            "model": "#e69f00",
            "mark": "#f0e442",
        },
    ),
    Theme(
        name="volunteer-high-contrast",
        primary="#5cd6ff",
        secondary="#ffffff",
        accent="#ffe14d",
        success="#5dff8f",
        warning="#ffe14d",
        error="#ff9c9c",
        foreground="#ffffff",
        background="#000000",
        surface="#000000",
        panel="#1a1a1a",
        text_alpha=1.0,
        variables={
            **_scroll("#ffffff", "#000000"),
            "dim": "#dcdcdc",
            "faint": "#b4b4b4",
            "line": "#ffffff",
            "track": "#8c8c8c",
            "raw": "#5cd6ff",
            "mean": "#ffffff",
            "model": "#ffe14d",
            "mark": "#5dff8f",
            "text-muted": "#dcdcdc",
            "text-disabled": "#b4b4b4",
        },
    ),
)


class SteadyStylesheet(Stylesheet):
    """Stylesheet that is parsed again only if its variables have changed.

    Textual parses every stylesheet again when a page is first opened, and before the first paint,
    though only a change of theme changes the variables.
    """

    @override
    def set_variables(self, variables: dict[str, str]) -> None:
        if variables != self._variables:
            super().set_variables(variables)

    @override
    def reparse(self) -> None:
        """Parse the changed rules. Raises StylesheetError, StylesheetParseError, like Textual's."""
        self.parse()
