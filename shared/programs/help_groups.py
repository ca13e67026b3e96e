"""Groups of commands in the help of a program, and its command `help`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

from cyclopts import App, Group, Parameter

from shared.errors import BadRequest


def group(app: App, groups: Mapping[str, Sequence[str]]) -> None:
    """Show the commands of a program under headings, in the order given."""
    for place, (heading, names) in enumerate(groups.items()):
        panel = Group(heading, sort_key=place)
        for row, name in enumerate(names):
            app[name].group, app[name].sort_key = panel, row


def add_help(app: App) -> None:
    """Add the command `help`, which prints the same text as --help."""

    def show(
        *words: Annotated[str, Parameter(help="A command, such as `run create`.")],
    ) -> None:
        """Show this help, or the help of a command."""
        within = app
        for word in words:
            if word not in within:
                from shared.programs.usage_errors import no_command

                raise BadRequest(no_command(app.name[0], word, within, ()))
            within = within[word]
        app.help_print([*words])

    app.command(show, name="help", show=False)
