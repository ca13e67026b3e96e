"""A style sheet that is parsed again only where what it says has changed."""

from __future__ import annotations

from textual.css.stylesheet import Stylesheet


class SteadyStylesheet(Stylesheet):
    """Textual parses every style sheet anew for each page that is opened first, the first paint's
    too, though only another theme changes the variables in them. This one goes by its cache, which
    another theme empties.
    """

    def set_variables(self, variables: dict[str, str]) -> None:
        if variables != self._variables:
            super().set_variables(variables)

    def reparse(self) -> None:
        """Raises StylesheetError and StylesheetParseError, as Textual's own."""
        self.parse()
