"""Settings and directories of the volunteer: flag over environment (`VOLUNTEER_*`) over config.toml
over default.

What a setting means is written once, here, as its metadata; the command line, the settings screen,
the error messages and `docs/volunteer-settings.md` are made from it. No secret is a setting.
"""

from __future__ import annotations

import os
import re
import socket
import tomllib
from collections.abc import Mapping, MutableMapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta
from msgspec.structs import FieldInfo

from shared.decoding import choices, convert, in_words
from shared.errors import BadRequest, Configuration, VolunteerError, why
from shared.nearest import hint, nearest
from shared.sentences import Sentence
from shared.text import escaped
from volunteer.files import private_directory, write_whole
from volunteer.i18n.catalogue import N_
from volunteer.settings.display import Display
from volunteer.settings.work_rules import Rules

PREFIX = "VOLUNTEER_"
FLAG = "flag"  # the source of what the command line says
# Variables that are no settings: where everything lies, which profile, how to join unattended.
HOME, PROFILE, JOIN = f"{PREFIX}HOME", f"{PREFIX}PROFILE", f"{PREFIX}JOIN"
_Seconds = {"unit": "s"}


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of this volunteer: its own fields, and those of two subjects.

    In flags, variables and config.toml all of them stand side by side under their own names.
    """

    rules: Rules = Rules()
    display: Display = msgspec.field(default_factory=Display)
    device: Annotated[
        str,
        Meta(
            description=N_(
                'Devices to lend: "auto" (the best one), "all", or names such as "cpu" '
                'or "cuda:0,cuda:1".'
            ),
            min_length=1,
            max_length=256,
        ),
    ] = "auto"
    threads: Annotated[
        int,
        Meta(description=N_("Torch threads; 0 = physical cores minus one."), ge=0, le=1024),
    ] = 0
    memory_gb: Annotated[
        float,
        Meta(
            description=N_(
                "Most memory a task may need; 0 = half of the computer's, nine tenths of a GPU's."
            ),
            ge=0,
            extra={"unit": "GiB"},
        ),
    ] = 0.0
    cache_gb: Annotated[
        float,
        Meta(
            description=N_("Most disk for weights and data that are kept to save downloads."),
            ge=0.1,
            extra={"unit": "GiB"},
        ),
    ] = 10.0
    runs: Annotated[
        tuple[str, ...],
        Meta(description=N_("Help only these runs; empty = any run."), max_length=64),
    ] = ()
    workloads: Annotated[
        tuple[str, ...],
        Meta(description=N_("Installed workloads that may run on this machine."), max_length=64),
    ] = ("gpt", "dcgan", "gomoku", "causal-lm")
    consent: Annotated[
        Literal["all", "asked"],
        Meta(
            description=N_(
                '"all": joining a coordinator is a yes to the licence of its runs, which '
                'is shown; "asked": help only runs you said yes to.'
            )
        ),
    ] = "all"
    public: Annotated[
        bool, Meta(description=N_("Show your nickname on the public leaderboard."))
    ] = True
    max_tasks: Annotated[
        int, Meta(description=N_("End after this many submitted tasks; 0 = no end."), ge=0)
    ] = 0
    prefetch: Annotated[
        bool, Meta(description=N_("Fetch the next task while the current one trains."))
    ] = True
    hub: Annotated[
        bool,
        Meta(
            description=N_(
                "Fetch the public model that a run goes on from at its hub, or the mirror "
                "in HF_ENDPOINT, and from the coordinator only what is missing there."
            )
        ),
    ] = True
    serve: Annotated[
        bool,
        Meta(
            description=N_(
                "Answer prompts between the steps of training, and earn what the askers "
                "pay; what they wrote is on this machine while it answers."
            )
        ),
    ] = False
    sandbox: Annotated[
        bool,
        Meta(
            description=N_(
                "Confine the program to its own folders and its memory, where the system "
                "can (Linux): it reads and writes nothing else of yours, and takes 2 GiB more "
                "than a task may need."
            ),
        ),
    ] = True
    snapshot_seconds: Annotated[
        float,
        Meta(
            description=N_(
                "Save a half-done task this often, so that a restart goes on with it; 0 = never."
            ),
            ge=0,
            extra=_Seconds,
        ),
    ] = 30.0
    quit_seconds: Annotated[
        float,
        Meta(
            description=N_(
                "When asked to end, still finish a task that needs no longer than this."
            ),
            ge=0,
            le=600,
            extra=_Seconds,
        ),
    ] = 20.0
    priority: Annotated[
        Literal["low", "normal"],
        Meta(description=N_("Priority of the whole process against your other programs.")),
    ] = "low"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Meta(description=N_("Least important log line shown on standard error.")),
    ] = "warning"


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One setting as a person sees it."""

    name: str
    type: str
    default: str
    unit: str
    help: str


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """The settings in force, and which source set each: "flag", "environment", "config.toml" or
    "default".
    """

    settings: Settings
    sources: dict[str, str]
    path: Path


class Directories(msgspec.Struct, frozen=True, kw_only=True):
    """Directories of this volunteer.

    Profiles are per host, so a home directory shared by machines does no harm.
    """

    config: Path
    profile: Path  # identity, results, half-done tasks
    cache: Path  # may be deleted at any time


_SUBJECTS: dict[str, type[msgspec.Struct]] = {"rules": Rules, "display": Display}


@cache
def _fields() -> dict[str, tuple[str, FieldInfo]]:
    """Every setting by name, in order: the subject that it belongs to (or ""), and its field."""
    kinds: list[tuple[str, type[msgspec.Struct]]] = [*_SUBJECTS.items(), ("", Settings)]
    return {
        field.name: (subject, field)
        for subject, kind in kinds
        for field in msgspec.structs.fields(kind)
        if field.name not in _SUBJECTS
    }


def names() -> tuple[str, ...]:
    return tuple(_fields())


def value(settings: Settings, name: str) -> Any:
    """Return the value of a setting. Raises KeyError for one that is not known."""
    subject, _ = _fields()[name]
    return getattr(getattr(settings, subject) if subject else settings, name)


def default(name: str) -> Any:
    """Return the default of a setting. Raises KeyError for one that is not known."""
    return value(Settings(), name)


def _by_subject(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {subject: {} for subject in (*_SUBJECTS, "")}
    for name, given in values.items():
        found[_fields()[name][0]][name] = given
    return found


def _settings(values: Mapping[str, Any], *, strict: bool) -> Settings:
    """Build the settings from values by name. Raises msgspec.ValidationError."""
    parts = _by_subject(values)
    settings = convert(parts.pop(""), Settings, strict=strict)
    rules = convert(parts["rules"], Rules, strict=strict)
    display = convert(parts["display"], Display, strict=strict)
    return msgspec.structs.replace(settings, rules=rules, display=display)


def describe() -> tuple[Setting, ...]:
    """Every setting with type, default, unit and help, in order."""
    rows = []
    for name, (_, field) in _fields().items():
        kind, meta = get_args(field.type)[:2]
        if get_origin(kind) is Literal:
            type_name = " or ".join(get_args(kind))
        else:
            type_name = {tuple: "list of names", dict: "table"}.get(get_origin(kind), "")
            type_name = type_name or kind.__name__
        rows.append(
            Setting(
                name=name,
                type=type_name,
                default=_shown(default(name)),
                unit=(meta.extra or {}).get("unit", ""),
                help=meta.description or "",
            )
        )
    return tuple(rows)


def table_row(row: Setting) -> str:
    """A setting as a line of `docs/volunteer-settings.md`."""
    default = f"`{row.default}`" if row.default else "empty"
    unit = f" ({row.unit})" if row.unit else ""
    kind = row.type.replace("|", "\\|")
    return f"| `{row.name}` | {kind}{unit} | {default} | {row.help} |"


def directories(environ: Mapping[str, str] | None = None, profile: str = "") -> Directories:
    """All directories, below $VOLUNTEER_HOME if that is set, made on the way.

    Raises Configuration.
    """
    environ = os.environ if environ is None else environ
    name = profile or environ.get(PROFILE, "") or "default"
    if not all(c.isalnum() or c in "-_." for c in name) or name.startswith(".") or len(name) > 64:
        raise Configuration(
            Sentence(
                'a profile name has 1 to 64 letters, digits, "-", "_" and ".": not "{name}"',
                name=escaped(name),
            )
        )
    place = f"{name}@{_host()}"
    if home := environ.get(HOME):
        base = Path(home).expanduser().absolute()
        config, data, cache = base, base / "profiles", base / "cache"
    else:
        from platformdirs import user_cache_path, user_config_path, user_data_path

        config = user_config_path("volunteer", appauthor=False)
        data = user_data_path("volunteer", appauthor=False) / "profiles"
        cache = user_cache_path("volunteer", appauthor=False)
    return Directories(
        config=private_directory(config),
        profile=private_directory(data / place),
        cache=private_directory(cache / place),
    )


def load(
    flags: Mapping[str, Any] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    path: Path,
) -> Loaded:
    """The settings in force; flags that are None do not count.

    Raises BadRequest for a wrong flag, Configuration for what is wrong elsewhere.
    """
    environ = os.environ if environ is None else environ
    given = {name: value for name, value in (flags or {}).items() if value is not None}
    layers = [
        ("config.toml", _from_file(path)),
        ("environment", _from_environment(environ)),
        (FLAG, given),
    ]
    merged: dict[str, Any] = {}
    sources = dict.fromkeys(names(), "default")
    for source, values in layers:
        where = str(path) if source == "config.toml" else source
        merged |= check(values, where, strict=source == "config.toml")
        sources |= dict.fromkeys(values, source)
    return Loaded(settings=_settings(merged, strict=True), sources=sources, path=path)


def check(values: Mapping[str, Any], where: str, *, strict: bool = True) -> dict[str, Any]:
    """The values with their right types, or the nearest known name, or what a value must be.

    Raises BadRequest for a flag, Configuration for what is kept somewhere.
    """
    kind: type[VolunteerError] = BadRequest if where == FLAG else Configuration
    place = _PLACES.get(where, where)
    for name in values:
        if name not in names():
            raise kind(
                Sentence(
                    '{place}: unknown setting "{name}": {hint}',
                    place=place,
                    name=escaped(name),
                    hint=hint(name, names()),
                )
            )
    try:
        settings = _settings(values, strict=strict)
    except msgspec.ValidationError as error:
        raise kind(_complaint(place, error, typed=not strict)) from error
    return {name: value(settings, name) for name in values}


_PLACES = {
    FLAG: Sentence("the command line"),
    "environment": Sentence("the environment"),
    "settings": Sentence("settings"),
}


def _complaint(place: str, error: msgspec.ValidationError, *, typed: bool) -> Sentence:
    """Return what is wrong with the value of a setting; it is the value `problem` by itself. All
    that is `typed` is a text, so that is not what is wrong with it.
    """
    what, _, inside = str(error).partition(" - at `$")
    what = what.removesuffix(", got `str`") if typed else what
    name = inside.rstrip("`").lstrip(".")
    if not name:  # a rule of ours, over several settings
        said = error.__cause__.args[0] if error.__cause__ is not None else what
        return Sentence("{place}: {problem}", place=place, problem=said)
    subject, _field = _fields()[re.split(r"[.\[]", name)[0]]
    right = choices(_SUBJECTS.get(subject, Settings), name) if "enum value" in what else ()
    problem = in_words(what, right)
    return Sentence('{place}: setting "{name}": {problem}', place=place, name=name, problem=problem)


def save(path: Path, changes: Mapping[str, Any]) -> None:
    """Write changed settings into config.toml, whole or not at all; comments, other keys and the
    order of the lines stay as they are.

    Raises Configuration.
    """
    import tomlkit  # only writing needs it

    values = check(changes, "settings")
    before = _from_file(path)
    text = path.read_bytes().decode() if path.exists() else ""
    document = tomlkit.parse(text)
    for name, wanted in values.items():
        known = document.get(name)
        if isinstance(wanted, dict) and isinstance(known, MutableMapping):
            for key in set(known) - set(wanted):
                del known[key]
            known.update(wanted)
        elif isinstance(wanted, dict):
            table = tomlkit.inline_table()
            table.update(wanted)
            document[name] = table
        else:
            plain = list(wanted) if isinstance(wanted, tuple) else wanted
            if name not in before or before[name] != plain:
                document[name] = plain
    write_whole(path, tomlkit.dumps(document).encode())


def _host() -> str:
    name = socket.gethostname().partition(".")[0].lower()
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in name)[:64] or "host"


def _from_file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise Configuration(
            Sentence("{path} cannot be read: {why}", path=path, why=why(error))
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise Configuration(
            Sentence(
                "the settings file {path} is not TOML ({error}); correct it, or move it away to "
                "start with defaults",
                path=path,
                error=error,
            )
        ) from error


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    known = {PREFIX + name.upper(): name for name in names()}
    found: dict[str, Any] = {}
    for variable, text in environ.items():
        if not variable.startswith(PREFIX) or variable in (HOME, PROFILE, JOIN) or not text:
            continue
        if variable not in known:
            near = nearest(variable[len(PREFIX) :], names())
            if near:  # what looks like a slip; others may have variables of their own
                raise Configuration(
                    Sentence(
                        "unknown variable {variable}: did you mean {known}?",
                        variable=variable,
                        known=PREFIX + near.upper(),
                    )
                )
            continue
        found[known[variable]] = listed(known[variable], text)
    return found


def listed(name: str, text: str) -> str | list[str] | dict[str, str]:
    """A value typed as text; lists are separated by commas, of a table each entry is
    `name=value`.
    """
    standard = default(name) if name in _fields() else None
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if isinstance(standard, dict):
        pairs = [part.partition("=") for part in parts]
        return {key.strip(): value.strip() for key, _, value in pairs}
    return parts if isinstance(standard, tuple) else text


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(value)
    if isinstance(value, dict):
        return ", ".join(f"{name}={item}" for name, item in value.items())
    return f"{value:g}" if isinstance(value, float) else str(value).lower()
