"""Volunteers in the states that a screen must be able to show, told as the events an agent would
emit.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

from msgspec.structs import replace

from shared.protocol.accounts import Benchmark, Device, Me, RunInfo
from shared.protocol.base import ContributionState
from shared.protocol.contributions import Verdict
from shared.protocol.heartbeat import RunBeat
from volunteer.control import events
from volunteer.control.events import AnyEvent

CPU = Device(
    id="cpu", kind="cpu", name="AMD Ryzen 7 5800X 8-Core Processor", memory_bytes=33_500_000_000
)
GPU = Device(id="cuda:0", kind="cuda", name="NVIDIA GeForce RTX 3060", memory_bytes=12_900_000_000)
BENCHMARK = Benchmark(
    device="cpu",
    fp32_flops=412e9,
    bf16_flops=155e9,
    step_flops=118e9,
    at=1_699_990_000.0,
)
RUN = RunInfo(
    name="stdlib-gpt",
    state="running",
    workload="gpt",
    workload_version=1,
    description="A small language model of Python's standard library.",
    licence="Apache-2.0",
    contact="lab@example.org",
    dataset="stdlib",
    dataset_licence="PSF-2.0",
    parameters=3_214_592,
    version=41,
    loss=3.412,
    loss_first=8.318,
    workers=12,
    progress=0.41,
    credits_per_step=1.0,
    step_flops=2.1e9,
    memory_bytes=900_000_000,
    steps=6150,
    tokens=50_380_800,
)
ME = Me(
    volunteer_id="v-1",
    nickname="ada",
    public=True,
    state="active",
    earned_micro=1_240_500_000,
    pending_micro=50_000_000,
    spent_micro=0,
    today_micro=150_000_000,
    rank=7,
    accepted=26,
    rejected=1,
    merged=24,
    device_s=86_400.0,
    workers=(),
)
BEFORE = "def main(: self the the import = = ) ) return of of x x the in in in if == self self"
AFTER = (
    "def main(argv=None): parser = argparse.ArgumentParser(description=__doc__) "
    "parser.add_argument('--verbose', action='store_true') args = parser.parse_args(argv) return "
    "run(args)"
)


NOW = 1_700_000_000.0  # where the clock of the tests stands
Verdicts = tuple[tuple[ContributionState, str, int, int | None], ...]
VERDICTS: Verdicts = (
    ("merged", "", 50_000_000, 36),
    (
        "rejected",
        "the update is far larger than others of this run (norm 41.2, limit 9.8)",
        0,
        None,
    ),
    ("merged", "", 50_000_000, 38),
    ("superseded", "enough others were in time; paid all the same", 50_000_000, None),
    ("merged", "", 50_000_000, 40),
    ("accepted", "waits for the next merge", 50_000_000, None),
    ("checking", "somebody else recomputes a part of it", 0, None),
)


def started() -> Iterator[AnyEvent]:
    yield events.Started(
        coordinator="https://train.example.org",
        server="Little Lab",
        nickname="ada",
        fingerprint="9f3a 11c2 70be 54d1",
        volunteer_id="v-1",
    )
    yield events.Connection(online=True)
    yield events.DevicesFound(devices=(CPU,))
    yield events.Benchmarked(benchmark=BENCHMARK)
    yield events.RunsListed(runs=(RUN,))


def history() -> Iterator[AnyEvent]:
    """A morning of work: the model's curve, verdicts, credits."""
    for version in range(42):
        loss = 3.1 + 5.2 * math.exp(-version / 11) + 0.05 * math.sin(version * 1.7)
        sample = BEFORE if version == 0 else AFTER if version == 41 else ""
        mine = int(version % 7 == 3)
        yield events.LossMeasured(
            run=RUN.name, version=version, loss=loss, mine=mine, sample=sample
        )
    yield events.Credits(me=ME)
    for number, (state, message, micro, version_made) in enumerate(VERDICTS):
        yield events.Judged(
            verdict=Verdict(
                contribution=900 + number,
                task=4700 + number,
                run=RUN.name,
                state=state,
                message=message,
                version=version_made,
                credits_micro=micro,
                at=NOW - 3600 + number * 540,
            )
        )
    yield events.Traffic(sent_bytes=182_400_000, received_bytes=97_300_000)


def claimed(number: int = 4711, device: str = "cpu") -> Iterator[AnyEvent]:
    yield events.Claimed(
        task=number,
        attempt=1,
        run=RUN.name,
        workload="gpt",
        device=device,
        steps=50,
        samples=800,
        price_micro=50_000_000,
        finish_by=NOW + 522,
    )


def training(steps: int = 34, number: int = 4711, device: str = "cpu") -> Iterator[AnyEvent]:
    yield from claimed(number, device)
    dice = random.Random(7)
    for step in range(1, steps + 1):
        yield events.Training(
            task=number,
            run=RUN.name,
            device=device,
            step=step,
            steps=50,
            samples=step * 16,
            loss=3.3 + 0.5 * math.exp(-step / 12) + dice.gauss(0, 0.05),
            steps_per_s=0.187,
            tokens_per_s=383.0,
            eta_s=(50 - step) / 0.187,
            version=41,
        )


def merging() -> Iterator[AnyEvent]:
    beat = RunBeat(
        run=RUN.name,
        state="running",
        version=41,
        loss=3.412,
        needs=2,
        merge_in_s=192.0,
        workers=12,
    )
    yield events.RunProgress(beat=beat, message="merging after 2 more contributions or 3:12")


def filled() -> Iterator[AnyEvent]:
    yield from (*started(), *history(), *merging(), *training())


def empty() -> Iterator[AnyEvent]:
    """A volunteer that joined a moment ago and has done nothing yet."""
    yield from started()
    yield events.Idle(
        reason="all_taken",
        message="all tasks of stdlib-gpt are being done by others",
        until=NOW + 12,
    )


def offline() -> Iterator[AnyEvent]:
    yield from filled()
    yield events.Connection(
        online=False,
        message="Little Lab does not answer: connection refused",
        retry_at=NOW + 42,
        queued=2,
    )


def error() -> Iterator[AnyEvent]:
    """A volunteer that cannot work until its owner acts."""
    said = "this version is too old for Little Lab: run `volunteer update`"
    yield from (*started(), *history())
    yield events.Notice(level="error", message=said)
    yield events.Stopped(
        code=78,
        message=said,
        tasks=7,
        credits_micro=250_000_000,
        sent_bytes=182_400_000,
        received_bytes=97_300_000,
        seconds=4200.0,
    )


def paused() -> Iterator[AnyEvent]:
    yield from filled()
    yield events.Paused(
        device="", by="battery", message="on battery (64 %)", until="it is plugged in"
    )


MENDS = "the installed torch 2.13.0 is built for cpu: pip install --force-reinstall torch"
BROKEN = replace(GPU, id="nvidia:0", usable=False, problem=MENDS)


def two_devices() -> Iterator[AnyEvent]:
    yield from filled()
    yield events.DevicesFound(devices=(CPU, BROKEN))
    yield events.Traffic(
        sent_bytes=182_400_000, received_bytes=97_300_000, up_bytes_per_s=3e6, down_bytes_per_s=12e6
    )


def measuring() -> Iterator[AnyEvent]:
    yield from two_devices()
    yield events.BenchmarkProgress(stage="step", done=0.63, device="cpu")


def live() -> Iterator[AnyEvent]:
    """A processor and a GPU that tell all that there is, over a minute."""
    yield from filled()
    yield events.DevicesFound(devices=(GPU, CPU))
    yield events.RunProgress(beat=GAMES, message="")
    for second in range(60):
        yield events.Sensed(
            device="cpu", at=NOW + second, utilisation=0.5 + second % 7 / 20, **PROCESSOR
        )
        yield events.Sensed(
            device=GPU.id, at=NOW + second, utilisation=0.9 - second % 5 / 9, **CARD
        )


GAMES = RunBeat(
    run=RUN.name,
    state="running",
    version=41,
    loss=3.412,
    needs=2,
    merge_in_s=192.0,
    workers=12,
    episodes_per_hour=5300.0,
    measure="matches",
)
PROCESSOR: dict[str, Any] = {
    "memory_bytes": 2_000_000_000,
    "celsius": 61.0,
}
CARD: dict[str, Any] = {
    "memory_bytes": 9_000_000_000,
    "celsius": 71.0,
    "watts": 212.4,
}


SCENES: dict[str, Callable[[], Iterator[AnyEvent]]] = {
    "filled": filled,
    "empty": empty,
    "offline": offline,
    "error": error,
    "paused": paused,
    "two devices": two_devices,
    "measuring": measuring,
    "live": live,
}
