"""Scenario of a simulation: the machines that might come, and the run.

Read from TOML; every key has a default.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, dataclass_transform

import msgspec
from msgspec import Meta

from shared.errors import InvalidRunFile, why
from shared.files.text_file import read_text
from shared.settings import parse_toml, read_table
from shared.workloads.base import Role

Positive = Annotated[float, Meta(gt=0, le=1e12)]
NotNegative = Annotated[float, Meta(ge=0, le=1e12)]
Share = Annotated[float, Meta(ge=0, lt=1)]


def example() -> str:
    """Return a scenario to begin from."""
    return (files("coordinator.simulate") / "example.toml").read_text(encoding="utf-8")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(msgspec.field,))
class ScenarioTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the tables of a scenario."""


class Workers(ScenarioTable):
    """`[[workers]]`: machines of one kind."""

    name: str = "volunteer"
    count: Annotated[int, Meta(ge=1, le=10_000)] = 1
    roles: Annotated[tuple[Role, ...], Meta(min_length=1)] = ("play", "learn", "train")
    steps_per_s: Positive = 1.0
    episodes_per_s: Positive = 1.0  # games, or problems with all answers to each
    spread: Share = 0.0  # speed of each machine of the kind differs by up to this share
    jitter: Share = 0.03  # share by which the speed of one machine varies between tasks
    up_mbit: Positive = 20.0
    down_mbit: Positive = 50.0
    latency_ms: NotNegative = 30.0  # time of one request and its answer
    overhead_s: NotNegative = 0.2  # time of a task besides training: reading, encoding, loading
    join_after_minutes: NotNegative = 0.0
    leave_after_minutes: NotNegative = 0.0  # time after which it leaves and stays away; 0 = never
    waits: bool = False  # waits for the merge of its last work, however long that takes
    lost_per_hour: NotNegative = 0.0  # mean number of times that it vanishes in an hour of work
    back_after_minutes: NotNegative = 5.0  # time until a vanished machine returns


class Server(ScenarioTable):
    """`[server]`: the coordinator's own link, shared by all transfers, and its judge."""

    up_mbit: Positive = 1000.0
    down_mbit: Positive = 1000.0
    judge_s: NotNegative = 0.0  # seconds that its judge takes for an episode


class ScenarioModel(ScenarioTable):
    """`[model]`: the size of a run too large to be simulated."""

    parameters: Annotated[int, Meta(ge=0, le=1 << 50)] = 0  # 0 = as in the run's own [model]


class ScenarioData(ScenarioTable):
    """`[data]`: the run's imagined dataset, or the episodes that its machines make."""

    items: Annotated[int, Meta(ge=1, le=1 << 50)] = 10_000_000  # tokens or images
    chunk_bytes: Annotated[int, Meta(ge=1, le=1 << 40)] = 2 << 20
    vocab_size: Annotated[int, Meta(ge=2, le=1 << 20)] = 4096
    episode_bytes: Annotated[float, Meta(ge=64, le=1 << 18)] = 1000.0
    episode_samples: Positive = 20.0  # positions of a game, or answers that teach of a problem


class Scenario(ScenarioTable):
    """Whole scenario file."""

    seed: int = 1
    hours: Positive = 1.0
    run: dict[str, Any] = {}
    model: ScenarioModel = ScenarioModel()
    data: ScenarioData = ScenarioData()
    server: Server = Server()
    workers: Annotated[tuple[Workers, ...], Meta(min_length=1, max_length=1000)] = (
        Workers(count=2),
    )


def parse(text: str, directory: Path = Path()) -> Scenario:
    """Parse a scenario; `run.file` is read relative to `directory`. Raises InvalidRunFile."""
    return from_table(parse_toml(text, "the scenario"), directory)


def from_table(table: Mapping[str, object], directory: Path = Path()) -> Scenario:
    """Return the scenario of a decoded table. Raises InvalidRunFile."""
    if not isinstance(table.get("run"), dict):
        raise InvalidRunFile(
            'a scenario needs a table [run] with a workload and a plan, or with file = "RUN.toml"; '
            "`coordinator simulate --example` prints one"
        )
    scenario = read_table(table, Scenario, "the scenario")
    return msgspec.structs.replace(scenario, run=_run_table(scenario.run, directory))


def _run_table(run: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    table = dict(run)
    if "file" in table:
        path = directory / str(table.pop("file"))
        try:
            read = parse_toml(read_text(path), str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRunFile(f"the run file {path} cannot be read: {why(error)}") from error
        table = read | table
    return {"name": "simulated"} | table
