"""A whole `volunteer` that trains a GPT of 10 M and answers prompts of its run: the CPU that an
answer takes from its training.

Seconds of CPU do not depend on who else uses the cores. First the volunteer only trains, which
gives the CPU of a step; then it is asked, one prompt after the other, and what it used beyond its
steps is what the answers cost.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, Any

import psutil

from tests.benchmarks.serving_side import OFF, PROMPTS, RUN, prepare, streamed
from tests.support.server_process import Process

ANSWERS, TOKENS = 5, 128  # asked, and tokens of each: the default of an answer
QUIET_STEPS = 40
MINUTE_S = 60.0
LIMIT_S = 1800.0
TRAINED = RUN.replace("local_steps = 2", "local_steps = 200").replace(
    "[serve]", '[serve]\nanswered_by = "volunteers"'
)


class Lent:
    """A volunteer's process, and how many steps it has trained."""

    def __init__(self, folder: Path, link: str) -> None:
        home = {f"XDG_{kind}_HOME": str(folder) for kind in ("CONFIG", "DATA", "STATE", "CACHE")}
        options = ("--no-ui", "--json", "--device", "cpu", "--threads", "1", "--set", "serve=true")
        self.child = subprocess.Popen(
            [sys.executable, "-m", "volunteer", *options],
            env=os.environ | home | {"VOLUNTEER_JOIN": link},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._tasks: dict[int, int] = {}  # the last step of each
        assert self.child.stdout
        threading.Thread(target=self._read, args=(self.child.stdout,), daemon=True).start()

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            said = json.loads(line)
            if said.get("type") == "Training":
                self._tasks[said["task"]] = said["step"]

    @property
    def steps(self) -> int:
        return sum(self._tasks.values())

    def cpu(self) -> float:
        times = psutil.Process(self.child.pid).cpu_times()
        return float(times.user + times.system)

    async def more(self, steps: int) -> tuple[float, int]:
        """Wait for more steps, from a report on; return CPU and steps since then."""
        start = await self.told()
        cpu = self.cpu()
        while self.steps < start + steps:
            await asyncio.sleep(0.01)
        return self.cpu() - cpu, self.steps - start

    async def told(self) -> int:
        known = self.steps
        while self.steps == known:
            await asyncio.sleep(0.01)
        return self.steps

    def close(self) -> None:
        self.child.kill()
        self.child.wait()


async def measure(folder: Path) -> dict[str, Any]:
    """Return the CPU of a step and of an answer, and the share of a minute that is left."""
    made = await prepare(folder / "trained", TRAINED)
    with Process(made.path, "--port", "0", **OFF) as server:
        lent = Lent(folder / "lent", server.link)
        try:
            async with asyncio.timeout(LIMIT_S):
                await lent.more(5)  # which loads all that there is to load
                await streamed(server.port, made.key, PROMPTS[0], 2)
                await lent.more(5)
                cpu, steps = await lent.more(QUIET_STEPS)
                each = cpu / steps
                start, began = await lent.told(), lent.cpu()
                for prompt in PROMPTS[:ANSWERS]:
                    await streamed(server.port, made.key, prompt, TOKENS)
                ended = await lent.told()
                used = lent.cpu() - began
        finally:
            lent.close()
    answer = max(0.0, used - (ended - start) * each) / ANSWERS
    return {
        "step_cpu_s": round(each, 3),
        "answer_cpu_s": round(answer, 2),
        "training_beside_an_answer_a_minute": round(1 - answer / MINUTE_S, 3),
    }
