"""Settings for when and how hard this machine works, applied by `machine/policy.py`."""

from __future__ import annotations

import re
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from shared.sentences import Sentence
from shared.workloads.base import KINDS, Role
from volunteer.i18n.catalogue import N_
from volunteer.settings.schedule import parse_schedule

_RATE_UNIT = {"unit": "Mbit/s"}
# Larger numbers, and `inf`, become no bytes that this machine can count.
GIB_MAX, MBIT_MAX = 1 << 20, 1_000_000
DEVICES_MAX = 64  # most devices with rules of their own
_DEVICE = re.compile(r"cpu|mps|(cuda|xpu):[0-9]{1,3}")


class WorkRules(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rules for the hours and the resources that this machine may use."""

    schedule: Annotated[
        tuple[str, ...],
        Meta(
            description=N_(
                'Hours of the week in which to work, such as "mon-fri 18:00-08:00" or '
                '"sat-sun"; empty = always.'
            ),
            max_length=64,
        ),
    ] = ()
    in_use: Annotated[
        Literal["work", "gentle", "pause"],
        Meta(
            description=N_(
                'While you use keyboard or mouse: "work" on, "gentle" (half of the time) '
                'or "pause".'
            )
        ),
    ] = "work"
    idle_minutes: Annotated[
        float,
        Meta(
            description=N_(
                "The machine counts as unused after so long without keyboard and mouse."
            ),
            ge=0.5,
            le=1440,
            extra={"unit": "min"},
        ),
    ] = 5.0
    on_battery: Annotated[bool, Meta(description=N_("Work on battery power as well."))] = False
    programs: Annotated[
        tuple[str, ...],
        Meta(
            description=N_(
                "Pause while one of these programs runs, such as a game or a video editor."
            ),
            max_length=64,
        ),
    ] = ()
    temperature_max: Annotated[
        float,
        Meta(
            description=N_(
                "Pause a device that gets hotter than this; 0 = leave it to the hardware."
            ),
            ge=0,
            le=120,
            extra={"unit": "°C"},
        ),
    ] = 0.0
    duty_percent: Annotated[
        int,
        Meta(
            description=N_(
                "Share of the time in which a device may work: less is cooler and quieter."
            ),
            ge=5,
            le=100,
            extra={"unit": "%"},
        ),
    ] = 100
    device_duty: Annotated[
        dict[str, Annotated[int, Meta(ge=5, le=100)]],
        Meta(
            description=N_(
                'Share of the time of single devices: cpu = 50, "cuda:0" = 80; the others '
                "have duty_percent."
            ),
            max_length=DEVICES_MAX,
        ),
    ] = msgspec.field(default_factory=dict)
    roles: Annotated[
        tuple[Role, ...],
        Meta(
            description=N_(
                'Work that this machine takes: of a run of games "play" (games and '
                'matches) and "learn" from them; "train" in all other runs.'
            ),
            min_length=1,
            max_length=3,
        ),
    ] = ("play", "learn", "train")
    device_roles: Annotated[
        dict[str, str],
        Meta(
            description=N_(
                'Work of single devices: cpu = "play", "cuda:0" = "learn train"; the '
                "others have roles."
            ),
            max_length=DEVICES_MAX,
        ),
    ] = msgspec.field(default_factory=dict)
    metered: Annotated[
        Literal["pause", "work"],
        Meta(description=N_("What to do while the network connection is metered.")),
    ] = "pause"
    upload_mbit: Annotated[
        float,
        Meta(description=N_("Most to send; 0 = no limit."), ge=0, le=MBIT_MAX, extra=_RATE_UNIT),
    ] = 0.0
    download_mbit: Annotated[
        float,
        Meta(
            description=N_("Most to receive; 0 = no limit."),
            ge=0,
            le=MBIT_MAX,
            extra=_RATE_UNIT,
        ),
    ] = 0.0
    disk_free_gb: Annotated[
        float,
        Meta(
            description=N_("Pause while less disk than this is free."),
            ge=0,
            le=GIB_MAX,
            extra={"unit": "GiB"},
        ),
    ] = 1.0

    def __post_init__(self) -> None:
        parse_schedule(self.schedule)  # a wrong schedule fails now, not when it is first used
        for device in (*self.device_duty, *self.device_roles):
            if not _DEVICE.fullmatch(device):
                raise ValueError(
                    Sentence(
                        'no device is called "{device}": cpu, mps, cuda:0, xpu:0',
                        device=device[:40],
                    )
                )
        for device, text in self.device_roles.items():
            wrong = [word for word in text.split() if word not in KINDS]
            if wrong or not text.split():
                complaint = (
                    Sentence('"{wrong}" is not a role', wrong=wrong[0][:40])
                    if wrong
                    else Sentence("a role is missing")
                )
                raise ValueError(
                    Sentence(
                        "{device}: {said}; they are play, learn and train",
                        device=device,
                        said=complaint,
                    )
                )

    def roles_of(self, device: str) -> tuple[str, ...]:
        """Return the roles ("play", "learn", "train") that a device may take."""
        roles = self.device_roles.get(device)
        return tuple(dict.fromkeys(roles.split())) if roles else self.roles

    def kinds(self, device: str) -> tuple[str, ...]:
        """Return the kinds of tasks that a device takes."""
        return tuple(kind for role in self.roles_of(device) for kind in KINDS[role])
