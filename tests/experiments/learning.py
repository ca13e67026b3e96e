"""Training for real in the simulator: the corpus, one run of some workers, and what it cost in
bytes.
"""

from __future__ import annotations

import gzip
import hashlib
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors.numpy import save_file
from sqlalchemy import Connection

from coordinator.database import runs
from coordinator.plan.plan import plan
from coordinator.runs.definition import Definition
from coordinator.services import Coordinator
from coordinator.simulate import loop
from coordinator.simulate.scenario import from_table
from coordinator.simulate.simulation import Dataset, Hooks, MergedHead, SimulationResult, simulate
from shared.tensors.frame import open_frame
from shared.workloads.base import ChunkRef, DatasetManifest
from shared.workloads.data.documents import Document, standard_library_documents
from shared.workloads.data.local_data import LocalData
from shared.workloads.data.text_dataset import build_text
from tests.experiments.torch_labour import TorchLabour

BYTES = 257  # every byte and the end of a text
HELD_OUT = 0.05  # of the texts
MANUALS = ("/usr/share/doc", *(f"/usr/share/man/man{number}" for number in (1, 5, 7, 8)))
NO_MANUALS = ("changelog", "copyright")
PIECE = 1024  # characters
EVALUATE_S = 600.0


def manuals() -> Iterator[Document]:
    """Manual pages and notes that come with a Debian system: prose, beside the code."""
    seen: set[bytes] = set()
    for place in MANUALS:
        for path in sorted(Path(place).rglob("*")):
            name = path.name.lower()
            if not path.is_file() or path.is_symlink() or name.startswith(NO_MANUALS):
                continue
            try:
                data = gzip.decompress(path.read_bytes()) if name.endswith(".gz") else b""
                data = data or path.read_bytes()
                text = data.decode()
            except (OSError, EOFError, UnicodeDecodeError):
                continue
            known = hashlib.sha256(data).digest()
            if 2_000 < len(text) < 200_000 and "\0" not in text and known not in seen:
                seen.add(known)
                yield Document(str(path), text)


TEXTS: Mapping[str, Callable[[], Iterator[Document]]] = {
    "code": standard_library_documents,
    "manuals": manuals,
}


def corpus(folder: Path, documents: int = 0, texts: str = "code") -> Dataset:
    """A corpus as bytes, kept in `folder`; the first `documents` of it, or all."""
    path = folder / (f"pieces-{documents}" if texts == "code" else f"pieces-{texts}-{documents}")
    if not (path / "test.json").exists():
        path.mkdir(parents=True, exist_ok=True)
        _build(path, documents, TEXTS[texts])
    manifest = msgspec.json.decode((path / "manifest.json").read_bytes(), type=DatasetManifest)
    return manifest, {file.name: file.read_bytes() for file in path.glob("?" * 64)}


def unseen_chunks(folder: Path, texts: str) -> tuple[ChunkRef, ...]:
    """Held-out texts of a whole corpus that no choice has seen: every second one."""
    name = "pieces-0" if texts == "code" else f"pieces-{texts}-0"
    return msgspec.json.decode(
        (folder / name / "test.json").read_bytes(), type=tuple[ChunkRef, ...]
    )


def _build(path: Path, documents: int, source: Callable[[], Iterator[Document]]) -> None:
    """Held out are whole texts; the others are cut into pieces in random order, so that every
    stretch of a pass is alike.
    """

    def put(data: bytes) -> str:
        name = hashlib.sha256(data).hexdigest()
        (path / name).write_bytes(data)
        return name

    def built(some: Sequence[Document]) -> DatasetManifest:
        return build_text(
            path.name,
            some,
            put,
            vocab_size=BYTES,
            heldout_share=0.001,
            licence="of each text",
            source="texts of this machine",
        )

    texts = list(islice(source(), documents or None))
    texts.sort(key=lambda text: hashlib.sha256(text.name.encode()).digest())
    held = max(2, round(HELD_OUT * len(texts)))
    pieces = [
        Document(f"{text.name} {at}", text.text[at : at + PIECE])
        for text in texts[held:]
        for at in range(0, len(text.text), PIECE)
    ]
    split = not documents  # a corpus cut short has too few texts for two ends
    kept = built(texts[: held : 1 + split])
    manifest = msgspec.structs.replace(built(pieces), heldout=(*kept.chunks, *kept.heldout))
    test = built(texts[1:held:2]) if split else None
    unseen = (*test.chunks, *test.heldout) if test else ()
    (path / "test.json").write_bytes(msgspec.json.encode(unseen))
    (path / "manifest.json").write_bytes(msgspec.json.encode(manifest))


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What does not change between the cells of an experiment."""

    dataset: Dataset
    model: Mapping[str, Any]
    steps: int = 600  # of each worker
    batch: int = 4
    lr: float = 1e-3
    warmup: int | None = 40  # None = as a run file that says nothing
    test: tuple[ChunkRef, ...] = ()  # measured once, at the end


PROBE = {"block_size": 64, "n_layer": 4, "n_head": 4, "n_embd": 128, "dropout": 0.0}


OWN_SCHEDULE: Mapping[str, Any] = {"decay_steps": 0}  # by how far the run will go, as it expects


def defaults(preset: str) -> dict[str, Any]:
    """A preset as it is: `learn` waits for all workers unless it is told otherwise."""
    default = plan({"preset": preset})
    return {
        "preset": preset,
        "quorum": default.quorum,
        "quorum_share": default.quorum_share,
        "grace": default.grace,
        "deadline_seconds": default.deadline_seconds,
    }


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of some workers."""

    plan: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)  # keys besides the setup's
    workers: int = 4
    steps: int = 0  # of each worker, if not the setup's
    local_steps: int = 30
    batch: int = 0  # 0 = the setup's
    seed: int = 0
    start: Path | None = None  # weights to go on from
    start_step: int = 0  # of the schedule
    start_sample: int = 0  # of the pass
    save: Mapping[int, Path] = field(
        default_factory=dict
    )  # global step -> where to keep the weights
    curve_every: int = 300  # global steps between measurements; the end is always measured
    curve_s: float = 0.0  # or seconds of virtual time, if above 0
    stretch: float = 1.0  # the schedule is so many times as long: versions of single arrivals
    machines: tuple[Mapping[str, Any], ...] = ()  # in place of equal ones
    task: Mapping[str, Any] = field(default_factory=dict)
    tokens_share: float = 1.0  # of the tokens that equal machines would train
    hours: float = 1000.0
    tick_s: float = 0.0  # of the coordinator's chores; 0 = by the length of a task
    train: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Learned:
    """Results of a run."""

    loss: float
    test_loss: float | None  # on texts that no choice has seen, where there are some
    curve: list[tuple[int, float, float]]  # global step, virtual seconds, loss
    outcome: SimulationResult
    up: float  # bytes a parameter and worker
    down: float
    stored: int

    def row(self) -> dict[str, Any]:
        refused: dict[str, int] = {}
        for trace in self.outcome.traces:
            for verdict, count in trace.verdicts.items():
                if verdict != "accepted":
                    refused[verdict] = refused.get(verdict, 0) + count
        return {
            "loss": round(self.loss, 6),
            **({} if self.test_loss is None else {"test": round(self.test_loss, 6)}),
            "up": round(self.up, 2),
            "down": round(self.down, 2),
            "versions": len(self.outcome.merged_at),
            "merged": self.outcome.merged,
            "virtual_s": round(self.outcome.seconds, 1),
            "refused": refused,
            "curve": [(step, round(at, 1), round(loss, 4)) for step, at, loss in self.curve],
        }


def learn(setup: Setup, run: Run) -> Learned:
    """Train for real, in virtual time, through the real queue, intake and merge."""
    watch = _Watch(setup, run)
    table = _table(setup, run)
    scenario = from_table(table)

    def labour(about: Definition, scratch: Path, data: LocalData | None, index: int) -> TorchLabour:
        assert data is not None
        return TorchLabour(about, scratch, data)

    def at(**values: int) -> Callable[[Coordinator, str], Awaitable[None]]:
        async def begin(coordinator: Coordinator, name: str) -> None:
            def later(conn: Connection) -> None:
                runs.set_values(conn, runs.by_name(conn, name).id, **values)

            await coordinator.db.write(later)

        return begin

    hooks = Hooks(
        labour=labour,
        dataset=setup.dataset,
        on_draft=at(global_step=run.start_step),
        on_start=at(cursor=run.start_sample),
        on_version=watch.see,
        tick_s=run.tick_s or min(2.0, run.local_steps / 4),
    )
    outcome = loop.run(simulate(scenario, hooks))
    loss = watch.final()
    size = outcome.parameters * len(outcome.traces)
    return Learned(
        loss=loss,
        test_loss=watch.test(),
        curve=watch.curve,
        outcome=outcome,
        up=sum(trace.up_bytes for trace in outcome.traces) / size,
        down=sum(trace.down_bytes for trace in outcome.traces) / size,
        stored=watch.stored,
    )


class _Watch:
    """Measures versions on held-out text and keeps the ones that are asked for."""

    def __init__(self, setup: Setup, run: Run) -> None:
        self._setup = setup
        self._run = run
        self._heldout = local(setup.dataset, setup.dataset[0].heldout)
        self._measured = run.start_step
        self._measured_at = 0.0
        self._last: dict[str, np.ndarray[Any, Any]] = {}
        self._about: Definition | None = None
        self._at = (0, 0.0)
        self.curve: list[tuple[int, float, float]] = []
        self.stored = 0

    def see(self, head: MergedHead) -> None:
        step = head.row.global_step
        with open_frame(head.weights, head.about.schema) as frame:
            self._last = {name: np.array(frame.array(name)) for name in frame}
        self._about, self._at = head.about, (step, head.seconds)
        for wanted, path in self._run.save.items():
            if step == wanted:
                path.mkdir(parents=True, exist_ok=True)
                save_file(self._last, path / "model.safetensors")
                self.stored += 1
        if self._is_time(step, head.seconds):
            self._measured, self._measured_at = step, head.seconds
            self._measure()

    def _is_time(self, step: int, seconds: float) -> bool:
        if self._run.curve_s:
            return seconds >= self._measured_at + self._run.curve_s
        return step >= self._measured + self._run.curve_every * self._run.stretch

    def test(self) -> float | None:
        """Loss of the last version on the texts for the end."""
        chunks = self._setup.test
        return self._on(local(self._setup.dataset, chunks)) if chunks else None

    def _measure(self) -> float:
        loss = self._on(self._heldout)
        self.curve.append((*self._at, loss))
        return loss

    def _on(self, heldout: LocalData) -> float:
        assert self._about is not None, "no version was merged"
        weights = {name: torch.from_numpy(value) for name, value in self._last.items()}
        workload, model = self._about.workload, self._about.file.model
        found = workload.evaluate(model, weights, heldout, EVALUATE_S, lambda: False)
        return found["loss"]

    def final(self) -> float:
        if self.curve and self.curve[-1][0] == self._at[0]:
            return self.curve[-1][2]
        return self._measure()


def _table(setup: Setup, run: Run) -> dict[str, Any]:
    steps = run.steps or setup.steps
    tokens = int(
        (steps - run.start_step)
        * setup.batch
        * setup.model["block_size"]
        * _crowd(setup, run)
        * run.tokens_share
    )
    train: dict[str, Any] = {
        "lr": setup.lr,
        **({} if setup.warmup is None else {"warmup_steps": setup.warmup}),
        "decay_steps": int(steps * run.stretch),
        **run.train,
    }
    if run.start is not None:
        train["init_from"] = str(run.start)
    machines = run.machines or tuple(_in_turn(index) for index in range(run.workers))
    fast = {"up_mbit": 1e6, "down_mbit": 1e6}
    return {
        "seed": run.seed + 1,
        "hours": run.hours,
        "server": fast,
        "run": {
            "workload": "gpt",
            "seed": run.seed,
            "model": {"shared_momentum": False, **setup.model, **run.model},
            "task": {
                "local_steps": run.local_steps,
                "batch_size": run.batch or setup.batch,
                "min_steps": 1,
                **run.task,
            },
            "train": train,
            "plan": {"quorum": run.workers, "deadline_seconds": 100_000.0, **run.plan},
            "stop": {"tokens": tokens},
            "evaluation": {"every": 0},
            "retention": {"latest": 2, "every": 0},
        },
        "workers": [fast | dict(machine) for machine in machines],
    }


def _in_turn(index: int) -> dict[str, Any]:
    """One of equal machines that come one after the other, always in this order: who gets which
    text does not change.
    """
    return {
        "name": f"worker-{index}",
        "steps_per_s": 1.0,
        "jitter": 0.0,
        "overhead_s": 0.0,
        "latency_ms": 2.0 * (index + 1),
    }


def _crowd(setup: Setup, run: Run) -> float:
    """Return how many batches of the setup all workers together train in a step."""
    return run.workers * (run.batch or setup.batch) / setup.batch


def local(dataset: Dataset, chunks: Sequence[ChunkRef]) -> LocalData:
    """Chunks of a dataset, as files."""
    manifest, blobs = dataset
    folder = Path(tempfile.mkdtemp(prefix="chunks-"))
    files = {chunk.sha256: folder / chunk.sha256 for chunk in chunks}
    for name, path in files.items():
        path.write_bytes(blobs[name])
    return LocalData(msgspec.structs.replace(manifest, chunks=tuple(chunks), heldout=()), files)
