"""Settings of when and how hard this machine works, which `machine/policy.py` applies; part of the
volunteer's settings.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from volunteer.settings.schedule import parse_schedule

_Rate = {"unit": "Mbit/s"}


class Rules(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rules of when this machine may work, and of what it may use."""

    schedule: Annotated[
        tuple[str, ...],
        Meta(
            description='Hours of the week in which to work, such as "mon-fri 18:00-08:00" or '
            '"sat-sun"; empty = always.',
            max_length=64,
        ),
    ] = ()
    in_use: Annotated[
        Literal["work", "gentle", "pause"],
        Meta(
            description='While you use keyboard or mouse: "work" on, "gentle" (half of the time) '
            'or "pause".'
        ),
    ] = "work"
    idle_minutes: Annotated[
        float,
        Meta(
            description="The machine counts as unused after so long without keyboard and mouse.",
            ge=0.5,
            le=1440,
            extra={"unit": "min"},
        ),
    ] = 5.0
    on_battery: Annotated[bool, Meta(description="Work on battery power as well.")] = False
    programs: Annotated[
        tuple[str, ...],
        Meta(
            description="Pause while one of these programs runs, such as a game or a video editor.",
            max_length=64,
        ),
    ] = ()
    temperature_max: Annotated[
        float,
        Meta(
            description="Pause a device that gets hotter than this; 0 = leave it to the hardware.",
            ge=0,
            le=120,
            extra={"unit": "°C"},
        ),
    ] = 0.0
    duty_percent: Annotated[
        int,
        Meta(
            description="Share of the time in which a device may work: less is cooler and quieter.",
            ge=5,
            le=100,
            extra={"unit": "%"},
        ),
    ] = 100
    metered: Annotated[
        Literal["pause", "work"],
        Meta(description="What to do while the network connection is metered."),
    ] = "pause"
    upload_mbit: Annotated[
        float,
        Meta(description="Most to send; 0 = no limit.", ge=0, extra=_Rate),
    ] = 0.0
    download_mbit: Annotated[
        float,
        Meta(description="Most to receive; 0 = no limit.", ge=0, extra=_Rate),
    ] = 0.0
    disk_free_gb: Annotated[
        float,
        Meta(
            description="Pause while less disk than this is free.",
            ge=0,
            extra={"unit": "GiB"},
        ),
    ] = 1.0
    keep_awake: Annotated[
        bool, Meta(description="Keep this machine from going to sleep while it trains.")
    ] = False

    def __post_init__(self) -> None:
        parse_schedule(self.schedule)  # a slip is reported when it is made, not at midnight
