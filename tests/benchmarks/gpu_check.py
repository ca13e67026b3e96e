"""Everything that a volunteer does on a GPU, in ten minutes, as one table to send in.

    make gpu-check                                the GPU of this machine; without one it exits 75
    python -m tests.benchmarks.gpu_check --device cpu --small     the same code in a minute

Training and inference of a GPT, self-play of Gomoku, the benchmark; MFU is operations a second of
training over those of the best matrix product that the benchmark measured in the same precision.
"bare" is the same model and batch in a plain PyTorch loop.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from shared.protocol.accounts import Benchmark
from shared.workloads.base import Job, TrainSettings, Work
from shared.workloads.gpt.config import GptConfig
from shared.workloads.gpt.model import build
from shared.workloads.training.device_differences import autocast
from shared.workloads.training.ranks import Ranks
from shared.workloads.training.step_loop import StepWork
from tests.support.workloads import tiny_gomoku
from tests.support.workloads.tiny_gpt import WORKLOAD, Folder, job, sums
from volunteer.machine.benchmark import benchmark
from volunteer.training.job import TrainingJob
from volunteer.training.trainer import Trainer

NO_GPU = 75
MIB = 1 << 20
DOCUMENTS, SMALL_DOCUMENTS = 1500, 40
CROWDED_BYTES = 6144 * MIB  # of a device, for a batch that needs far more at once
CROWDED_BATCH = 512
Row = tuple[str, str, bool]  # subject, figures, as it should be


class Size(NamedTuple):
    """Models and lengths of the checks."""

    model: Mapping[str, Any]
    batch: int
    steps: int
    games: int
    tokens: int


LARGE = Size(
    {"n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 512, "dropout": 0.0}, 16, 40, 32, 256
)
SMALL = Size(
    {"n_layer": 2, "n_head": 2, "n_embd": 64, "block_size": 64, "dropout": 0.0}, 8, 6, 1, 16
)


class Bench:
    """A device, its thread, and what tasks there need."""

    def __init__(self, device: str, size: Size, data: Folder) -> None:
        self.device, self.size, self.data = device, size, data
        self.model = WORKLOAD.config(size.model, data.manifest)
        self.samples = sum(WORKLOAD.samples(self.model, data.manifest))
        self.weights = WORKLOAD.init(self.model, 0)
        self.trainer = Trainer(device, threads=1)
        self.trainer.start()

    def task(self, precision: str = "float32", batch: int = 0) -> Job:
        batch = batch or self.size.batch
        steps = max(1, min(self.size.steps, self.samples // batch))
        settings = TrainSettings(lr=1e-3, precision=precision)  # type: ignore[arg-type]
        return job(self.model, steps, batch, stop=steps * batch, train=settings)

    def begin(self, task: Job) -> Work:
        return WORKLOAD.begin(task, self.weights, self.data, self.device)

    def train(self, task: Job, begin: Callable[[], Work] | None = None) -> tuple[float, list[int]]:
        """Samples a second of a whole task on the thread of the device, and each halving."""
        halved: list[int] = []
        handle = self.trainer.submit(
            TrainingJob(
                device=self.device,
                begin=begin or (lambda: self.begin(task)),
                finish=lambda work, spent: (work.result(), spent.train_s)[1],
                samples=task.stop,
                report=lambda report: None,
                halved=halved.append,
            )
        )
        spent: Any = handle.future.result(600)
        return task.stop / max(spent.value, 1e-9), halved

    def sync(self) -> None:
        if self.device.startswith("cuda"):
            torch.cuda.synchronize(self.device)

    def allocated(self) -> int:
        """Bytes that this process has on the device; 0 on a CPU."""
        cuda = self.device.startswith("cuda")
        return torch.cuda.memory_reserved(self.device) if cuda else 0


def measured(bench: Bench) -> tuple[Benchmark, list[Row]]:
    found = bench.trainer.call(
        lambda: benchmark(
            bench.device, quick=True, report=lambda stage, done: None, stop=lambda: False
        )
    ).result(120)
    said = (
        f"{found.fp32_flops / 1e12:.2f} TFLOP/s float32, {found.bf16_flops / 1e12:.2f} bfloat16,"
        f" a step {found.step_flops / 1e12:.3f}"
    )
    return found, [("benchmark", said, found.fp32_flops > 0 and found.step_flops > 0)]


def bare(bench: Bench, task: Job) -> float:
    """Samples a second of a plain loop."""
    config = GptConfig.from_dict(task.config)
    model = build(config, bench.weights, bench.device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True)
    shape = (task.batch_size, config.block_size + 1)
    tokens = torch.randint(0, config.vocab_size, shape, device=bench.device)

    def step() -> None:
        with autocast(task.train.precision, bench.device):
            loss = model(tokens[:, :-1], tokens[:, 1:])
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    bench.sync()
    began = time.perf_counter()
    for _ in range(task.steps):
        step()
    bench.sync()
    return task.stop / (time.perf_counter() - began)


def training(bench: Bench, peak: Benchmark) -> list[Row]:
    rows = []
    flops = WORKLOAD.flops_per_sample(bench.model)
    for precision, best in (("float32", peak.fp32_flops), ("bfloat16", peak.bf16_flops)):
        task = bench.task(precision)
        bench.train(task)  # warms up
        rate, _ = bench.train(task)
        plain = bench.trainer.call(partial(bare, bench, task)).result(600)
        said = (
            f"{rate * bench.model['block_size']:,.0f} tokens/s, {rate / plain:.2f} of bare;"
            f" MFU {rate * flops / best:.1%}, bare {plain * flops / best:.1%}"
        )
        rows.append((f"training, {precision}", said, rate > 0))
    return rows


class Crowded:
    """Work that runs out of memory in its first micro-batches."""

    def __init__(self, work: Work, times: int) -> None:
        self._work, self._times = work, times

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def advance(self) -> Any:
        if self._times:
            self._times -= 1
            raise MemoryError("no memory, as far as this check goes")
        return self._work.advance()


def out_of_memory(bench: Bench) -> list[Row]:
    task = bench.task()
    _, halved = bench.train(task, lambda: Crowded(bench.begin(task), 2))
    rows = [("out of memory, made up", f"halved to {halved}", len(halved) == 2)]
    if bench.device.startswith("cuda"):
        total = torch.cuda.get_device_properties(bench.device).total_memory
        room = min(1.0, (bench.allocated() + CROWDED_BYTES) / total)
        torch.cuda.set_per_process_memory_fraction(room, bench.device)
        try:
            task = bench.task(batch=min(CROWDED_BATCH, bench.samples))
            _, halved = bench.train(task)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, bench.device)
        said = f"batch of {task.batch_size} in {room * total / MIB:,.0f} MiB: halved to {halved}"
        rows.append(("out of memory, real", said, True))
    return rows


def pausing(bench: Bench) -> list[Row]:
    """A pause gives the memory back, and the task goes on as if nothing had been."""
    task = bench.task()

    def pause() -> tuple[int, int, bool]:
        work, other = bench.begin(task), bench.begin(task)
        work.advance()
        held = bench.allocated()
        work.suspend()
        other.suspend()
        freed = bench.allocated()
        work.resume()
        other.resume()
        for each in (work, other):
            while not each.done:
                each.advance()
        one, two = work.result()[1], other.result()[1]
        return held, freed, all(torch.allclose(one[n], two[n], atol=1e-4) for n in one)

    held, freed, same = bench.trainer.call(pause).result(600)
    said = f"{held / MIB:,.0f} MiB, paused {freed / MIB:,.0f}; goes on the same: {same}"
    return [("pause", said, same and (freed < held or not held))]


def together(bench: Bench, small: bool) -> list[Row]:
    """Two processes on one device."""
    words = [sys.executable, "-m", "tests.benchmarks.gpu_check", "--one", "--device", bench.device]
    words += ["--small"] if small else []
    alone, _ = bench.train(bench.task())
    both = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    rates = [float(one.communicate(timeout=300)[0]) for one in both]
    said = f"{sum(rates) / alone:.2f} of one alone ({rates[0]:.1f} and {rates[1]:.1f} samples/s)"
    return [("two processes", said, min(rates) > 0)]


def ranks(bench: Bench) -> list[Row]:
    """All cards of this machine as one worker, over nccl."""
    others = [f"cuda:{number}" for number in range(1, torch.cuda.device_count())]
    if not bench.device.startswith("cuda") or not others:
        return [("ranks", "not tried: they need two cards", True)]
    task, spread = bench.task(), Ranks(others)

    def both() -> tuple[float, float, bool]:
        alone = bench.begin(task)
        first = timed(alone)
        together = cast(StepWork, bench.begin(task))
        together.spread(spread, partial(begun, bench.model, bench.data, task))
        timed(together)  # starts the processes
        again = cast(StepWork, bench.begin(task))
        again.spread(spread, partial(begun, bench.model, bench.data, task))
        second = timed(again)
        one, two = alone.result()[1], again.result()[1]
        return first, second, all(torch.allclose(one[n], two[n], atol=1e-4) for n in one)

    try:
        first, second, same = bench.trainer.call(both).result(600)
    finally:
        spread.stop()
    said = f"{first / second:.2f} of one card by {1 + len(others)}; the same update: {same}"
    return [("ranks", said, same)]


def timed(work: Work) -> float:
    """Seconds of a whole task."""
    began = time.perf_counter()
    while not work.done:
        work.advance()
    work.result()
    return time.perf_counter() - began


def begun(model: Mapping[str, Any], data: Folder, task: Job, device: str) -> StepWork:
    """A rank's part of a task."""
    return cast(StepWork, WORKLOAD.begin(task, WORKLOAD.init(model, 0), data, device))


def inference(bench: Bench) -> list[Row]:
    slots = 4

    def generate() -> tuple[float, float]:
        decoder = WORKLOAD.decoder(bench.model, bench.weights, None, slots, bench.device)
        assert decoder is not None
        prompt = list(range(1, decoder.context // 2))
        began = time.perf_counter()
        for slot in range(slots):
            decoder.prefill(slot, prompt, 0)
        read = time.perf_counter()
        count = min(bench.size.tokens, decoder.context - len(prompt))
        for place in range(len(prompt), len(prompt) + count):
            decoder.decode_step(range(slots), [1] * slots, [place] * slots)
        ended = time.perf_counter()
        return slots * len(prompt) / (read - began), slots * count / (ended - read)

    first, more = bench.trainer.call(generate).result(300)
    return [("inference", f"{first:,.0f} tokens/s read, {more:,.0f} written, 4 at once", more > 0)]


def selfplay(bench: Bench, folder: Path) -> list[Row]:
    model = tiny_gomoku.config()
    task = tiny_gomoku.job("selfplay", model, bench.size.games)

    def play() -> float:
        window = tiny_gomoku.Window(folder)
        work = tiny_gomoku.WORKLOAD.begin(task, tiny_gomoku.lively(), window, bench.device)
        began = time.perf_counter()
        tiny_gomoku.finish(work)
        return bench.size.games / (time.perf_counter() - began)

    rate = bench.trainer.call(play).result(600)
    return [("self-play", f"{rate * 60:,.1f} games a minute, 6 x 6, 32 simulations", rate > 0)]


def check(device: str, size: Size, folder: Path, *, small: bool) -> list[Row]:
    """Do every check; one that fails is a row as well."""
    bench = Bench(device, size, sums(folder, documents=SMALL_DOCUMENTS if small else DOCUMENTS))
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else device
    rows: list[Row] = [("machine", f"{name}, torch {torch.__version__}", True)]
    peak, found = measured(bench)
    rows += found
    checks: tuple[Callable[[], list[Row]], ...] = (
        lambda: training(bench, peak),
        lambda: out_of_memory(bench),
        lambda: pausing(bench),
        lambda: together(bench, small),
        lambda: ranks(bench),
        lambda: inference(bench),
        lambda: selfplay(bench, folder),
    )
    for one in checks:
        try:
            made = one()
        except Exception as error:  # the table is to be sent in, whatever happened
            made = [("failed", f"{type(error).__name__}: {error}"[:200], False)]
        print("\n".join(f"{line[0]:24} {line[1]}" for line in made), file=sys.stderr)
        rows += made
    bench.trainer.close()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="", help="cuda:0, mps, cpu; else the first GPU")
    parser.add_argument("--small", action="store_true", help="models of no use, in a minute")
    parser.add_argument("--one", action="store_true", help="one of two processes")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = options.device or ("cuda:0" if torch.cuda.is_available() else "")
    if not device and torch.backends.mps.is_available():
        device = "mps"
    if not device:
        print("gpu-check: torch finds no GPU on this machine; --device cpu tries the code itself")
        return NO_GPU
    size = SMALL if options.small else LARGE
    with tempfile.TemporaryDirectory() as folder:
        if options.one:
            bench = Bench(
                device,
                size,
                sums(Path(folder), documents=SMALL_DOCUMENTS if options.small else DOCUMENTS),
            )
            print(bench.train(bench.task())[0])
            bench.trainer.close()
            return 0
        rows = check(device, size, Path(folder), small=options.small)
    print("\n| what | figures | as it should |\n|---|---|---|")
    print(
        "\n".join(f"| {what} | {said} | {'yes' if good else 'NO'} |" for what, said, good in rows)
    )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    return 0 if all(good for _, _, good in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
