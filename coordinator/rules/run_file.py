"""Run file: one TOML table that defines a run. Most keys have a default that works; `name` and
`workload` have none.

Parsing is strict: an unknown key is refused with the nearest known one, a wrong type with msgspec's
message.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, dataclass_transform

import msgspec
from msgspec import Meta

from coordinator.plan.privacy import PrivacySettings
from shared.decoding import MALFORMED
from shared.decoding import decode as decoded
from shared.errors import InvalidRunFile
from shared.settings import check_keys, parse_toml, read_table
from shared.text import escaped
from shared.workloads.base import RunTable, TrainSettings

NAME_CHARS_MAX = 64
NAME_RULE = f"1 to {NAME_CHARS_MAX} letters, digits, '-', '_' and '.', the first a letter or digit"
SUITES_MAX = 8
TASK_CREDITS_MAX = 1e9  # 1e15 micro-credits: sums of many tasks stay far below 64 bits

# Least steps of tasks that the server sizes (docs/experiments.md): with a fresh optimiser, and
# with a momentum that the run shares.
SIZED_STEPS = 30
SIZED_STEPS_SHARED = 15

Steps = Annotated[int, Meta(ge=1, le=1_000_000)]
Versions = Annotated[int, Meta(ge=0, le=1_000_000_000)]
CountOrOff = Annotated[int, Meta(ge=0, le=1 << 53)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Share = Annotated[float, Meta(ge=0, le=1)]
Factor = Annotated[float, Meta(gt=0, le=1e9)]
Line = Annotated[str, Meta(max_length=1000)]
Text = Annotated[str, Meta(max_length=100_000)]


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(msgspec.field,))
class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the tables of a run file."""


class TaskSettings(Settings):
    """`[task]`: how the pass is divided into leases."""

    # Optimiser steps of one task. 0: the server sizes tasks by the run's measured step and transfer
    # times, from `RunFile.steps` up.
    local_steps: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    by_speed: bool = True  # a much slower worker gets fewer steps, which take the same time
    # If > 0, every task is sized to take its worker this long instead, by the worker's measured
    # speed.
    target_seconds: Seconds = 0.0
    batch_size: Steps = 16
    min_steps: Steps = 5
    max_steps: Steps = 5000
    lease_floor_seconds: Annotated[float, Meta(gt=0, le=1e9)] = 120.0
    max_failures: Annotated[int, Meta(ge=1, le=10_000)] = (
        3  # failures by distinct volunteers after which the task is discarded
    )
    max_timeouts: Annotated[int, Meta(ge=1, le=10_000)] = 8
    # leases that one device may hold: one in work, one prefetched
    in_flight: Annotated[int, Meta(ge=1, le=16)] = 2
    options: dict[str, Any] = {}  # options of the workload


class DataSettings(Settings):
    """`[data]`: place of the samples, and the weight of the members that keep them."""

    # "members": each machine trains on data of its own, which never leaves it; `dataset` is an
    # example of it.
    at: Literal["coordinator", "members"] = "coordinator"
    # share of a member's samples that is never trained on, and measures the versions
    heldout_share: Annotated[float, Meta(gt=0, lt=0.5)] = 0.1
    # no member weighs more in a merge than this times its equal share
    cap: Annotated[float, Meta(ge=1, le=1e6)] = 2.0
    best: Literal["mean", "worst"] = "mean"  # loss over the members that chooses the best version


class StopSettings(Settings):
    """`[stop]`: conditions of the end; the first one met counts. 0 or empty = never."""

    versions: Versions = 0
    passes: Versions = 0
    tokens: CountOrOff = 0
    date: Line = ""  # ISO 8601, UTC
    loss: Annotated[float, Meta(ge=0, le=1e9)] = 0.0


class ValidationSettings(Settings):
    """`[validation]`: limits beyond which a contribution is refused."""

    # refuse above median + max(norm_limit x 1.4826 MAD, norm_room x median) of the cohort
    norm_limit: Factor = 6.0
    norm_room: Factor = 2.0
    # a norm up to this many times that limit is scaled down to it, not refused
    clip_until: Annotated[float, Meta(ge=1, le=1e9)] = 1.0
    loss_limit: Factor = 3.0  # a reported loss above this many times the newest one is refused


class CreditSettings(Settings):
    """`[credit]`: price of the work."""

    # price of one training step with the run's batch_size; 0 = by the estimated FLOPs
    credits_per_step: Annotated[float, Meta(ge=0, le=1e6)] = 0.0


class EvaluationSettings(Settings):
    """`[evaluation]`: how often versions are evaluated."""

    every: Versions = 1  # versions between evaluations; 0 = only version 0
    budget_seconds: Seconds = 30.0
    gate: bool = False
    prompt: Text = ""
    sample_every: Versions = 1
    # Task suites, by the names of their datasets. Suites measure version 0, then the next evaluated
    # version after every `suites_every` versions, and the last version of the run.
    suites: Annotated[tuple[Line, ...], Meta(max_length=SUITES_MAX)] = ()
    suites_every: Versions = 10  # 0 = only the first and the last version


class TrustSettings(Settings):
    """`[trust]`: least share of contributions that is recomputed; on open servers at least 0.03."""

    recompute: Share = 0.0


class RetentionSettings(Settings):
    """`[retention]`: latest, best and leased versions are always kept."""

    latest: Annotated[int, Meta(ge=1, le=1_000_000)] = 5
    every: Versions = 50


class TierSettings(Settings):
    """`[[serve.tiers]]`: limits of an account by its credits."""

    credits: Annotated[float, Meta(ge=0, le=1e12)] = 0.0  # credits that the account has or spent
    requests_per_minute: Annotated[int, Meta(ge=1, le=100_000)] = 30
    tokens: Annotated[int, Meta(ge=1, le=1 << 20)] = 256  # most tokens of one answer
    # most tokens of all open requests of an account
    tokens_waiting: Annotated[int, Meta(ge=1, le=1 << 30)] = 2048


def _tier(credits: float, requests: int, tokens: int) -> TierSettings:
    return TierSettings(
        credits=credits,
        requests_per_minute=requests,
        tokens=tokens,
        tokens_waiting=8 * tokens,
    )


class ChatSettings(Settings):
    """`[serve.chat]`: text form of a conversation for the model; {content} is the message."""

    system: Line = "System: {content}\n"
    user: Line = "User: {content}\n"
    assistant: Line = "Assistant: {content}\n"
    reply: Line = "Assistant:"  # beginning of the model's reply
    stop: Annotated[tuple[Line, ...], Meta(max_length=16)] = ("\nUser:",)


class ServeSettings(Settings):
    """`[serve]`: accounts that may prompt the model, and the price."""

    who: Literal["nobody", "volunteers", "keys"] = "volunteers"
    price: Annotated[float, Meta(ge=0, le=1e6)] = 1.0  # multiple of the price of training a FLOP
    free_tokens_per_day: CountOrOff = 0  # quota of each account and UTC day
    stop: Annotated[
        tuple[Line, ...], Meta(max_length=16)
    ] = ()  # an answer ends where one of these begins
    tiers: Annotated[tuple[TierSettings, ...], Meta(min_length=1, max_length=16)] = (
        _tier(0, 30, 256),
        _tier(10_000, 60, 512),
        _tier(100_000, 120, 1024),
        _tier(1_000_000, 300, 2048),
    )
    # Machines that compute answers: the organiser's alone, or also vetted volunteers', whose owners
    # can read the prompts.
    answered_by: Literal["organiser", "volunteers"] = "organiser"
    # share of an asker's price that volunteers do not get
    house_share: Annotated[float, Meta(ge=0, le=1)] = 0.1
    chat: ChatSettings = ChatSettings()


class PageSettings(Settings):
    """`[page]`: the public web page of the run."""

    # None = shown, except on a server by invitation only
    visible: bool | None = None


class RunFile(Settings):
    """Whole run file. `plan` stays a raw table here: `coordinator.plan.plan.plan` reads it."""

    name: Line
    workload: Line
    dataset: Line = ""
    description: Text = ""
    licence: Line = "CC0-1.0"
    contact: Line = ""
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0
    weight: Annotated[float, Meta(ge=1e-6, le=1e6)] = 1.0
    model: dict[str, Any] = {}
    data: DataSettings = DataSettings()
    task: TaskSettings = TaskSettings()
    train: TrainSettings = TrainSettings()
    stop: StopSettings = StopSettings()
    plan: dict[str, Any] = {}
    validation: ValidationSettings = ValidationSettings()
    credit: CreditSettings = CreditSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    trust: TrustSettings = TrustSettings()
    privacy: PrivacySettings = PrivacySettings()
    retention: RetentionSettings = RetentionSettings()
    serve: ServeSettings = ServeSettings()
    page: PageSettings = PageSettings()

    @property
    def steps(self) -> int:
        """Return the optimiser steps of one task, or the least number if tasks are sized."""
        least = SIZED_STEPS_SHARED if self.model.get("shared_momentum") else SIZED_STEPS
        return self.task.local_steps or least


def fits_a_path(name: str) -> bool:
    """Return True if a run or dataset may have this name, which goes into paths and addresses."""
    plain = all(c.isalnum() or c in "-_." for c in name)
    return 0 < len(name) <= NAME_CHARS_MAX and plain and name[0].isalnum()


def stop_at(stop: StopSettings) -> datetime:
    """Return the instant of a `[stop] date`. Raises InvalidRunFile for a text that is no date."""
    try:
        when = datetime.fromisoformat(stop.date)
    except ValueError as error:
        raise InvalidRunFile(
            f'[stop] date "{escaped(stop.date, 40)}" is no ISO 8601 date: write it like '
            "2027-01-31T18:00"
        ) from error
    return when if when.tzinfo else when.replace(tzinfo=UTC)


def check_stop(stop: StopSettings, now: float) -> None:
    """Raise InvalidRunFile for a past date, since the run would end at its start."""
    if stop.date and stop_at(stop).timestamp() <= now:
        raise InvalidRunFile(f"[stop] date {stop.date} (UTC) has passed: choose a later one")


def check_passes(data: DataSettings, stop: StopSettings) -> None:
    """Raise InvalidRunFile for passes as the end of a run whose members each have their own."""
    if data.at == "members" and stop.passes:
        raise InvalidRunFile(
            "[stop] passes: every member has passes of its own data: end the run by versions, "
            "tokens, date or loss"
        )


def _check_together(run: RunFile) -> None:
    """Check the keys that depend on each other. Raises InvalidRunFile."""
    if run.stop.date:
        stop_at(run.stop)
    check_passes(run.data, run.stop)
    task, price = run.task, run.credit.credits_per_step
    rules = [
        (task.min_steps <= task.max_steps, "[task] needs 1 <= min_steps <= max_steps"),
        (fits_a_path(run.name), f"name must be {NAME_RULE}"),
        (
            price * max(run.steps, task.max_steps) <= TASK_CREDITS_MAX,
            f"[credit] credits_per_step = {price:g} pays more than {TASK_CREDITS_MAX:.0f} credits "
            "for one task: lower it, or lower [task] local_steps and max_steps",
        ),
        (
            run.data.at == "coordinator" or not run.trust.recompute,
            "[trust] recompute: nobody else has the data of a member, so that its work cannot be "
            "done again",
        ),
    ]
    for holds, sentence in rules:
        if not holds:
            raise InvalidRunFile(sentence)


def parse(text: str, defaults: Mapping[str, Mapping[str, object]] | None = None) -> RunFile:
    """Parse a run file; `defaults` are tables for missing keys.

    Raises InvalidRunFile that names the mistake.
    """
    table = parse_toml(text, "this")
    for name, values in (defaults or {}).items():
        table_read = table.get(name, {})
        if isinstance(table_read, dict):
            table[name] = {**values, **table_read}
    return from_table(table)


def written_tables(text: str) -> dict[str, RunTable]:
    """Return the tables of a run file, with the keys that it writes."""
    table = parse_toml(text, "this")
    return {name: value for name, value in table.items() if isinstance(value, dict)}


def from_table(table: Mapping[str, object]) -> RunFile:
    """Return the run file of a decoded table. Raises InvalidRunFile."""
    check_keys(table, RunFile.__struct_encode_fields__, "the run file")
    for key in ("name", "workload"):
        if not table.get(key):
            raise InvalidRunFile(f'the run file needs a line {key} = "..."')
    run = read_table(table, RunFile, "the run file")
    _check_together(run)
    return run


def encode(run: RunFile) -> str:
    """Return the stored form of a run file: JSON with every default filled in."""
    return msgspec.json.encode(run).decode()


def decode(text: str) -> RunFile:
    """Return the run file of a stored form. Raises InvalidRunFile for a damaged form."""
    try:
        return decoded(text, RunFile)
    except MALFORMED as error:
        raise InvalidRunFile(f"its stored run file cannot be read ({error})") from error
