"""Runs of the recipe `reason` by real processes: a coordinator and volunteers for each seed, all at
once, and the share of held-out problems that each version solves.

    python -m tests.experiments.exp_reason --seconds 480 --seeds 1 2 3
    python -m tests.experiments.exp_reason --seconds 60 --actors 1 4
    python -m tests.experiments.exp_reason --seconds 240 --seeds 1 --volunteers 2 --adapters

With `--actors` nothing is learnt: so many actors of rollouts and of Gomoku (`--only` one of them)
answer and play by the first version, all cells at once. With `--adapters` the run learns adapters
of a model in a folder (29.5 M random weights) to write one of two sentences: what a version costs
to receive, and a token to send.

Each seed has a data directory, a port of the loopback interface, a server with its defaults, and
volunteers with homes and accounts of their own, each with one thread of the processor; the first
learns, the others answer. Figures are read from the database of the server while it works, and
printed as they come; a row of JSON with all that is known follows each table, so that a run that is
cut off leaves what it had.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import tomlkit

from coordinator.demo.demo import program

START_S = 120.0
END_S = 12.0
Figures = dict[str, Any]

MOTION = """
select count(*), coalesce(sum(samples), 0), coalesce(sum(size), 0), coalesce(sum(train_s), 0),
  coalesce(sum(json_extract(report, '$.metrics.tokens')), 0), coalesce(sum(checked_s), 0),
  coalesce(sum(state = 'rejected'), 0)
from contributions where kind = 'experience'
"""
LEARNT = """
select count(*), coalesce(sum(samples), 0), coalesce(sum(size), 0), coalesce(sum(train_s), 0),
  coalesce(sum(samples * json_extract(report, '$.metrics.answer_tokens')), 0),
  avg(json_extract(report, '$.metrics.behind')),
  avg(json_extract(report, '$.metrics.tapered')),
  coalesce(sum(state = 'rejected'), 0)
from contributions where kind = 'delta' and json_extract(report, '$.metrics.behind') is not null
"""
RATE = """
select min(received_at), max(received_at),
  (select samples from contributions where kind = 'experience' order by received_at limit 1)
from contributions where kind = 'experience'
"""
CURVE = """
select v.version, v.created_at, json_extract(e.metrics, '$.solved')
from versions v join evaluations e using (run_id, version)
where e.state = 'done' and v.version > 0 order by v.version
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Site:
    """Coordinator of one seed with its volunteers."""

    def __init__(self, cell: Cell, folder: Path, cores: set[int]) -> None:
        self.name, self.folder, self.data = cell.name, folder, folder / "coordinator"
        self.cores = cores  # of all its processes
        self.began = time.time()
        self._named: dict[str, subprocess.Popen[bytes]] = {}
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        folder.mkdir(parents=True)
        (folder / "run.toml").write_text(cell.toml)
        self._run = str(tomllib.loads(cell.toml)["name"])
        self._problems = cell.problems

    def start(self, name: str, *command: str, **more: str) -> subprocess.Popen[bytes]:
        """Start a process with one thread; its output goes to a file of its own."""
        env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **more}
        with (self.folder / f"{name}.log").open("wb") as out:
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env
            )
        os.sched_setaffinity(child.pid, self.cores)  # before it has started a thread
        self._named[name] = child
        return child

    def serve(self) -> None:
        """Make the run, and serve it."""
        of = ("--data-dir", str(self.data))
        base = self._problems.with_name("base") if self._problems else self.folder
        words = ("--tokenizer", str(base / "tokenizer.json"))
        add = ("dataset", "add", "letters", "--problems", str(self._problems), *words, *of)
        made = (
            *((add,) if self._problems else ()),
            ("run", "create", str(self.folder / "run.toml"), *of),
            ("run", "start", self._run, *of),
            ("serve", *of, "--port", str(self.port)),
        )
        lines = [shlex.join((*program("coordinator"), *words)) for words in made]
        self.start("coordinator", "sh", "-c", " && ".join([*lines[:-1], f"exec {lines[-1]}"]))

    def listening(self) -> None:
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
            except OSError:
                time.sleep(0.1)
            else:
                return
        raise TimeoutError((self.folder / "coordinator.log").read_text()[-2000:])

    def join(self, count: int) -> list[dict[str, str]]:
        """Begin to join volunteers, each with a home and an account of its own."""
        homes = [{"VOLUNTEER_HOME": str(self.folder / f"home-{n}")} for n in range(count)]
        for n, home in enumerate(homes):
            words = ("join", f"{self.url}/join", "--name", f"volunteer-{n}")
            self.start(f"join-{n}", *program("volunteer"), *words, **home)
        return homes

    def work(self, homes: list[dict[str, str]], *settings: str) -> None:
        """Start the volunteers that have joined."""
        for n in range(len(homes)):
            if self._named[f"join-{n}"].wait(START_S):
                raise TimeoutError((self.folder / f"join-{n}.log").read_text()[-2000:])
        self.began = time.time()
        for n, home in enumerate(homes):
            role = "play" if n else "learn"  # one learns, so its optimiser's moments are the newest
            how = ["--no-ui", "--json", "--threads", "1", "--device", "cpu"]
            how += ["--set", f"roles={role}", *settings]  # of two values the last one holds
            self.start(f"volunteer-{n}", *program("volunteer"), *how, **home)

    def end(self) -> None:
        """End the volunteers, then the coordinator."""
        for child in reversed(self._named.values()):
            if child.poll() is None:
                child.send_signal(signal.SIGTERM)
        until = time.monotonic() + END_S
        for child in self._named.values():
            try:
                child.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()

    def spent(self) -> dict[str, int]:
        """Seconds of the processor that the coordinator, its children and the volunteers used."""
        found: dict[str, int] = {}
        for name, child in self._named.items():
            try:
                process = psutil.Process(child.pid)
                inner = process.children(recursive=True)
                found[name] = round(sum(process.cpu_times()[:2]))
                for number, each in enumerate(inner):
                    found[f"{name}/{number}"] = round(sum(each.cpu_times()[:2]))
            except psutil.Error:
                continue
        return {name: spent for name, spent in found.items() if spent}

    def received(self) -> int:
        """Bytes that the volunteers have received, by their newest events."""
        total = 0
        for path in self.folder.glob("volunteer-*.log"):
            lines = [line for line in path.read_bytes().splitlines() if b"received_bytes" in line]
            total += int(json.loads(lines[-1])["received_bytes"]) if lines else 0
        return total

    def down(self) -> list[int]:
        """Bytes that each volunteer received for one more version, after its second task."""
        found = []
        for path in sorted(self.folder.glob("volunteer-*.log")):
            tasks, first, last, versions = 0, 0, 0, set[int]()
            for event in map(json.loads, path.read_bytes().splitlines()):
                tasks += event["type"] == "Submitted"
                if event["type"] == "Traffic" and tasks > 1:
                    last = int(event["received_bytes"])
                    first = first or last
                elif event["type"] == "Training" and first:
                    versions.add(int(event["version"]))
            found.append(round((last - first) / max(1, len(versions) - 1)))
        return found

    def figures(self) -> Figures:
        """Figures in the database of the server."""
        url = f"file:{self.data / 'coordinator.sqlite3'}?mode=ro"
        with closing(sqlite3.connect(url, uri=True, timeout=10)) as base:
            curve = base.execute(CURVE).fetchall()
            acted, learnt = base.execute(MOTION).fetchone(), base.execute(LEARNT).fetchone()
            head, size = base.execute("select max(version), max(size) from versions").fetchone()
            groups, teaching = base.execute(
                "select coalesce(sum(episodes), 0), coalesce(sum(samples), 0) from harvests"
            ).fetchone()
            first, last, early = base.execute(RATE).fetchone()
        since = first or time.time()
        took = max(1e-6, (last or since) - since)
        return {
            "cell": self.name,
            "seconds": round(time.time() - self.began),
            "warm_s": round(since - self.began),
            "version": head,
            "curve": [(v, round(at - self.began), round(x, 3)) for v, at, x in curve],
            "tasks": acted[0],
            "episodes": groups,
            "samples": teaching,
            "tokens": round(acted[4]),
            "episodes an hour": round(3600 * (acted[1] - (early or 0)) / took),
            "actors' tokens a second": round(
                acted[4] * (1 - (early or 0) / max(1, acted[1])) / took
            ),
            "of a busy actor": round(acted[4] / max(1e-6, acted[3])),
            "actors busy s": round(acted[3]),
            "learners busy s": round(learnt[3]),
            "learners' tokens a busy second": round(learnt[4] / max(1e-6, learnt[3])),
            "judge s": round(acted[5]),
            "behind": round(learnt[5] or 0.0, 2),
            "tapered": round(learnt[6] or 0.0, 3),
            "refused": [acted[6], learnt[7]],
            "bytes a token up": round(acted[2] / max(1, acted[4]), 2),
            "bytes of a version": size,
            "processor s": self.spent(),
            "bytes a version down, all": round(self.received() / max(1, head)),
            "bytes a version down, each": self.down(),
        }


def recipe(name: str, *changes: str) -> str:
    """The run file of a recipe with `table.key=value` changes."""
    path = files("coordinator.runs") / "recipes" / f"{name}.toml"
    table: Any = tomllib.loads(path.read_text(encoding="utf-8"))
    for change in changes:
        key, _, value = change.partition("=")
        *way, last = key.split(".")
        place = table
        for each in way:
            place = place.setdefault(each, {})
        place[last] = tomllib.loads(f"x = {value}")["x"]
    return tomlkit.dumps(table)


ADAPTERS = """
name = "adapters"
workload = "rollouts"
dataset = "letters"
[model]
from = "{base}"
train = "lora"
context = 16
answer = 9
[task]
local_steps = 1
batch_size = 32
[train]
lr = 1e-4
[evaluation]
every = 10
[task.options]
problems = 16
group = 16
slots = 64
window = 32
window_min = 16
chunk = 16
queue = 32
reuse = 1
warm_steps = 60
warm_lr = 1e-2
"""


def base_model(folder: Path) -> tuple[str, Path]:
    """The run file of a run of adapters, and its problems, which half of all answers solve."""
    import torch
    import transformers

    from shared.workloads.data.tokenizer import train_tokenizer

    base, path = folder / "base", folder / "letters.jsonl"
    base.mkdir(parents=True)
    answers = [f"letter {'AB'[n % 3 % 2]}" for n in range(2000)]
    rows = [{"prompt": f"{n}:", "answer": said} for n, said in enumerate(answers)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (base / "tokenizer.json").write_bytes(train_tokenizer(["0123456789"], 257))
    shape = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8}
    shape |= {"num_attention_heads": 8, "vocab_size": 4096, "max_position_embeddings": 256}
    torch.manual_seed(1)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape)).save_pretrained(base)
    return ADAPTERS.format(base=base), path


class Cell(NamedTuple):
    """Coordinator to start, with so many volunteers."""

    name: str
    seed: int
    toml: str
    volunteers: int
    settings: tuple[str, ...]
    problems: Path | None = None


def cells(options: argparse.Namespace, folder: Path) -> list[Cell]:
    if options.adapters:
        toml, path = base_model(folder)
        return [Cell("adapters", 1, toml, options.volunteers, tuple(options.volunteer), path)]
    if not options.actors:
        return [
            Cell(
                f"seed {seed}",
                seed,
                recipe("reason", f"seed={seed}", *options.change),
                options.volunteers,
                tuple(options.volunteer),
            )
            for seed in options.seeds
        ]
    alone = {
        "reason": ("task.options.warm_steps=0", "task.options.queue=1000000"),
        "gomoku": ("task.options.games=8", "task.options.queue=1000000"),
    }
    return [
        Cell(f"{name}, {count} actors", 1, recipe(name, *changes), count, ("--set", "roles=play"))
        for count in options.actors
        for name, changes in alone.items()
        if options.only in ("", name)
    ]


@contextmanager
def sites(options: argparse.Namespace, folder: Path) -> Iterator[list[Site]]:
    """Coordinators and volunteers of all cells, ended at the end."""
    with ExitStack() as stack:
        found: list[tuple[Cell, Site]] = []
        cores, first = sorted(os.sched_getaffinity(0)), 0
        for number, cell in enumerate(cells(options, folder)):
            count = min(len(cores), 1 + cell.volunteers)
            own = {cores[(first + place) % len(cores)] for place in range(count)}
            first += count
            site = Site(cell, folder / str(number), own)
            stack.callback(site.end)
            site.serve()
            found.append((cell, site))
        for _, site in found:
            site.listening()
        joining = [site.join(cell.volunteers) for cell, site in found]
        for (cell, site), homes in zip(found, joining, strict=True):
            site.work(homes, *cell.settings)
        yield [site for _, site in found]


def shown(rows: list[Figures]) -> None:
    """Print a line for each seed, and all figures as JSON."""
    for row in rows:
        curve = row["curve"]
        solved = [each[2] for each in curve]
        last = sum(solved[-3:]) / max(1, len(solved[-3:]))
        print(
            f"{row['seconds']:4} s  {row['cell']}  version {row['version']:4}"
            f"  solved {100 * solved[0] if solved else 0:.0f} -> {100 * last:.0f} %"
            f" (version {curve[-1][0] if curve else 0})"
            f"  {row['episodes an hour']:,} episodes an hour  behind {row['behind']}",
        )
    for row in rows:
        print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=480.0)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--volunteers", type=int, default=4)
    parser.add_argument("--actors", type=int, nargs="+", default=[])
    parser.add_argument("--adapters", action="store_true", help="of a model in a folder")
    parser.add_argument("--only", default="", help="with --actors: reason or gomoku alone")
    parser.add_argument("--every", type=float, default=20.0, help="seconds between two tables")
    parser.add_argument("--change", nargs="*", default=[], help="keys of the run: train.lr=1e-4")
    parser.add_argument("--volunteer", nargs="*", default=[], help="options of the volunteers")
    parser.add_argument("--keep", type=Path, help="folder that stays, with all logs")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = options.keep or Path(tempfile.mkdtemp(prefix="reason-"))
    try:
        with sites(options, folder) as found:
            ends = time.monotonic() + options.seconds
            while time.monotonic() < ends:
                time.sleep(max(0.0, min(options.every, ends - time.monotonic())))
                shown([site.figures() for site in found])
    finally:
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
