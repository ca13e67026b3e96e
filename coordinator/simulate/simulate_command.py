"""The command `coordinator simulate`: a file in, figures out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from coordinator.log import configure
from coordinator.simulate import loop
from coordinator.simulate.prediction import predict, told
from coordinator.simulate.scenario import parse
from coordinator.simulate.simulation import Hooks, MergedHead, simulate
from shared.errors import InvalidRunFile, why

Progress = Callable[[float, int], None]  # share of the time, newest version


def run(
    file: Path, *, hours: float = 0.0, as_json: bool = False, progress: Progress | None = None
) -> str:
    """The prediction for a scenario file, for a person or as JSON.

    Raises InvalidRunFile, InvalidPlan.
    """
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRunFile(f"the scenario {file} cannot be read: {why(error)}") from error
    scenario = parse(text, file.parent)
    if hours > 0:
        scenario = msgspec.structs.replace(scenario, hours=hours)
    configure("error", as_json=False)  # thousands of merges need no line each
    tell = progress or (lambda share, version: None)

    def seen(head: MergedHead) -> None:
        tell(min(0.99, head.seconds / (scenario.hours * 3600)), head.row.version)

    outcome = loop.run(simulate(scenario, Hooks(on_version=seen)))
    tell(1.0, len(outcome.merged_at))
    prediction = predict(outcome)
    if as_json:
        return msgspec.json.encode(prediction).decode()
    return told(prediction, outcome.traces)
