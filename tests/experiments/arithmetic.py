"""The same task in other arithmetic: processes of this machine that compute as other machines do.

The libraries choose their instructions when they are loaded, so each choice is a process of its
own; threads, portions of a batch and precision are chosen for each task.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from coordinator.rules.recompute_result import NUDGES
from coordinator.rules.task_size import pass_seed
from shared.workloads.base import Data, Job, RunDraft, TrainSettings, Work, load
from tests.experiments.exp_learning import TINY
from tests.experiments.learning import corpus, local
from tests.support.workloads import tiny_causal, tiny_dcgan, tiny_gomoku
from tests.support.workloads.tiny_gpt import Folder

Tensors = Mapping[str, torch.Tensor]
Arrays = dict[str, np.ndarray]
SUBJECTS = ("gpt", "gpt muon", "gpt sgd", "dcgan", "gomoku", "causal-lm")
GAMES = 48  # that the learner of Gomoku learns from

PROCESSES: Mapping[str, Mapping[str, str]] = {
    "avx512": {},
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_CBWR": "AVX2",
    },
    "sse": {
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "MKL_CBWR": "COMPATIBLE",
    },
    "mixed": {"ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "COMPATIBLE"},
}


class Arithmetic(msgspec.Struct, frozen=True, kw_only=True):
    """Arithmetic that computes a task."""

    name: str
    process: str
    kind: str = "float32"  # what it comes to: "float32", "tf32", "bfloat16"
    threads: int = 1
    halvings: int = 0  # of the portions of a batch
    onednn: bool = True
    nnpack: bool = False  # products by transforms, where oneDNN is not (volunteers turn it off)
    nudge: float = 0.0  # of each number of the base, by its own size
    share: float = 1.0  # of each portion that is learnt from: a cheat
    device: str = "cpu"


REFERENCE = Arithmetic(name="avx512", process="avx512")
FLOAT32 = (
    REFERENCE,
    Arithmetic(name="avx512, 2 threads, portions", process="avx512", threads=2, halvings=1),
    Arithmetic(name="avx2", process="avx2"),
    Arithmetic(name="avx2, 4 threads, portions", process="avx2", threads=4, halvings=2),
    Arithmetic(name="sse", process="sse", halvings=3),
    Arithmetic(name="sse, 3 threads", process="sse", threads=3),
    Arithmetic(name="mixed", process="mixed"),
    Arithmetic(name="no oneDNN", process="mixed", halvings=1, onednn=False),
)
NARROW = (
    Arithmetic(name="tf32", process="avx512", kind="tf32"),
    Arithmetic(name="bf16", process="avx512", kind="bfloat16"),
    Arithmetic(name="bf16, portions", process="avx512", kind="bfloat16", threads=2, halvings=2),
    Arithmetic(name="nudged", process="avx512", nudge=NUDGES["float32"]),
    Arithmetic(name="bf16, nudged", process="avx512", kind="bfloat16", nudge=NUDGES["bfloat16"]),
    Arithmetic(name="nnpack", process="mixed", kind="nnpack", onednn=False, nnpack=True),
)
CARDS = (
    Arithmetic(name="card", process="avx512", device="cuda:0", kind="card"),
    Arithmetic(name="card, portions", process="avx512", device="cuda:0", kind="card", halvings=2),
    Arithmetic(name="card, tf32", process="avx512", device="cuda:0", kind="card tf32"),
    Arithmetic(name="card, bf16", process="avx512", device="cuda:0", kind="card bfloat16"),
)
EMULATED = Arithmetic(name="bf16, avx2", process="avx2", kind="bfloat16")  # forty times slower


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A task, and after which steps weights are wanted."""

    subject: str
    folder: str
    job: Job
    probes: tuple[int, ...]


Probe = tuple[np.ndarray, Arrays]  # the parameters of the update in one row; the weights


class Subject:
    """The model, its data, and the size of a step."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        optimizer = name.partition(" ")[2] or "adamw"
        self.batch, self.workload, self.kind = 16, load(name.partition(" ")[0]), "train"
        rates = {"adamw": 3e-3, "muon": 1e-2, "sgd": 0.1}
        self.train = TrainSettings(lr=rates[optimizer], warmup_steps=0)
        self.train = msgspec.structs.replace(self.train, optimizer=optimizer)
        self._make = {"dcgan": self._digits, "gomoku": self._board}.get(name, self._text)
        self.model, self.data = self._make(folder)
        self.schema = self.workload.schema(self.model)
        self.learnt = [spec.name for spec in self.schema if spec.role == "parameter"]

    def _text(self, folder: Path) -> tuple[dict[str, Any], Data]:
        data = corpus(folder)
        table: Mapping[str, Any] = {**TINY, "dropout": 0.1}
        if self.name == "causal-lm":
            table = tiny_causal.table(tiny_causal.QWEN2)
        return self.workload.config(table, data[0]), local(data, data[0].chunks)

    def _digits(self, folder: Path) -> tuple[dict[str, Any], Data]:
        (folder / "digits").mkdir(exist_ok=True)
        self.batch = 64
        self.train = msgspec.structs.replace(tiny_dcgan.ADAM, lr=1e-3)
        data = tiny_dcgan.digits(folder / "digits")
        many = data.manifest.chunks * 100  # a task has more images than there are
        data = Folder(msgspec.structs.replace(data.manifest, chunks=many), folder / "digits")
        width = {"generator_width": 16, "discriminator_width": 16}
        return tiny_dcgan.config(data, **width), data

    def _board(self, folder: Path) -> tuple[dict[str, Any], Data]:
        self.batch, self.kind = 64, "learn"
        given = tiny_gomoku.WORKLOAD.defaults(RunDraft())["train"]  # with twenty steps of warm-up
        self.train = TrainSettings(**given)
        path = folder / "games"
        path.mkdir(exist_ok=True)
        window = tiny_gomoku.Window(path)
        window.seal(tiny_gomoku.play(tiny_gomoku.lively(), GAMES, path))
        return tiny_gomoku.config(), window

    @property
    def cut_alike(self) -> bool:
        """Return True if the result depends on the portions, so that all machines use the same."""
        return self.name == "dcgan"

    def task(self, number: int, steps: int, *, batch: int = 0, rate: float = 1.0) -> Job:
        """Return the task of a number, of so many steps."""
        batch = batch or self.batch
        length = 0
        if self.kind == "train":
            length = sum(self.workload.samples(self.model, self.data.manifest))
        most = max(1, length // (steps * batch)) if length else 1 << 40
        pass_number, place = divmod(number, most)
        start = place * steps * batch if length else 0
        return Job(
            run="arithmetic",
            workload=self.workload.name,
            kind="learn" if self.kind == "learn" else "train",
            update="delta",
            config=dict(self.model),
            train=msgspec.structs.replace(self.train, lr=self.train.lr * rate),
            order_seed=pass_seed(0, 1 + pass_number),
            start=start,
            stop=start + steps * batch,
            seed=number,
            steps=steps,
            batch_size=batch,
            global_step=0,
            total_steps=0,
            options=tiny_gomoku.options() if self.kind == "learn" else {},
        )


@lru_cache
def subject(name: str, folder: str) -> Subject:
    """The subject of a name; its data lie in a folder, and are made there once."""
    torch.set_num_threads(1)
    return Subject(name, Path(folder))


class Shortened(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Products of numbers of ten bits, as a graphics card makes them of float32 (TF32)."""

    PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward")

    @override
    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if name in self.PRODUCTS or name.startswith("_scaled_dot_product"):
            args = tuple(_short(one) for one in args)
        return func(*args, **(kwargs or {}))


def _shortened() -> Any:
    return Shortened()  # type: ignore[no-untyped-call]


def _short(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.dtype != torch.float32:
        return value
    bits = value.contiguous().view(torch.int32)
    return ((bits + 0x1000) & -0x2000).view(torch.float32)


def learn(asked: Asked, how: Arithmetic, base: Arrays) -> dict[int, Probe]:
    """Do a task; returns what it has learnt after each probe."""
    about = subject(asked.subject, asked.folder)
    torch.set_num_threads(how.threads)
    narrow = how.kind.endswith("bfloat16")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = "tf32" in how.kind
    train = msgspec.structs.replace(asked.job.train, precision="bfloat16" if narrow else "float32")
    job = msgspec.structs.replace(asked.job, train=train)
    with ExitStack() as stack:
        if not how.onednn:
            stack.enter_context(torch.backends.mkldnn.flags(enabled=False))
        stack.enter_context(torch.backends.nnpack.flags(enabled=how.nnpack))
        stack.enter_context(_shortened() if how.kind == "tf32" else nullcontext())
        base = _nudged(about, base, how.nudge) if how.nudge else base
        work = about.workload.begin(job, tensors(base), about.data, how.device)
        for _ in range(0 if about.cut_alike else how.halvings):
            work.halve()
        if how.share < 1.0:
            _spare(work, how.share)
        return dict(_probed(about, work, base, asked.probes))


def _probed(
    about: Subject, work: Work, base: Arrays, probes: Sequence[int]
) -> Iterator[tuple[int, Probe]]:
    for steps in probes:
        step = 0
        while step < steps and not work.done:
            step = work.advance().step
        after = work.result()[1]
        after = {name: value.cpu() for name, value in after.items()}
        row = [(base[name] - after[name].numpy()).reshape(-1) for name in about.learnt]
        yield steps, (np.concatenate(row), {name: after[name].numpy().copy() for name in after})


def _nudged(about: Subject, base: Arrays, nudge: float) -> Arrays:
    random = np.random.default_rng(0)
    more = {name: random.standard_normal(base[name].shape) * nudge for name in about.learnt}
    return base | {
        name: (base[name] * (1.0 + value)).astype(base[name].dtype) for name, value in more.items()
    }


def _spare(work: Any, share: float) -> None:
    """Let work learn from a part of each of its portions only."""
    measure = work.measure
    work.measure = lambda start, stop: measure(start, start + max(1, int(share * (stop - start))))


def tensors(arrays: Arrays) -> dict[str, torch.Tensor]:
    """Arrays as tensors, copied."""
    return {name: torch.from_numpy(np.array(value)) for name, value in arrays.items()}


class Machines:
    """The processes, each begun when it is first asked."""

    def __init__(self) -> None:
        self._pools: dict[str, ProcessPoolExecutor] = {}

    def learn(self, asked: Asked, how: Arithmetic, base: Arrays) -> dict[int, Probe]:
        """Do a task in some arithmetic."""
        if how.process not in self._pools:
            pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
            with _environment(PROCESSES[how.process]):
                pool.submit(int).result()  # it starts here
            self._pools[how.process] = pool
        return self._pools[how.process].submit(learn, asked, how, base).result()

    def close(self) -> None:
        for pool in self._pools.values():
            pool.shutdown()


@contextmanager
def _environment(more: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(more, OMP_WAIT_POLICY="passive", GOMP_SPINCOUNT="0")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
