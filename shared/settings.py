"""Settings of a program: a frozen struct that is filled in layers, flag over environment over file
over default.

The metadata of each field describes the setting for the command line, the settings screen, the
messages and the documentation. A field that is itself a struct holds the settings of one subject;
flags, variables and the file use one flat list of names. A field without a description is not a
setting.

Tables of a run file, a plan, a workload and a scenario are structs too; `read_table` checks them.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, NamedTuple, Self, TypeVar, get_args, get_origin

import msgspec
from msgspec import Meta

from shared.decoding import choices, complaint, convert, in_words
from shared.errors import BadRequest, Configuration, InvalidRunFile, VolunteerError, why
from shared.files.text_file import read_text
from shared.files.toml_text import DEEP_MAX, fault
from shared.nearest_name import hint, nearest
from shared.sentences import Sentence
from shared.text import escaped

S = TypeVar("S", bound=msgspec.Struct)

FLAG, ENVIRONMENT = "flag", "environment"  # sources besides a file and "default"
_PLACES = {  # a source, as messages name it
    FLAG: Sentence("the command line"),
    ENVIRONMENT: Sentence("the environment"),
    "settings": Sentence("settings"),
}
_OF_SERVICE = re.compile(r"_(SERVICE_(HOST|PORT)|PORT_\d+_)")  # variables that Kubernetes sets
_NAMES = {tuple: "list of names", dict: "table"}


class SettingRow(msgspec.Struct, frozen=True, kw_only=True):
    """One setting as a person sees it, its value, and the source of the value."""

    name: str
    value: Any
    source: str  # "flag", "environment", the name of a file, "default"
    type: str
    default: str
    unit: str
    help: str

    @property
    def line(self) -> str:
        """Return the setting as a line of a table in Markdown."""
        default = f"`{self.default}`" if self.default else "empty"
        unit = f" ({self.unit})" if self.unit else ""
        return f"| `{self.name}` | {self.type}{unit} | {default} | {self.help} |"


class _Field(NamedTuple):
    subject: str  # "" for a field of the program's own struct
    type: object
    meta: Meta


class SettingsTable(Generic[S]):
    """Settings of a program, by name: reading, checks and descriptions."""

    def __init__(self, kind: type[S], prefix: str, foreign: Collection[str] = ()) -> None:
        """Describe a settings struct. Its environment variables begin with `prefix`; the variables
        named in `foreign` belong to others and are ignored.
        """
        self._kind = kind
        self._prefix = prefix
        self._foreign = foreign

    @cached_property
    def _fields(self) -> dict[str, _Field]:
        fields: dict[str, _Field] = {}
        for field in msgspec.structs.fields(self._kind):
            inside = isinstance(field.type, type) and issubclass(field.type, msgspec.Struct)
            subject = field.name if inside else ""
            for setting in msgspec.structs.fields(field.type) if inside else (field,):
                kind, *metas = get_args(setting.type) or (setting.type,)
                if metas and isinstance(metas[0], Meta) and metas[0].description:
                    fields[setting.name] = _Field(subject, kind, metas[0])
        return fields

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(self._fields)

    def value(self, settings: S, name: str) -> Any:
        """Return the value of a setting. Raises KeyError for an unknown setting."""
        subject = self._fields[name].subject
        return getattr(getattr(settings, subject) if subject else settings, name)

    def default(self, name: str) -> object:
        """Return the default of a setting. Raises KeyError for an unknown setting."""
        return self.value(self._kind(), name)

    def rows(
        self, settings: S | None = None, sources: Mapping[str, str] | None = None
    ) -> tuple[SettingRow, ...]:
        """Return every setting in the struct's order, with its value in `settings`, or by
        default.
        """
        return tuple(
            SettingRow(
                name=name,
                value=self.value(settings or self._kind(), name),
                source=(sources or {}).get(name, "default"),
                type=_type_name(field.type),
                default=plain_text(self.default(name)),
                unit=(field.meta.extra or {}).get("unit", ""),
                help=field.meta.description or "",
            )
            for name, field in self._fields.items()
        )

    def load(
        self, flags: Mapping[str, object], environ: Mapping[str, str], file: Path | None
    ) -> tuple[S, dict[str, str]]:
        """Return the settings in force, and the source of each: "default", "environment", "flag" or
        the name of `file`. A flag that is None is not set.

        Raises BadRequest for a wrong flag, Configuration for a wrong file, variable or value.
        """
        overrides = {name: value for name, value in flags.items() if value is not None}
        merged: dict[str, object] = {}
        sources = dict.fromkeys(self.names, "default")
        if file is not None:
            read = read_file(file)
            merged |= self.check(read, str(file))
            sources |= dict.fromkeys(read, file.name)
        for source, values in ((ENVIRONMENT, self.variables(environ)), (FLAG, overrides)):
            merged |= self.check(values, source, strict=False)
            sources |= dict.fromkeys(values, source)
        return self._settings(merged), sources

    def check(
        self, values: Mapping[str, object], where: str, *, strict: bool = True
    ) -> dict[str, object]:
        """Return the values, converted to the types of their settings; only without `strict` is a
        text converted to a number or a list.

        Raises BadRequest for a wrong flag, Configuration for another wrong value. The error has the
        nearest known name, or says what a value must be.
        """
        kind: type[VolunteerError] = BadRequest if where == FLAG else Configuration
        place = _PLACES.get(where, where)
        for name in values:
            if name not in self._fields:
                raise kind(
                    Sentence(
                        '{place}: unknown setting "{name}": {hint}',
                        place=place,
                        name=escaped(name),
                        hint=hint(name, self.names),
                    )
                )
        try:
            settings = self._settings(values, strict=strict)
        except msgspec.ValidationError as error:
            raise kind(self._complaint(place, error, typed=not strict)) from error
        return {name: self.value(settings, name) for name in values}

    def variables(self, environ: Mapping[str, str]) -> dict[str, object]:
        """Return the settings of environment variables. Raises Configuration for a near miss of a
        name; other unknown variables under our prefix are allowed, as orchestrators set some.
        """
        values: dict[str, object] = {}
        for variable, text in environ.items():
            if not text or not variable.startswith(self._prefix) or variable in self._foreign:
                continue
            name = variable.removeprefix(self._prefix).lower()
            if name in self._fields and variable.isupper():
                values[name] = self.listed(name, text)
            elif near := nearest(name, self.names):
                raise Configuration(
                    Sentence(
                        "unknown variable {variable}: did you mean {known}?",
                        variable=variable,
                        known=self._prefix + near.upper(),
                    )
                )
        return values

    def ignored(self, environ: Mapping[str, str]) -> list[str]:
        """Return the variables with our prefix that name no setting; variables that an orchestrator
        sets for a service are left out.
        """
        return sorted(
            variable
            for variable in environ
            if variable.startswith(self._prefix)
            and variable not in self._foreign
            and variable.removeprefix(self._prefix).lower() not in self._fields
            and not _OF_SERVICE.search(variable)
        )

    def listed(self, name: str, text: str) -> str | list[str] | dict[str, str]:
        """Split the text of a list or table at its commas; a table's entries are `name=value`."""
        kind = get_origin(self._fields[name].type) if name in self._fields else None
        parts = [part.strip() for part in text.split(",") if part.strip()]
        if kind is dict:
            pairs = [part.partition("=") for part in parts]
            return {key.strip(): value.strip() for key, _, value in pairs}
        return parts if kind is tuple else text

    def _settings(self, values: Mapping[str, Any], *, strict: bool = True) -> S:
        """Build the settings. Raises msgspec.ValidationError."""
        table: dict[str, Any] = {}
        for name, value in values.items():
            subject = self._fields[name].subject
            (table.setdefault(subject, {}) if subject else table)[name] = value
        return convert(table, self._kind, strict=strict)

    def _complaint(self, place: str, error: msgspec.ValidationError, *, typed: bool) -> Sentence:
        """Return the sentence about a setting's wrong value. A `typed` value comes from a command
        line or the environment: it is always a text, so the sentence does not mention its type.
        """
        problem, _, inside = str(error).partition(" - at `$")
        problem = problem.removesuffix(", got `str`") if typed else problem
        path = inside.rstrip("`").lstrip(".")
        first, _, rest = path.partition(".")
        name = path if re.split(r"[.\[]", first)[0] in self._fields else rest
        if not name:  # a rule over several settings
            reason = error.__cause__.args[0] if error.__cause__ is not None else problem
            return Sentence("{place}: {problem}", place=place, problem=reason)
        valid = choices(self._kind, path) if "enum value" in problem else ()
        reason = in_words(problem, valid)
        return Sentence(
            '{place}: setting "{name}": {problem}', place=place, name=name, problem=reason
        )


def read_file(path: Path) -> dict[str, object]:
    """Return the table of a settings file. Raises Configuration."""
    text = ""
    try:
        text = read_text(path)
        return tomllib.loads(text)
    except OSError as error:
        raise Configuration(
            Sentence("{path} cannot be read: {why}", path=path, why=why(error))
        ) from error
    except (ValueError, RecursionError) as error:
        raise Configuration(
            Sentence(
                "the settings file {path} is not TOML ({error}); correct it, or move it away to "
                "start with defaults",
                path=path,
                error=fault(text, error),
            )
        ) from error


def parse_toml(text: str, name: str) -> dict[str, object]:
    """Return the table of a text in TOML. Raises InvalidRunFile."""
    try:
        return tomllib.loads(text.removeprefix("\ufeff"))
    except (ValueError, RecursionError) as error:
        raise InvalidRunFile(f"{name} is not TOML: {fault(text, error)}") from error


def read_table(
    raw: Mapping[str, object],
    kind: type[S],
    where: str,
    error: type[VolunteerError] = InvalidRunFile,
) -> S:
    """Return a table as a struct. Raises `error` for an unknown key (with the nearest known one), a
    wrong type, a value out of bounds, or a failed check of the struct.
    """
    check_values(raw, where, error)  # first, since it limits the depth that the others walk down
    _check_names(raw, kind, where, error)
    try:
        return convert(dict(raw), kind)
    except msgspec.ValidationError as wrong:
        if isinstance(wrong.__cause__, VolunteerError):
            raise wrong.__cause__ from None
        raise error(escaped(complaint(wrong, where, kind), 300)) from wrong


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """Table of a run file, checked when it is read."""

    PLACE: ClassVar[str] = "[model]"

    @classmethod
    def from_dict(cls, raw: Mapping[str, object]) -> Self:
        """Return a checked table as a struct. Raises InvalidRunFile as `read_table` does."""
        return read_table(raw, cls, cls.PLACE)

    def to_dict(self) -> dict[str, object]:
        """Return the table with every default written out."""
        return msgspec.structs.asdict(self)


def check_keys(
    keys: Iterable[str],
    names: Collection[str],
    where: str,
    error: type[VolunteerError] = InvalidRunFile,
) -> None:
    """Raise `error` for an unknown key, with the nearest known one, or all if none is near."""
    for key in keys:
        if key not in names:
            raise error(f'unknown key "{escaped(key)}" in {where}: {hint(key, names)}')


@cache
def _fields_of(kind: type[msgspec.Struct]) -> tuple[msgspec.structs.FieldInfo, ...]:
    return msgspec.structs.fields(kind)


def _check_names(
    table: Mapping[str, object], kind: type[msgspec.Struct], where: str, error: type[VolunteerError]
) -> None:
    """Raise `error` for an unknown key, also in inner tables that forbid unknown keys."""
    check_keys(table, kind.__struct_encode_fields__, where, error)
    for field in _fields_of(kind):
        key, value = field.encode_name, table.get(field.encode_name)
        tables = [value]
        if get_origin(field.type) is dict and isinstance(value, Mapping):
            tables = [*value.values()]
        for inner in _structs(field.type):
            for one in tables:
                if isinstance(one, Mapping):
                    _check_names(one, inner, f"[{key}]", error)
            for number, item in enumerate(value if isinstance(value, list | tuple) else (), 1):
                if isinstance(item, Mapping):
                    place = f"{key.removesuffix('s')} {number} of {where}"
                    _check_names(item, inner, place, error)


def _structs(kind: Any) -> Iterator[type[msgspec.Struct]]:
    """Yield the structs named in a type annotation that forbid unknown keys."""
    struct = isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    if struct and kind.__struct_config__.forbid_unknown_fields:
        yield kind
    for inner in get_args(kind):
        yield from _structs(inner)


def check_values(
    table: Mapping[str, object], where: str, error: type[VolunteerError] = InvalidRunFile
) -> None:
    """Raise `error` for NaN, infinity, whole numbers over 64 bits, and tables nested too deep."""
    place = f"{where} " if where.startswith("[") else ""
    waiting: list[tuple[str, object, int]] = [
        (place + key, value, 1) for key, value in table.items()
    ]
    while waiting:
        key, value, depth = waiting.pop()
        if depth > DEEP_MAX:
            raise error(f"{escaped(key)} nests more than {DEEP_MAX} tables or lists")
        if isinstance(value, dict):
            # cut, since many values may lie below one long name
            waiting += [(f"{key}.{name}"[:200], v, depth + 1) for name, v in value.items()]
        elif isinstance(value, list):
            waiting += [(key, inner, depth + 1) for inner in value]
        elif isinstance(value, float) and not math.isfinite(value):
            raise error(f"{escaped(key)} = {value} is not a finite number")
        elif isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            raise error(f"{escaped(key)} is too large: whole numbers have 64 bits")


def _type_name(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(get_args(kind))
    return _NAMES.get(get_origin(kind) or kind) or str(kind.__name__)


def plain_text(value: object) -> str:
    """Return the value of a setting as text, as settings files and tables show it."""
    if isinstance(value, tuple | list):
        return ", ".join(map(str, value))
    if isinstance(value, dict):
        return ", ".join(f"{name}={item}" for name, item in value.items())
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
