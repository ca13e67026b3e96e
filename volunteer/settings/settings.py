"""Settings and directories of the volunteer: flag over environment (`VOLUNTEER_*`) over config.toml
over default.

The metadata of each field describes the setting for the command line, the settings screen, error
messages and `docs/volunteer-settings.md`. No secret is a setting.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from shared.errors import Configuration, why
from shared.files.text_file import unmarked
from shared.sentences import Sentence
from shared.settings import SettingRow, SettingsTable, read_file
from shared.text import escaped
from volunteer.files import private_directory, write_whole
from volunteer.i18n.catalogue import N_
from volunteer.settings.display import Display
from volunteer.settings.host_profile import keep_mark, profile_directory
from volunteer.settings.work_rules import GIB_MAX, WorkRules

PREFIX = "VOLUNTEER_"
# Variables that are not settings: directories, profile, unattended joining.
HOME, PROFILE, JOIN = f"{PREFIX}HOME", f"{PREFIX}PROFILE", f"{PREFIX}JOIN"


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of this volunteer: these fields, the work rules and the display's fields.

    Flags, variables and config.toml use one flat list of names.
    """

    rules: WorkRules = WorkRules()
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
            le=GIB_MAX,
            extra={"unit": "GiB"},
        ),
    ] = 0.0
    cache_gb: Annotated[
        float,
        Meta(
            description=N_("Most disk for weights and data that are kept to save downloads."),
            ge=0.1,
            le=GIB_MAX,
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
    ] = ("gpt", "dcgan", "gomoku", "causal-lm", "rollouts")
    consent: Annotated[
        Literal["all", "asked"],
        Meta(
            description=N_(
                '"all": joining a coordinator accepts the licences of its runs, which are '
                'shown; "asked": help only runs whose licence you accepted.'
            )
        ),
    ] = "all"
    public: Annotated[
        bool, Meta(description=N_("Show your nickname on the public leaderboard."))
    ] = True
    max_tasks: Annotated[
        int, Meta(description=N_("End after this many submitted tasks; 0 = no end."), ge=0)
    ] = 0
    hub: Annotated[
        bool,
        Meta(
            description=N_(
                "Fetch the public base model of a run from its hub, or the mirror in "
                "HF_ENDPOINT, and from the coordinator only what is missing there."
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
    priority: Annotated[
        Literal["low", "normal"],
        Meta(description=N_("Priority of the whole process against your other programs.")),
    ] = "low"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Meta(description=N_("Least important log line shown on standard error.")),
    ] = "warning"


class LoadedSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Effective settings, and the source of each: "flag", "environment", "config.toml" or
    "default".
    """

    settings: Settings
    sources: dict[str, str]
    path: Path

    @property
    def rows(self) -> tuple[SettingRow, ...]:
        """Return every setting with its value and its source."""
        return TABLE.rows(self.settings, self.sources)


class Directories(msgspec.Struct, frozen=True, kw_only=True):
    """Directories of this volunteer; profiles are per machine, because a home may be shared."""

    config: Path
    profile: Path  # identity, results, unfinished tasks
    cache: Path  # downloads, which can be repeated
    former_host: str = ""  # name of the machine when the profile was made, if it differed


TABLE = SettingsTable(Settings, PREFIX, (HOME, PROFILE, JOIN))


def directories(environ: Mapping[str, str] | None = None, profile: str = "") -> Directories:
    """Return the directories, moved by $VOLUNTEER_HOME, and make missing directories. Raises
    Configuration.
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
    if home := environ.get(HOME):
        base = Path(home).expanduser().absolute()
        config, data, cache = base, base / "profiles", base / "cache"
    else:
        from platformdirs import user_cache_path, user_config_path, user_data_path

        config = user_config_path("volunteer", appauthor=False)
        data = user_data_path("volunteer", appauthor=False) / "profiles"
        cache = user_cache_path("volunteer", appauthor=False)
    folder = profile_directory(data, name, _host()).name
    directories = Directories(
        config=private_directory(config),
        profile=private_directory(data / folder),
        cache=private_directory(cache / folder),
        former_host="" if folder == f"{name}@{_host()}" else folder.partition("@")[2],
    )
    keep_mark(directories.profile)
    return directories


def load(
    flags: Mapping[str, object] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    path: Path,
) -> LoadedSettings:
    """Return the effective settings; a flag that is None was not given.

    Raises BadRequest for a wrong flag, Configuration for another wrong value.
    """
    file = path if path.exists() else None
    settings, sources = TABLE.load(flags or {}, os.environ if environ is None else environ, file)
    return LoadedSettings(settings=settings, sources=sources, path=path)


def save(path: Path, changes: Mapping[str, object]) -> None:
    """Write changed settings into config.toml, atomically; comments, other keys and the order of
    lines stay.

    Raises Configuration.
    """
    import tomlkit  # only writing needs it

    values = TABLE.check(changes, "settings")
    before = read_file(path) if path.exists() else {}
    text = unmarked(path.read_bytes()).decode() if path.exists() else ""
    document = tomlkit.parse(text)
    for name, value in values.items():
        current = document.get(name)
        if isinstance(value, dict) and isinstance(current, MutableMapping):
            for key in set(current) - set(value):
                del current[key]
            current.update(value)
        elif isinstance(value, dict):
            table = tomlkit.inline_table()
            table.update(value)
            document[name] = table
        else:
            plain = list(value) if isinstance(value, tuple) else value
            if name not in before or before[name] != plain:
                document[name] = plain
    try:
        write_whole(path, tomlkit.dumps(document).encode())
    except OSError as error:
        raise Configuration(
            Sentence("{path} cannot be written: {why}", path=path, why=why(error))
        ) from error


def _host() -> str:
    name = socket.gethostname().partition(".")[0].lower()
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in name)[:64] or "host"
