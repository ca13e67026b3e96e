"""Labels of settings: the group, the value as text, the moment a change takes effect. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

import msgspec

from shared.errors import Configuration
from volunteer.control.commands import SettingRow
from volunteer.settings import settings
from volunteer.settings.display import Display
from volunteer.settings.work_rules import Rules

GROUPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("When to work", ("schedule", "in_use", "idle_minutes", "on_battery", "programs", "metered")),
    (
        "How hard",
        (
            "device",
            "threads",
            "memory_gb",
            "duty_percent",
            "device_duty",
            "temperature_max",
            "priority",
            "keep_awake",
        ),
    ),
    (
        "Network and disk",
        ("upload_mbit", "download_mbit", "cache_gb", "disk_free_gb", "prefetch", "hub"),
    ),
    (
        "What to help",
        (
            "runs",
            "roles",
            "device_roles",
            "workloads",
            "serve",
            "consent",
            "public",
            "public_runs",
            "max_tasks",
        ),
    ),
    (
        "Screen and alerts",
        (
            "theme",
            "ascii",
            "pictures",
            "animations",
            "marks",
            "keys",
            "power_price",
            "device_watts",
            "alerts",
            "webhook",
        ),
    ),
    ("Ending", ("snapshot_seconds", "quit_seconds", "log_level", "sandbox")),
)
# Labels of the settings; the name in the file and on the command line is shown beside them.
LABELS = {
    "schedule": "hours",
    "in_use": "while you use the computer",
    "idle_minutes": "unused after",
    "on_battery": "on battery",
    "programs": "pause beside",
    "metered": "metered network",
    "device": "devices",
    "threads": "processor threads",
    "memory_gb": "memory of a task",
    "duty_percent": "share of the time",
    "device_duty": "share of single devices",
    "roles": "work to take",
    "device_roles": "work of single devices",
    "temperature_max": "pause when hotter",
    "priority": "priority",
    "keep_awake": "keep awake",
    "upload_mbit": "upload",
    "download_mbit": "download",
    "cache_gb": "disk for downloads",
    "disk_free_gb": "disk left free",
    "prefetch": "fetch ahead",
    "runs": "runs to help",
    "workloads": "workloads allowed",
    "serve": "answer prompts",
    "consent": "licences",
    "public": "nickname shown",
    "public_runs": "list of public runs",
    "max_tasks": "tasks to do",
    "theme": "colours",
    "ascii": "plain characters",
    "pictures": "drawing of pictures",
    "animations": "animations",
    "marks": "milestones",
    "keys": "other keys",
    "power_price": "price of a kWh",
    "device_watts": "watts of devices",
    "alerts": "alerts",
    "webhook": "webhook",
    "snapshot_seconds": "save half-done tasks",
    "sandbox": "only its own folders",
    "hub": "models from their hub",
    "quit_seconds": "finish before leaving",
    "log_level": "least in the log",
}
# Values that a person reads in other words than the file has.
WORDS = {
    ("in_use", "work"): "keep working",
    ("in_use", "gentle"): "work gently",
    ("in_use", "pause"): "pause",
    ("on_battery", "yes"): "keep working",
    ("on_battery", "no"): "pause",
}
_AT_ONCE = frozenset(
    field.name for kind in (Rules, Display) for field in msgspec.structs.fields(kind)
) - {"pictures"}  # the terminal is asked before the screen starts
SOURCES = {
    "flag": "the command line",
    "environment": "the environment",
    "config.toml": "config.toml",
    "default": "default",
}


def grouped(rows: Sequence[SettingRow]) -> list[tuple[str, list[SettingRow]]]:
    """Return all settings under their headings; those without one come last."""
    by_name = {row.name: row for row in rows}
    found = []
    for title, names in GROUPS:
        found.append((title, [by_name.pop(name) for name in names if name in by_name]))
    found.append(("More", list(by_name.values())))
    return [(title, members) for title, members in found if members]


def label(row: SettingRow) -> str:
    """Return the label of a setting."""
    return LABELS.get(row.name, row.name)


def as_text(value: object) -> str:
    """Return a value as it is typed."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple | list):
        return ", ".join(str(item) for item in value)
    if isinstance(value, dict):
        return ", ".join(f"{name}={item}" for name, item in value.items())
    return str(value)


def shown(row: SettingRow) -> str:
    """Return a value in words; empty and zero get their meaning."""
    text = as_text(row.value)
    if not text:
        return {"schedule": "always", "runs": "any run", "alerts": "none"}.get(row.name, "none")
    if (row.name, text) in WORDS:
        return WORDS[row.name, text]
    if row.name == "webhook":
        return "set"  # it may hold a key
    zero = {
        "threads": "all cores but one",
        "memory_gb": "half, of a GPU 90 %",
        "upload_mbit": "no limit",
        "download_mbit": "no limit",
        "temperature_max": "no ceiling",
        "max_tasks": "no end",
        "power_price": "not shown",
        "snapshot_seconds": "never",
    }
    if text == "0" and row.name in zero:
        return zero[row.name]
    return f"{text} {row.unit}".rstrip()


def holds(row: SettingRow) -> str:
    """Return the time from which a change applies."""
    if row.name in ("runs", "roles", "device_roles"):
        return "from the next task"
    if row.name in _AT_ONCE:
        return "at once"
    if row.name == "public":
        return "as soon as the coordinator answers"
    return "from the next start"


def choices(row: SettingRow) -> tuple[str, ...]:
    """Return the values to choose from; empty where the value has to be typed."""
    if row.type == "bool":
        return ("yes", "no")
    return tuple(row.type.split(" or ")) if " or " in row.type else ()


def parsed(row: SettingRow, text: str, themes: Sequence[str] = ()) -> object:
    """Return the value that a text means. Raises Configuration with what it must be."""
    text = text.strip()
    if row.type == "bool":
        words = {"yes": True, "true": True, "on": True, "no": False, "false": False, "off": False}
        if text.lower() not in words:
            raise Configuration("yes or no")
        return words[text.lower()]
    if row.name == "theme" and themes and text not in themes:
        near = difflib.get_close_matches(text, themes, n=1)
        hint = f": did you mean {near[0]}?" if near else f", known: {', '.join(themes)}"
        raise Configuration(f'there is no theme "{text}"{hint}')
    value = settings.check({row.name: settings.listed(row.name, text)}, "this", strict=False)
    return value[row.name]


def complaint(error: Configuration, name: str) -> str:
    """Return the message of an error without the name of the setting, which is on the screen."""
    said = error.message.removeprefix("this: ")
    return said.removeprefix(f'setting "{name}": ')
