"""Presets of the limits: a few settings together under one word. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from volunteer.i18n.catalogue import N_


class Preset(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that are set together."""

    name: str
    help: str
    changes: dict[str, Any]


# Each preset sets the same settings, so that nothing of another stays.
PRESETS = (
    Preset(
        name=N_("gentle"),
        help=N_("One device, half of the time, and not while you use the computer."),
        changes={"device": "auto", "schedule": (), "in_use": "pause", "duty_percent": 50},
    ),
    Preset(
        name=N_("evenings"),
        help=N_("One device, from six in the evening to eight in the morning and at weekends."),
        changes={
            "device": "auto",
            "schedule": ("mon-fri 18:00-08:00", "sat-sun"),
            "in_use": "gentle",
            "duty_percent": 100,
        },
    ),
    Preset(
        name=N_("everything"),
        help=N_("All GPUs, all the time; on battery it still pauses."),
        changes={"device": "all", "schedule": (), "in_use": "work", "duty_percent": 100},
    ),
)
NAMES = tuple((preset.name, preset.name) for preset in PRESETS)


def preset(name: str) -> Preset:
    """Return the preset of this name. Raises KeyError."""
    return {preset.name: preset for preset in PRESETS}[name]


def following(values: Mapping[str, Any]) -> Preset:
    """Return the preset after the present one, or the first."""
    names = [preset.name for preset in PRESETS]
    now = held(values)
    return PRESETS[(names.index(now) + 1) % len(PRESETS) if now else 0]


def held(values: Mapping[str, Any]) -> str:
    """Return the name of the preset that settings agree with; "" for none."""
    for one in PRESETS:
        if all(_plain(values.get(name)) == wanted for name, wanted in one.changes.items()):
            return one.name
    return ""


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
