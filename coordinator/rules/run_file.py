"""The run file: one TOML table that says all about a run.

Every key that is not given has a default that works.

Parsing is strict: an unknown key is refused with the nearest known one, a wrong type with the
sentence that msgspec gives.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Literal, dataclass_transform

import msgspec

from shared import decoding
from shared.errors import InvalidRunFile
from shared.workloads.base import TrainSettings

NAME_CHARS_MAX = 64
NAME_RULE = f"1 to {NAME_CHARS_MAX} letters, digits, '-', '_' and '.', the first a letter or digit"


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(msgspec.field,))
class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the tables of a run file."""


class TaskSettings(Settings):
    """`[task]`: how the pass is cut into leases."""

    local_steps: int = 50  # optimiser steps of one task
    by_speed: bool = True  # a worker much slower than the median gets as many as take the same time
    # if > 0, every task is sized to its worker's measured speed instead
    target_seconds: float = 0.0
    batch_size: int = 16
    min_steps: int = 5
    max_steps: int = 5000
    inner_state: Literal["keep", "reset"] = "keep"
    lease_floor_seconds: float = 120.0
    max_failures: int = 3  # by distinct workers, then the task is discarded
    max_timeouts: int = 8
    in_flight: int = 2  # leases one worker may hold: one in work, one prefetched
    options: dict[str, Any] = {}  # the workload's own


class StopSettings(Settings):
    """`[stop]`: whichever comes first. 0 or empty = never."""

    versions: int = 0
    passes: int = 0
    tokens: int = 0
    date: str = ""  # ISO 8601, UTC
    loss: float = 0.0


class ValidationSettings(Settings):
    """`[validation]`"""

    # refuse above median + max(norm_limit x 1.4826 MAD, 2 x median) of the cohort
    norm_limit: float = 6.0
    clip_until: float = 1.0  # ... but up to this many times that limit, scale down to it instead
    loss_limit: float = 3.0  # refuse a reported loss above this many times the global one
    cohort: int = 32
    cohort_min: int = 8  # below it norms are clipped, not refused


class CreditSettings(Settings):
    """`[credit]`"""

    credits_per_step: float = 0.0  # of the reference batch; 0 = from estimated FLOPs


class EvaluationSettings(Settings):
    """`[evaluation]`"""

    every: int = 1  # versions between evaluations; 0 = only version 0
    budget_seconds: float = 30.0
    gate: bool = False
    prompt: str = ""
    sample_every: int = 1


class RetentionSettings(Settings):
    """`[retention]`: latest and best are always kept, and whatever a live lease refers to."""

    latest: int = 5
    every: int = 50


class RunFile(Settings):
    """A whole run file. `plan` stays a raw table here: `coordinator.plan.plan.plan` reads it."""

    name: str
    workload: str
    dataset: str = ""
    description: str = ""
    licence: str = "CC0-1.0"
    contact: str = ""
    seed: int = 0
    weight: float = 1.0
    model: dict[str, Any] = {}
    task: TaskSettings = TaskSettings()
    train: TrainSettings = TrainSettings()
    stop: StopSettings = StopSettings()
    plan: dict[str, Any] = {}
    validation: ValidationSettings = ValidationSettings()
    credit: CreditSettings = CreditSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    retention: RetentionSettings = RetentionSettings()


def fits_a_path(name: str) -> bool:
    """Return True if a run or dataset may have this name: it stands in paths, addresses and command
    lines.
    """
    plain = all(c.isalnum() or c in "-_." for c in name)
    return 0 < len(name) <= NAME_CHARS_MAX and plain and name[0].isalnum()


def _check_keys(table: Mapping[str, Any], struct: type[msgspec.Struct], where: str) -> None:
    known = {field.encode_name: field for field in msgspec.structs.fields(struct)}
    for key, value in table.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            hint = f'did you mean "{near[0]}"?' if near else f"known: {', '.join(sorted(known))}"
            raise InvalidRunFile(f'unknown key "{key}" in {where}: {hint}')
        kind = known[key].type
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and isinstance(value, dict):
            _check_keys(value, kind, f"[{key}]")


def _is_date(text: str) -> bool:
    try:
        datetime.fromisoformat(text)
    except ValueError:
        return False
    return True


def _check_ranges(run: RunFile) -> None:
    stop, keep = run.stop, run.retention
    rules = [
        (run.task.local_steps >= 1, "[task] local_steps must be at least 1"),
        (run.task.batch_size >= 1, "[task] batch_size must be at least 1"),
        (1 <= run.task.min_steps <= run.task.max_steps, "[task] needs 1 <= min_steps <= max_steps"),
        (1 <= run.task.in_flight <= 16, "[task] in_flight must be between 1 and 16"),
        (run.task.target_seconds >= 0, "[task] target_seconds must not be negative"),
        (run.train.lr > 0, "[train] lr must be above zero"),
        (run.weight > 0, "weight must be above zero"),
        (run.credit.credits_per_step >= 0, "[credit] credits_per_step must not be negative"),
        (run.validation.norm_limit > 0, "[validation] norm_limit must be above zero"),
        (run.validation.clip_until >= 1, "[validation] clip_until must be at least 1"),
        (
            run.task.max_failures >= 1 and run.task.max_timeouts >= 1,
            "[task] max_failures and max_timeouts must be at least 1",
        ),
        (run.task.lease_floor_seconds > 0, "[task] lease_floor_seconds must be above zero"),
        (
            min(stop.versions, stop.passes, stop.tokens, stop.loss) >= 0,
            "[stop] versions, passes, tokens and loss must not be negative; 0 = never",
        ),
        (
            not stop.date or _is_date(stop.date),
            f'[stop] date "{stop.date[:40]}" is no ISO 8601 date: write it like 2027-01-31T18:00',
        ),
        (fits_a_path(run.name), f"name must be {NAME_RULE}"),
        (run.evaluation.every >= 0, "[evaluation] every must not be negative"),
        (
            keep.latest >= 1 and keep.every >= 0,
            "[retention] latest must be at least 1, and every not negative",
        ),
    ]
    for holds, sentence in rules:
        if not holds:
            raise InvalidRunFile(sentence)


def parse(text: str, defaults: Mapping[str, Mapping[str, Any]] | None = None) -> RunFile:
    """Read a run file; `defaults` are tables for keys that it does not give.

    Raises InvalidRunFile with what is wrong.
    """
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidRunFile(f"this is not TOML: {error}") from error
    for name, values in (defaults or {}).items():
        given = table.get(name, {})
        if isinstance(given, dict):
            table[name] = {**values, **given}
    return from_table(table)


def from_table(table: Mapping[str, Any]) -> RunFile:
    """The run file of an already decoded table. Raises InvalidRunFile."""
    for key in ("name", "workload"):
        if not table.get(key):
            raise InvalidRunFile(f'the run file needs a line {key} = "..."')
    _check_keys(table, RunFile, "the run file")
    try:
        run = decoding.convert(dict(table), RunFile)
    except msgspec.ValidationError as error:
        raise InvalidRunFile(decoding.complaint(error, "run file")) from error
    _check_ranges(run)
    return run


def encode(run: RunFile) -> str:
    """As stored with the run: JSON with every default written out."""
    return msgspec.json.encode(run).decode()


def decode(stored: str) -> RunFile:
    """The inverse of `encode`."""
    return decoding.decode(stored, RunFile)
