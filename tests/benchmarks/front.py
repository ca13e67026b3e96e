"""A volunteer's front end over a thread that really trains, for `bench_screen`: orders come by one
pipe, times go by another.

    python -m tests.benchmarks.front screen|lines ORDERS TIMES

An order is a model ("small" or "large") and how often to train a task of it. For each one the
seconds that training took are written, and after a pause the instant (of the monotonic clock) at
which nothing of ours was left on the device.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from shared.clock import SystemClock
from shared.workloads.base import Job, TrainSettings
from tests.benchmarks.reports import training
from tests.support.workloads.tiny_gpt import WORKLOAD, Folder, job, sums
from volunteer.control import commands, events
from volunteer.control.control import Control
from volunteer.control.event_bus import EventBus
from volunteer.headless import Headless
from volunteer.training.job import TrainingJob, TrainingReport
from volunteer.training.trainer import Trainer

# What a volunteer trains in earnest, and what takes long enough to be paused in the middle.
MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "small": ({"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 64, "dropout": 0.0}, 16),
    "large": ({"n_layer": 6, "n_head": 6, "n_embd": 384, "block_size": 128, "dropout": 0.0}, 32),
}


class Works:
    """Trains on orders, and emits the events that an agent would."""

    def __init__(self, data: Folder, hub: EventBus, times: TextIO) -> None:
        self.hub = hub
        self.trainer = Trainer("cpu", threads=1)
        self._data = data
        self._times = times
        self._made: dict[str, tuple[Job, Any]] = {}

    async def obey(self, command: commands.Command[Any]) -> None:
        if isinstance(command, commands.Pause):
            self.trainer.pause()
            threading.Thread(target=self._note_rest, daemon=True).start()
            self.hub.emit(events.Paused(device="", by="you", message="paused"))
        elif isinstance(command, commands.Resume):
            self.trainer.resume()
            self.hub.emit(events.Resumed(device=""))
        elif isinstance(command, commands.Stop):
            self.hub.close()

    def _note_rest(self) -> None:
        self.trainer.resting.wait()
        self.write(time.monotonic())

    def write(self, seconds: float) -> None:
        self._times.write(f"{seconds!r}\n")
        self._times.flush()

    def task(self, name: str) -> tuple[Job, Any]:
        """A task of a model, and the weights that it begins with."""
        if name not in self._made:
            config, batch = MODELS[name]
            model = WORKLOAD.config(config, self._data.manifest)
            steps = sum(WORKLOAD.samples(model, self._data.manifest)) // batch
            lesson = TrainSettings(lr=1e-3)
            made = job(model, steps, batch, start=0, stop=steps * batch, train=lesson)
            self._made[name] = made, WORKLOAD.init(model, 0)
        return self._made[name]

    async def train(self, name: str, number: int) -> float:
        """Train; return the seconds."""
        task, weights = await asyncio.wrap_future(self.trainer.call(lambda: self.task(name)))
        spent: list[float] = []
        loop = asyncio.get_running_loop()

        def tell(report: TrainingReport) -> None:
            self.hub.emit(training(report))

        def pass_on(report: TrainingReport) -> None:
            loop.call_soon_threadsafe(tell, report)

        for _ in range(number):
            handle = self.trainer.submit(
                TrainingJob(
                    device="cpu",
                    begin=lambda: WORKLOAD.begin(task, weights, self._data, "cpu"),
                    finish=lambda work, took: spent.append(took.train_s),
                    samples=task.stop - task.start,
                    report=pass_on,
                    halved=lambda micro: None,
                )
            )
            await asyncio.wrap_future(handle.future)
        return sum(spent)


def beginning() -> Iterator[events.AnyEvent]:
    """A volunteer that has just claimed a task."""
    yield events.Started(
        coordinator="", server="bench", nickname="n", fingerprint="", volunteer_id="v"
    )
    yield events.Connection(online=True)
    yield events.Claimed(
        task=1,
        attempt=1,
        run="bench",
        workload="gpt",
        device="cpu",
        steps=1,
        samples=1,
        price_micro=1,
        finish_by=time.time() + 9999,
    )


async def serve(front: str, orders: Path, times: Path) -> None:
    """Serve until the front end exits."""
    loop, hub = asyncio.get_running_loop(), EventBus(SystemClock())
    lines: asyncio.Queue[str] = asyncio.Queue()

    def read() -> None:
        with orders.open() as file:
            for line in file:
                loop.call_soon_threadsafe(lines.put_nowait, line)

    with tempfile.TemporaryDirectory() as directory, times.open("w") as out:
        works = Works(sums(Path(directory)), hub, out)
        works.trainer.start()
        threading.Thread(target=read, daemon=True).start()

        async def follow() -> None:
            for event in beginning():
                hub.emit(event)
            while True:
                name, number = (await lines.get()).split()
                works.write(await works.train(name, int(number)))

        following = asyncio.create_task(follow())
        control = Control(hub, works.obey)
        if front == "screen":
            from volunteer.tui.app import VolunteerApp

            await VolunteerApp(control).run_async()
        else:
            await Headless(control, sys.stdout, json=False).run()
        following.cancel()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])))
    os._exit(0)
