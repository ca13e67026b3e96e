"""Settings and directories of the volunteer: flag over environment (`VOLUNTEER_*`) over config.toml
over default.

What a setting means is written once, here, as its metadata; the command line, the settings screen,
the error messages and `docs/volunteer-settings.md` are made from it. No secret is a setting.
"""

from __future__ import annotations

import difflib
import os
import socket
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta

from shared.decoding import convert, in_words
from shared.errors import BadRequest, Configuration, VolunteerError
from volunteer.files import private_directory, write_whole
from volunteer.settings.display import Looks

PREFIX = "VOLUNTEER_"
FLAG = "flag"  # the source of what the command line says
# Variables that are no settings: where everything lies, which profile, how to join unattended.
HOME, PROFILE, JOIN = f"{PREFIX}HOME", f"{PREFIX}PROFILE", f"{PREFIX}JOIN"
GIB = 1 << 30
_Seconds = {"unit": "s"}


class Settings(Looks, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of this volunteer."""

    device: Annotated[
        str,
        Meta(
            description='Devices to lend: "auto" (the best one), "all", or names such as "cpu" '
            'or "cuda:0,cuda:1".',
            min_length=1,
            max_length=256,
        ),
    ] = "auto"
    threads: Annotated[
        int,
        Meta(description="Torch threads; 0 = physical cores minus one.", ge=0, le=1024),
    ] = 0
    memory_gb: Annotated[
        float,
        Meta(
            description="Most memory a task may need; 0 = what the device has.",
            ge=0,
            extra={"unit": "GiB"},
        ),
    ] = 0.0
    cache_gb: Annotated[
        float,
        Meta(
            description="Most disk for weights and data that are kept to save downloads.",
            ge=0.1,
            extra={"unit": "GiB"},
        ),
    ] = 10.0
    runs: Annotated[
        tuple[str, ...],
        Meta(description="Help only these runs; empty = any that fits.", max_length=64),
    ] = ()
    workloads: Annotated[
        tuple[str, ...],
        Meta(description="Installed workloads that may run on this machine.", max_length=64),
    ] = ("gpt", "dcgan", "gomoku")
    consent: Annotated[
        Literal["all", "asked"],
        Meta(
            description='"all": joining a coordinator is a yes to the licence of its runs, which '
            'is shown; "asked": help only runs you said yes to.'
        ),
    ] = "all"
    public: Annotated[bool, Meta(description="Show your nickname on the public leaderboard.")] = (
        True
    )
    max_tasks: Annotated[
        int, Meta(description="End when so many tasks are handed in; 0 = no end.", ge=0)
    ] = 0
    prefetch: Annotated[
        bool, Meta(description="Fetch the next task while the current one trains.")
    ] = True
    snapshot_seconds: Annotated[
        float,
        Meta(
            description="Save a half-done task this often, so that a restart goes on with it; 0 "
            "= never.",
            ge=0,
            extra=_Seconds,
        ),
    ] = 30.0
    quit_seconds: Annotated[
        float,
        Meta(
            description="When asked to end, still finish a task that needs no longer than this.",
            ge=0,
            le=600,
            extra=_Seconds,
        ),
    ] = 20.0
    priority: Annotated[
        Literal["low", "normal"],
        Meta(description="Priority of the whole process against your other programs."),
    ] = "low"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Meta(description="Least important log line shown on standard error."),
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


def names() -> tuple[str, ...]:
    return tuple(field.name for field in msgspec.structs.fields(Settings))


def describe() -> tuple[Setting, ...]:
    """Every setting with type, default, unit and help, in order."""
    rows, standard = [], Settings()
    for field in msgspec.structs.fields(Settings):
        kind, meta = get_args(field.type)[:2]
        if get_origin(kind) is Literal:
            type_name = " or ".join(get_args(kind))
        else:
            type_name = {tuple: "list of names", dict: "table"}.get(get_origin(kind), "")
            type_name = type_name or kind.__name__
        rows.append(
            Setting(
                name=field.name,
                type=type_name,
                default=_shown(getattr(standard, field.name)),
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
        raise Configuration(f'a profile name holds letters, digits, "-", "_" and ".": not "{name}"')
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
    return Loaded(settings=Settings(**merged), sources=sources, path=path)


def check(values: Mapping[str, Any], where: str, *, strict: bool = True) -> dict[str, Any]:
    """The values with their right types, or the nearest known name, or what a value must be.

    Raises BadRequest for a flag, Configuration for what is kept somewhere.
    """
    problem: type[VolunteerError] = BadRequest if where == FLAG else Configuration
    place = "the command line" if where == FLAG else where
    for name in values:
        if name not in names():
            near = difflib.get_close_matches(name, names(), n=1, cutoff=0.5)
            hint = f'did you mean "{near[0]}"?' if near else f"known: {', '.join(names())}"
            raise problem(f'{place}: unknown setting "{name}": {hint}')
    try:
        settings = convert(dict(values), Settings, strict=strict)
    except msgspec.ValidationError as error:
        what, _, where_in = str(error).partition(" - at `$")
        name = where_in.rstrip("`").lstrip(".")
        named = f'setting "{name}": ' if name else ""
        raise problem(f"{place}: {named}{in_words(what)}") from error
    return {name: getattr(settings, name) for name in values}


def save(path: Path, changes: Mapping[str, Any]) -> None:
    """Write changed settings into config.toml; the other lines stay as they are.

    Raises Configuration.
    """
    values = check(changes, "settings")
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    wanted = _from_file(path) | values
    lines = text.splitlines()
    for name, value in values.items():
        line = f"{name} = {_toml(value)}"
        places = [i for i, old in enumerate(lines) if old.partition("=")[0].strip() == name]
        if places:
            lines[places[0]] = line
        else:
            lines.append(line)
    text = "\n".join(lines) + "\n"
    if not _says(text, wanted):  # values over several lines: write the file anew
        text = "".join(f"{name} = {_toml(value)}\n" for name, value in wanted.items())
    write_whole(path, text.encode())


def _host() -> str:
    name = socket.gethostname().partition(".")[0].lower()
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in name)[:64] or "host"


def _from_file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise Configuration(f"the settings file {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise Configuration(
            f"the settings file {path} is not TOML ({error}); correct it, or move it away to "
            "start with defaults"
        ) from error


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    known = {PREFIX + name.upper(): name for name in names()}
    found: dict[str, Any] = {}
    for variable, text in environ.items():
        if not variable.startswith(PREFIX) or variable in (HOME, PROFILE, JOIN) or not text:
            continue
        if variable not in known:
            near = difflib.get_close_matches(variable, known, n=1, cutoff=0.85)
            if near:  # what looks like a slip; others may have variables of their own
                raise Configuration(f"unknown variable {variable}: did you mean {near[0]}?")
            continue
        found[known[variable]] = listed(known[variable], text)
    return found


def listed(name: str, text: str) -> str | list[str] | dict[str, str]:
    """A value typed as text; lists are separated by commas, of a table each entry is
    `name=value`.
    """
    default = getattr(Settings(), name, None)
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if isinstance(default, dict):
        pairs = [part.partition("=") for part in parts]
        return {key.strip(): value.strip() for key, _, value in pairs}
    return parts if isinstance(default, tuple) else text


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(value)
    if isinstance(value, dict):
        return ", ".join(f"{name}={item}" for name, item in value.items())
    return f"{value:g}" if isinstance(value, float) else str(value).lower()


def _toml(value: object) -> str:
    if isinstance(value, tuple | list):
        return f"[{', '.join(_toml(item) for item in value)}]"
    if isinstance(value, dict):
        inside = ", ".join(f"{_toml(name)} = {_toml(item)}" for name, item in value.items())
        return f"{{ {inside} }}" if inside else "{}"
    if isinstance(value, str):
        # A JSON string is a TOML basic string, but for one control character that JSON leaves as it
        # is.
        return msgspec.json.encode(value).decode().replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _says(text: str, wanted: Mapping[str, Any]) -> bool:
    try:
        return check(tomllib.loads(text), "settings") == check(wanted, "settings")
    except (tomllib.TOMLDecodeError, Configuration):
        return False
