"""Words for settings: label, group, value, and the time from which a change applies. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from shared.errors import Configuration
from shared.sentences import Sentence
from shared.settings import SettingRow, plain_text
from volunteer.i18n.catalogue import AUTO, N_, NAMES, _, choose, current, languages, localized
from volunteer.settings import settings
from volunteer.settings.display import Display
from volunteer.settings.work_rules import WorkRules
from volunteer.tui.themes import THEMES

# Labels of the settings by group. The screen shows the name of config.toml next to a label.
GROUPS = {
    N_("When to work"): {
        "schedule": N_("hours"),
        "in_use": N_("while you use the computer"),
        "idle_minutes": N_("unused after"),
        "on_battery": N_("on battery"),
        "programs": N_("pause for programs"),
        "metered": N_("metered network"),
    },
    N_("How hard"): {
        "device": N_("devices"),
        "threads": N_("processor threads"),
        "memory_gb": N_("memory of a task"),
        "duty_percent": N_("share of the time"),
        "temperature_max": N_("pause when hotter"),
    },
    N_("Network and disk"): {
        "upload_mbit": N_("upload"),
        "download_mbit": N_("download"),
        "cache_gb": N_("disk for downloads"),
        "disk_free_gb": N_("disk left free"),
    },
    N_("What to help"): {
        "runs": N_("runs to help"),
        "roles": N_("work to take"),
        "workloads": N_("workloads allowed"),
        "serve": N_("answer prompts"),
        "consent": N_("licences"),
        "public": N_("nickname shown"),
        "max_tasks": N_("tasks to do"),
    },
    N_("Screen"): {
        "theme": N_("colours"),
        "language": N_("language"),
        "ascii": N_("plain characters"),
    },
    N_("Advanced"): {
        "priority": N_("priority"),
        "device_duty": N_("share of single devices"),
        "device_roles": N_("work of single devices"),
        "hub": N_("models from their hub"),
        "sandbox": N_("only its own folders"),
        "log_level": N_("log level"),
    },
}
_LABELS = {name: label for group in GROUPS.values() for name, label in group.items()}
# Values that are shown in other words than the file's.
WORDS = {
    ("in_use", "work"): N_("keep working"),
    ("in_use", "gentle"): N_("work gently"),
    ("in_use", "pause"): N_("pause"),
    ("metered", "work"): N_("keep working"),
    ("metered", "pause"): N_("pause"),
    ("on_battery", "yes"): N_("keep working"),
    ("on_battery", "no"): N_("pause"),
}
_AT_ONCE = frozenset(
    field.name for kind in (WorkRules, Display) for field in msgspec.structs.fields(kind)
)
SOURCES = {  # the short form, for tables: the long form
    N_("flag"): N_("the command line"),
    N_("environment"): N_("the environment"),
    "config.toml": "config.toml",
    "default": N_("default"),
}


def grouped(rows: Sequence[SettingRow]) -> list[tuple[str, list[SettingRow]]]:
    """Return all settings under their headings, ungrouped settings last."""
    by_name = {row.name: row for row in rows}
    groups: list[tuple[str, list[SettingRow]]] = []
    for title, group in GROUPS.items():
        groups.append((_(title), [by_name.pop(name) for name in group if name in by_name]))
    groups[-1][1].extend(by_name.values())
    return [(title, members) for title, members in groups if members]


def label(row: SettingRow) -> str:
    """Return the label of a setting in the current language."""
    return _(_LABELS.get(row.name, row.name))


def as_text(value: object) -> str:
    """Return a value as a person types it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return plain_text(value)


def value_words(row: SettingRow) -> str:
    """Return a setting's value in words, with its unit; an empty value or 0 as its meaning."""
    text = as_text(row.value)
    if not text:
        return {"schedule": _("always"), "runs": _("any run")}.get(row.name, _("none"))
    if (row.name, text) in WORDS:
        return _(WORDS[row.name, text])
    if row.name == "language":
        spoken = NAMES.get(current().language, current().language)
        return f"{text} ({spoken})" if text == AUTO else NAMES.get(text, text)
    zero = {
        "threads": _("all cores but one"),
        "memory_gb": _("half, of a GPU 90 %"),
        "upload_mbit": _("no limit"),
        "download_mbit": _("no limit"),
        "temperature_max": _("no ceiling"),
        "max_tasks": _("no end"),
    }
    if text == "0" and row.name in zero:
        return zero[row.name]
    if isinstance(row.value, bool):
        return _("yes") if row.value else _("no")
    if isinstance(row.value, float):
        text = localized(text)
    return f"{text} {row.unit}".rstrip()


def applies_from(row: SettingRow) -> str:
    """Return the time from which a change applies."""
    if row.name in ("runs", "roles", "device_roles"):
        return _("from the next task")
    if row.name in _AT_ONCE:
        return _("at once")
    if row.name == "public":
        return _("as soon as the coordinator answers")
    return _("from the next start")


def choices(row: SettingRow) -> tuple[str, ...]:
    """Return the values to choose from; () if the value has to be typed."""
    if row.type == "bool":
        return ("yes", "no")
    if row.name in ("theme", "language"):
        return named_choices(row.name)
    return tuple(row.type.split(" or ")) if " or " in row.type else ()


def named_choices(name: str) -> tuple[str, ...]:
    """Return the names of our themes for "theme", else the codes of the languages."""
    return tuple(theme.name for theme in THEMES) if name == "theme" else (AUTO, *languages())


def parsed(row: SettingRow, text: str) -> object:
    """Return a typed text as a value. Raises Configuration with the valid values."""
    text = text.strip()
    if row.type == "bool":
        words = {"yes": True, "true": True, "on": True, "no": False, "false": False, "off": False}
        if text.lower() not in words:
            raise Configuration(_("yes or no"))
        return words[text.lower()]
    if row.name == "language" and (problem := choose(text).problem):
        raise Configuration(problem)
    if row.type == "float" and "." not in text:
        text = text.replace(",", ".", 1)  # a decimal comma is accepted
    value = settings.TABLE.check(
        {row.name: settings.TABLE.listed(row.name, text)}, "this", strict=False
    )
    return value[row.name]


def complaint(error: Configuration) -> str:
    """Return an error's message without the setting's name, which is on the screen."""
    values = error.message.values if isinstance(error.message, Sentence) else {}
    problem = values.get("problem")
    return _(problem if isinstance(problem, str) else error.message)
