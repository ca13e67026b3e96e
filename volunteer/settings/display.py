"""Settings of the screen; part of the volunteer's settings."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from volunteer.i18n.catalogue import AUTO, N_


class Display(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the screen."""

    theme: Annotated[
        str,
        Meta(
            description=N_(
                'Colours: "volunteer-dark", "volunteer-light", "volunteer-colour-blind", '
                '"volunteer-high-contrast" or one of Textual\'s.'
            ),
            min_length=1,
            max_length=64,
        ),
    ] = "volunteer-dark"
    language: Annotated[
        str,
        Meta(
            description=N_(
                "Language of the program: auto follows the environment (LC_ALL, LC_MESSAGES, "
                "LANG); en, de, es."
            ),
            min_length=1,
            max_length=64,
        ),
    ] = AUTO
    ascii: Annotated[bool, Meta(description=N_("Draw with the 95 plain characters only."))] = False
