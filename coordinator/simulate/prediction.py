"""Prediction of a simulation: figures of the whole and of each machine, and the bottleneck."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from coordinator.log import configure
from coordinator.rules.advice import alone
from coordinator.rules.run_file_help import explained
from coordinator.simulate import loop
from coordinator.simulate.machine import State, Trace
from coordinator.simulate.pretended_play import PretendedPlay
from coordinator.simulate.remedies import Cause, remedies
from coordinator.simulate.scenario import parse
from coordinator.simulate.simulation import Hooks, MergedHead, SimulationResult, simulate
from shared.errors import BadRequest, InvalidRunFile, why
from shared.files.text_file import read_text
from shared.text import duration

MB = 1e6
# share of the time at work from which on the devices, or the judge, are the limit
BUSY_ENOUGH = 0.9
WORST: dict[State, str] = {
    "wait": "the wait for slower volunteers before each merge",
    "down": "the download of new versions",
    "up": "the upload of updates",
    "claim": "the lack of tasks: at the end of the last pass everybody waits for its last ones",
    "prepare": "the time of a task besides training",
}
# Gains from which on a change helps: of the share of the time at work, of the episodes an hour.
GAIN_BUSY, GAIN_PLAY = 0.02, 0.03


class Bottleneck(NamedTuple):
    """Limit of a run: its cause, and words for it."""

    cause: Cause
    words: str


# Function that is called with the remedy that is tried ("" = no remedy yet), the share of the
# simulated time that has passed, and the newest version.
Progress = Callable[[str, float, int], None]


class MachineRow(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one machine."""

    name: str
    online_s: float
    busy_share: float  # share of the time online in which it trained or played
    up_mb_per_hour: float
    down_mb_per_hour: float
    steps: int
    accepted: int
    lost: int  # results that were not accepted


class PlayFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a run that makes its own data."""

    unit: str  # of the episodes: game, problem
    per_hour: float  # accepted episodes
    behind: float  # mean of the versions by which an episode is older than the learner's base
    behind_most: int
    judge_busy_share: float  # share of the time since the first file of episodes


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a scenario's simulation."""

    seed: int
    simulated_s: float
    finished: str  # reason why the run ended early; "" = it did not
    parameters: int
    versions: int
    versions_per_hour: float
    contributions_per_version: float
    steps_per_hour: float  # sum over all machines
    device_idle_share: float
    # merged work, as a share of what the machines could have done alone, up to the last merge
    goodput: float
    up_mb_per_hour: float  # mean of a volunteer while online
    down_mb_per_hour: float
    server_mb_per_hour: float  # up and down, over the whole simulated time
    play: PlayFigures | None
    cause: Cause
    bottleneck: str
    machines: tuple[MachineRow, ...]
    advice: str = ""  # a change, and its gain when it was simulated; "" = no change gains
    beware: tuple[str, ...] = ()  # warnings about the plan


def predict(outcome: SimulationResult) -> Prediction:
    """Return the figures of a simulation's outcome."""
    rows = tuple(_row(trace) for trace in outcome.traces)
    hours = max(1e-9, outcome.seconds / 3600)
    online_h = max(1e-9, sum(row.online_s for row in rows) / 3600)
    up = sum(trace.up_bytes for trace in outcome.traces) / MB
    down = sum(trace.down_bytes for trace in outcome.traces) / MB
    spent = _seconds_by_state(outcome.traces)
    play = None if outcome.play is None else _play_figures(outcome, outcome.play)
    limit = _bottleneck(spent) if play is None else _limit(outcome.traces, play)
    versions, file = len(outcome.merged_at), outcome.about.file
    return Prediction(
        seed=outcome.scenario.seed,
        simulated_s=outcome.seconds,
        finished=outcome.finished,
        parameters=outcome.parameters,
        versions=versions,
        versions_per_hour=_pace(outcome.merged_at, outcome.seconds) * 3600,
        contributions_per_version=outcome.merged / max(1, versions),
        steps_per_hour=sum(row.steps for row in rows) / hours,
        device_idle_share=1 - _busy_share(spent),
        goodput=_goodput(outcome),
        up_mb_per_hour=up / online_h,
        down_mb_per_hour=down / online_h,
        server_mb_per_hour=(up + down) / hours,
        play=play,
        cause=limit.cause,
        bottleneck=limit.words,
        machines=rows,
        beware=alone(outcome.about.plan, noise=file.privacy.on)
        if file.data.at == "members"
        else (),
    )


def _goodput(outcome: SimulationResult) -> float:
    until = max(outcome.merged_at, default=0.0)
    alone = 0.0
    for trace in outcome.traces:
        seconds = trace.seconds(until)
        alone += trace.speed * (sum(seconds.values()) - seconds["away"])
    return outcome.merged_steps / max(1.0, alone)


def _row(trace: Trace) -> MachineRow:
    seconds = trace.seconds()
    del seconds["away"]
    online_s = sum(seconds.values())
    hours = max(1e-9, online_s / 3600)
    accepted = trace.verdicts["accepted"]
    return MachineRow(
        name=trace.name,
        online_s=online_s,
        busy_share=_busy_share(seconds),
        up_mb_per_hour=trace.up_bytes / MB / hours,
        down_mb_per_hour=trace.down_bytes / MB / hours,
        steps=trace.steps,
        accepted=accepted,
        lost=sum(trace.verdicts.values()) - accepted,
    )


def _pace(merged_at: Sequence[float], seconds: float) -> float:
    """Return the versions a second from the first merge to the last, since the start is not
    typical.
    """
    if len(merged_at) > 1 and merged_at[-1] > merged_at[0]:
        return (len(merged_at) - 1) / (merged_at[-1] - merged_at[0])
    return len(merged_at) / max(1e-9, seconds)


def _seconds_by_state(traces: Sequence[Trace]) -> Counter[State]:
    """Return the seconds of all machines by state, without the time away."""
    spent: Counter[State] = Counter()
    for trace in traces:
        spent.update(trace.seconds())
    del spent["away"]
    return spent


def _busy_share(spent: Counter[State]) -> float:
    return (spent["train"] + spent["play"]) / max(1e-9, sum(spent.values()))


def _play_figures(outcome: SimulationResult, judge: PretendedPlay) -> PlayFigures:
    per_file = judge.episodes / max(1, len(judge.judged_at))
    behind = sum((trace.behind for trace in outcome.traces), Counter[int]())
    judging_s = outcome.seconds - min(judge.judged_at, default=0.0)
    return PlayFigures(
        unit=judge.pacing.unit,
        per_hour=_pace(judge.judged_at, outcome.seconds) * per_file * 3600,
        behind=sum(gap * count for gap, count in behind.items()) / max(1, behind.total()),
        behind_most=max(behind, default=0),
        judge_busy_share=min(1.0, judge.busy_s / max(1e-9, judging_s)),
    )


def _limit(traces: Sequence[Trace], play: PlayFigures) -> Bottleneck:
    """Return the bottleneck between the machines that play, the judge and the learners."""
    unit, judging = f"{play.unit}s", play.judge_busy_share
    if judging >= BUSY_ENOUGH:
        return Bottleneck("judge", f"the judge: it checks {unit} {judging:.0%} of the time")
    players, learners = (
        _seconds_by_state([trace for trace in traces if trace.seconds()[state]])
        for state in ("play", "train")
    )
    if _busy_share(learners) >= BUSY_ENOUGH or _worst(learners) != "claim":
        limit = _bottleneck(learners)
        return Bottleneck(limit.cause, f"on machines that learn, {limit.words}")
    if (busy := _busy_share(players)) >= BUSY_ENOUGH or _worst(players) != "claim":
        words = f"the machines that play: {busy:.0%} of the time they make {unit}"
        return Bottleneck("players", words)
    return Bottleneck("apart", f"those that make {unit} and those that learn wait for each other")


def _bottleneck(spent: Counter[State]) -> Bottleneck:
    whole = sum(spent.values())
    if not whole:
        return Bottleneck("nobody", "nobody came")
    if (busy := _busy_share(spent)) >= BUSY_ENOUGH:
        return Bottleneck("devices", f"the devices: they train {busy:.0%} of the time")
    worst = _worst(spent)
    return Bottleneck(worst, f"{WORST[worst]} ({spent[worst] / whole:.0%} of the time)")


def _worst(spent: Counter[State]) -> State:
    return max(WORST, key=lambda state: spent[state])


def prediction_text(prediction: Prediction) -> str:
    """Return a prediction as text."""
    p = prediction
    lines = [
        f"simulated {duration(p.simulated_s)} with seed {p.seed}, a model of {p.parameters:,} "
        "parameters" + (f"; the run ended: {p.finished}" if p.finished else ""),
        "",
        f"  versions per hour        {p.versions_per_hour:10.1f}   ({p.versions} in all, "
        f"{p.contributions_per_version:.1f} contributions each)",
        f"  steps per hour           {p.steps_per_hour:10.0f}   of all devices together",
        f"  device idle              {p.device_idle_share:10.0%}   of the time online",
        *_goodput_lines(p),
        f"  MB up per hour           {p.up_mb_per_hour:10.1f}   of one volunteer",
        f"  MB down per hour         {p.down_mb_per_hour:10.1f}   of one volunteer",
        f"  MB per hour              {p.server_mb_per_hour:10.1f}   of the coordinator, both ways",
        *_play_lines(p.play),
        f"  bottleneck               {p.bottleneck}",
        *([f"  what would help          {p.advice}"] if p.advice else []),
        *(f"  beware                   {sentence}" for sentence in p.beware),
        "",
        f"  {'machine':16} {'busy':>5} {'MB up/h':>9} {'MB down/h':>10} {'accepted':>9} "
        f"{'in vain':>8}",
    ]
    lines += [
        f"  {row.name[:16]:16} {row.busy_share:5.0%} {row.up_mb_per_hour:9.1f} "
        f"{row.down_mb_per_hour:10.1f} "
        f"{row.accepted:9} {row.lost:8}"
        for row in p.machines
    ]
    return "\n".join(lines)


def _goodput_lines(p: Prediction) -> list[str]:
    if p.play is not None:
        return []
    return [
        f"  goodput                  {p.goodput:10.0%}   of the machines' work alone was merged "
        "(to the last merge)"
    ]


def _play_lines(play: PlayFigures | None) -> list[str]:
    if play is None:
        return []
    return [
        f"  {play.unit + 's per hour':24} {play.per_hour:10.0f}   accepted by the judge",
        f"  versions behind          {play.behind:10.1f}   of a {play.unit} when it is learnt from "
        f"({play.behind_most} at most)",
        f"  judge busy               {play.judge_busy_share:10.0%}   of the time",
    ]


def run(
    file: Path,
    *,
    hours: float | None = None,
    as_json: bool = False,
    progress: Progress | None = None,
) -> str:
    """Return a scenario file's prediction as text or JSON. Raises InvalidRunFile, InvalidPlan,
    BadRequest for `hours` that are not above 0.
    """
    try:
        text = read_text(file)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRunFile(f"the scenario {file} cannot be read: {why(error)}") from error
    try:
        scenario = parse(text, file.parent)
    except InvalidRunFile as error:
        complaint = explained(text, str(error)) if "not TOML" in str(error) else str(error)
        raise InvalidRunFile(f"{file}: {complaint}") from error
    if hours is not None:
        if hours <= 0:
            raise BadRequest(f"--hours must be above 0, not {hours:g}")
        scenario = msgspec.structs.replace(scenario, hours=hours)
    configure("error", as_json=False)  # thousands of merges need no line each
    tell = progress or (lambda remedy, share, version: None)

    def hooks(remedy: str) -> Hooks:
        def report(head: MergedHead) -> None:
            tell(remedy, min(0.99, head.seconds / (scenario.hours * 3600)), head.row.version)

        return Hooks(on_version=report)

    outcome = loop.run(simulate(scenario, hooks("")))
    prediction = predict(outcome)
    prediction = msgspec.structs.replace(
        prediction, advice=helpful_remedy(outcome, prediction, hooks)
    )
    tell("", 1.0, len(outcome.merged_at))
    if as_json:
        return msgspec.json.encode(prediction).decode()
    return prediction_text(prediction)


def helpful_remedy(
    outcome: SimulationResult, prediction: Prediction, hooks: Callable[[str], Hooks]
) -> str:
    """Return the first remedy that helps in a simulation of its own, and its gain; "" if no remedy
    helps. `hooks` makes the hooks of the simulation of a remedy.
    """
    for remedy in remedies(outcome, prediction.cause):
        changed = predict(loop.run(simulate(remedy.scenario, hooks(remedy.words))))
        if gain := _gain(prediction, changed):
            return f"{remedy.words}: {gain} (simulated)"
    return ""


def _gain(before: Prediction, after: Prediction) -> str:
    """Return a sentence on the gain by a change; "" for less than `GAIN_PLAY` or `GAIN_BUSY`."""
    if before.play is not None and after.play is not None:
        old, new = before.play.per_hour, after.play.per_hour
        unit = before.play.unit
        return f"{new:.0f} {unit}s an hour, not {old:.0f}" if new > old * (1 + GAIN_PLAY) else ""
    old, new = (1 - p.device_idle_share for p in (before, after))
    return f"devices at work {new:.0%}, not {old:.0%}" if new > old + GAIN_BUSY else ""
