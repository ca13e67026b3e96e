"""Options that many commands share."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

Profile = Annotated[str, Parameter(help="Profile on this host; several can run at once.")]
Json = Annotated[bool, Parameter(help="Print JSON.", negative="")]
Yes = Annotated[bool, Parameter(name="--yes", help="Do not ask.", negative="")]
