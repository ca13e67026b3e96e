"""FlowerTune's set-up on ours and on Flower in the same call: members with dialogues of their own,
split by topic, train adapters of one small Llama.

    python -m tests.benchmarks.bench_flowertune --flower ENV/bin/python --json flowertune.json
    python -m tests.benchmarks.bench_flowertune --members 4 --rounds 3 --turns 1          ours alone

Base weights, first adapter, rank, local steps, batch, AdamW and its rate, clipping and weights by
samples are the same; each round has every member. Ours is a real `coordinator serve` and a real
`volunteer --no-ui` a member, each with its account, folder and sockets; they fork from a process
that has imported PyTorch, which shortens their start. Flower is its simulation, for it the faster
of its two engines, and with `--node-rounds` also a SuperLink and a SuperNode a member, which is
what ours does. ENV has `pip install 'flwr[simulation]' torch transformers peft`. One evaluator
measures all adapters after the runs. Seconds are medians of the rounds after the first.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coordinator.config import Settings
from coordinator.services import opened
from tests.benchmarks.peers.counting import CountingProxy, Moment, code_lines, counting_proxy
from tests.benchmarks.tune_setup import CONTEXT, Evaluator, write_base, write_dialogues
from tests.support.forkserver import Child, ForkServer
from tests.support.server_process import Process, forked_command

PEER = "tests.benchmarks.peers.flower_tune"
LIMIT_S = 600.0
GOAL_LOSS, GOAL_SECONDS = 0.01, 0.1
IMPORTED = (
    "torch",
    "peft",
    "transformers.models.llama.modeling_llama",
    "shared.workloads.causal_lm.train",
    "shared.workloads.causal_lm.workload",
    "volunteer.training.trainer",
)
RUN = """
name = "tune"
workload = "causal-lm"
dataset = "talk"
[data]
at = "members"
heldout_share = 0.05
[model]
from = "{folder}/base"
train = "lora"
context = {context}
[model.lora]
rank = 8
alpha = 16
targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
[task]
local_steps = {steps}
batch_size = {batch}
by_speed = false
[train]
optimizer = "adamw"
lr = {lr}
min_lr_ratio = 1.0
warmup_steps = 0
weight_decay = 0.0
[plan]
preset = "fedavg"
quorum = {members}
[stop]
versions = {rounds}
[evaluation]
every = 0
[retention]
latest = 1000
"""
COMMANDS = """
coordinator dataset add talk --chat example.jsonl --tokenizer base/tokenizer.json
coordinator run create tune.toml
coordinator run start tune
coordinator serve
volunteer join LINK
volunteer data add tune FOLDER
volunteer --no-ui
"""


class Ours:
    """One run of our programs in a folder of its own."""

    def __init__(self, options: argparse.Namespace, folder: Path, turn: int) -> None:
        self._options = options
        self._folder = folder
        self._place = folder / f"ours-{turn}"
        self._place.mkdir()
        self._data = self._place / "coordinator"
        self._fork_server = ForkServer(*IMPORTED)

    def report(self) -> dict[str, Any]:
        """Run to the end; return the times, bytes and adapters of the rounds."""
        try:
            self._create()
            server = Process(
                self._data,
                *("--port", "0"),
                command=self._fork_server,
                COORDINATOR_RATE_REGISTER="off",
            )
            with server, counting_proxy(server.port) as proxy:
                link = server.link.replace(f":{server.port}/", f":{proxy.port}/")
                moments = asyncio.run(self._work(link, proxy))
                server.stop()
            adapters = [self._exported(version) for version in range(len(moments))]
        finally:
            self._fork_server.close()
        count = self._options.members * (self._options.rounds - 1)
        first, last = moments[1], moments[-1]
        return {
            "seconds": [after.at - before.at for before, after in itertools.pairwise(moments[1:])],
            "cpu": (last.cpu_s - first.cpu_s) / (self._options.rounds - 1),
            "up": (last.up - first.up) / count,
            "down": (last.down - first.down) / count,
            "lines": code_lines(RUN, COMMANDS),
            "adapters": adapters,
        }

    def _create(self) -> None:
        file = self._place / "tune.toml"
        fields = {name: getattr(self._options, name) for name in ("steps", "batch", "lr")}
        fields |= {name: getattr(self._options, name) for name in ("members", "rounds")}
        file.write_text(RUN.format(folder=self._folder, context=CONTEXT, **fields))
        add = ("dataset", "add", "talk", "--chat", str(self._folder / "example.jsonl"))
        self._coordinator(*add, "--tokenizer", str(self._folder / "base" / "tokenizer.json"))
        self._coordinator("run", "create", str(file))
        self._coordinator("run", "start", "tune")
        self._coordinator("run", "pause", "tune")  # until every member waits for its first task

    def _coordinator(self, *words: str) -> None:
        done = forked_command(self._fork_server, *words, "--data-dir", str(self._data))
        if done.returncode:
            raise SystemExit(f"coordinator {' '.join(words)}: {done.stdout}{done.stderr}")

    def _exported(self, version: int) -> Path:
        to = self._place / f"version-{version}"
        words = ("--version", str(version), "--format", "peft", "--to", str(to))
        self._coordinator("run", "export", "tune", *words)
        return to / "adapter_model.safetensors"

    async def _work(self, link: str, proxy: CountingProxy) -> list[Moment]:
        """Let all members join, add their data and work; return end and bytes of each round."""
        members = range(self._options.members)
        pair = asyncio.Semaphore(os.cpu_count() or 1)

        async def prepare(member: int) -> None:
            async with pair:
                await self._volunteer(member, "join", link, "--name", f"member-{member}")
                source = str(self._folder / f"member-{member}")
                await self._volunteer(member, "data", "add", "tune", source, "--yes")

        await asyncio.gather(*map(prepare, members))
        workers = [await self._started(member, "--no-ui", "--json") for member in members]
        try:
            while not all('"Idle"' in worker.said() for worker in workers):
                self._check(workers)
                await asyncio.sleep(0.2)
            await asyncio.to_thread(self._coordinator, "run", "resume", "tune")
            return await self._rounds(workers, proxy)
        finally:
            for worker in workers:
                worker.kill()

    async def _rounds(self, workers: Sequence[Child], proxy: CountingProxy) -> list[Moment]:
        moments: list[Moment] = []
        ends = time.monotonic() + LIMIT_S
        async with opened(Settings(data_dir=str(self._data))) as services:
            while len(moments) <= self._options.rounds:
                self._check(workers)
                if time.monotonic() > ends:
                    raise SystemExit(f"no {self._options.rounds} rounds: {workers[0].said()}")
                versions = await services.runs.queries.versions("tune", len(moments) - 1)
                moments += [proxy.moment(row.created_at) for row in versions]
                await asyncio.sleep(0.05)
        return moments

    def _check(self, workers: Sequence[Child]) -> None:
        for worker in workers:
            if not worker.alive:
                raise SystemExit(f"a member ended: {worker.said()[-2000:]}")

    async def _volunteer(self, member: int, *words: str) -> None:
        child = await self._started(member, *words)
        if await child.ended(LIMIT_S):
            raise SystemExit(f"volunteer {' '.join(words)}: {child.said()}")

    async def _started(self, member: int, *words: str) -> Child:
        environment = {
            "VOLUNTEER_HOME": str(self._place / f"home-{member}"),
            "VOLUNTEER_DEVICE": "cpu",
            "VOLUNTEER_THREADS": "1",
            "VOLUNTEER_PRIORITY": "normal",
        }
        log = self._place / f"member-{member}-{words[0].strip('-')}.log"
        return await self._fork_server.run(["volunteer", *words], log, environment)


def flower(options: argparse.Namespace, folder: Path, engine: str) -> dict[str, Any]:
    """Run Flower's program in its environment; return its report with the adapters."""
    rounds = options.rounds if engine == "simulation" else options.node_rounds
    command = [options.flower, "-m", PEER, "--folder", str(folder), "--engine", engine]
    for name, value in (("rounds", rounds), ("members", options.members)):
        command += [f"--{name}", str(value)]
    for name in ("steps", "batch", "lr"):
        command += [f"--{name}", str(getattr(options, name))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stdout[-3000:]}{done.stderr[-8000:]}")
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    out = folder / f"flower-{engine}"
    adapters = [out / f"{number}.safetensors" for number in range(rounds + 1)]
    return report | {"adapters": adapters}


def measured(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Run all systems in turns; return their reports with the losses after each round."""
    samples = options.steps * options.batch
    write_dialogues(folder, options.members, samples)
    write_base(folder)
    rows: list[dict[str, Any]] = []
    evaluator: Evaluator | None = None

    def add(system: str, report: dict[str, Any]) -> None:
        nonlocal evaluator
        if evaluator is None:
            shutil.copytree(report["adapters"][0].parent, folder / "adapter")
            evaluator = Evaluator(folder)
            assert CONTEXT // 2 < evaluator.shortest <= evaluator.longest <= CONTEXT + 1
        losses = [evaluator.loss(adapter) for adapter in report.pop("adapters")]
        load = os.getloadavg()[0]
        row = report | {"system": system, "losses": losses, "load": load}
        rows.append(row | {"seconds_a_round": statistics.median(report["seconds"])})
        print(table_line(rows[-1]), flush=True)

    for turn in range(options.turns):
        add("ours", Ours(options, folder, turn).report())
        if options.flower:
            add("flower-simulation", flower(options, folder, "simulation"))
    if options.flower and options.node_rounds:
        add("flower-nodes", flower(options, folder, "nodes"))
    return rows


def table_line(row: dict[str, Any]) -> str:
    """Return a line of the table."""
    losses = " ".join(f"{loss:.3f}" for loss in row["losses"])
    cells = (
        row["system"],
        f"{row['seconds_a_round']:.2f}",
        f"{min(row['seconds']):.2f} to {max(row['seconds']):.2f}",
        f"{row['cpu']:.1f}",
        f"{row['up'] / 1000:.0f}",
        f"{row['down'] / 1000:.0f}",
        str(row["lines"]),
        f"{row['load']:.1f}",
        losses,
    )
    return f"| {' | '.join(cells)} |"


def goals(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a sentence about each goal, by the medians of the turns."""
    rows_of_ours = [row for row in rows if row["system"] == "ours"]
    sentences: list[str] = []
    for system in ("flower-simulation", "flower-nodes"):
        beside = [row for row in rows if row["system"] == system]
        if not beside:
            continue
        ratio = statistics.median(
            row["seconds_a_round"] for row in rows_of_ours
        ) / statistics.median(row["seconds_a_round"] for row in beside)
        last = len(beside[0]["losses"]) - 1
        far = max(
            abs(row["losses"][last] / other["losses"][last] - 1)
            for row, other in itertools.product(rows_of_ours, beside)
        )
        sentences.append(
            f"{system}: seconds a round {ratio:.3f} of its (goal {GOAL_SECONDS}), "
            f"loss after round {last} within {far:.2%} (goal {GOAL_LOSS:.0%})"
        )
    return sentences


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--members", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=10, help="of each member in a round")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.003)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--node-rounds", type=int, default=0, help="of Flower with real nodes")
    parser.add_argument("--flower", default="", help="the Python of an environment with flwr")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    head = ("system", "s a round", "range", "CPU s", "KB up", "KB down", "lines", "load", "losses")
    print(f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}", sep="\n", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        rows = measured(options, Path(directory))
    print(*goals(rows), sep="\n")
    if options.json:
        options.json.write_text(json.dumps({"rows": rows}, indent=1))


if __name__ == "__main__":
    main()
