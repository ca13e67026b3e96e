"""The volunteer's training loop beside a bare PyTorch loop: same model, same data, same thread,
taking turns.

    python -m tests.benchmarks.bench_training --json training.json
    python -m tests.benchmarks.bench_training --pairs 4 --steps 20

"ours" is a task on the volunteer's background thread, with reports into an event loop that turns
them into events and lines as `volunteer --no-ui` does, and a heartbeat's JSON four times a second
(in earnest: twice a minute). "bare" is forward, backward, clip, fused AdamW over the same windows,
the loss read every ten steps. Each side starts from the same weights.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import torch

from shared.protocol.heartbeat import HeartbeatRequest, TaskBeat
from shared.workloads.base import Job, TrainSettings
from shared.workloads.data.pass_order import PassOrder
from shared.workloads.data.windows import Windows, task_samples, windows_of
from shared.workloads.gpt.config import GptConfig
from shared.workloads.gpt.model import build
from tests.benchmarks.reports import training
from tests.support.workloads.tiny_gpt import WORKLOAD, Folder, job, sums
from volunteer.control.event_sentences import words
from volunteer.training.job import TrainingJob, TrainingReport
from volunteer.training.trainer import Trainer

GOAL = 0.97
MODEL = {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 64, "dropout": 0.0}
BATCH = 16


def bare(task: Job, data: Folder, weights: dict[str, torch.Tensor]) -> float:
    """Tokens a second of a plain loop."""
    config = GptConfig.from_dict(task.config)
    model = build(config, weights, "cpu").train()
    rows = task_samples(
        PassOrder(windows_of(data.manifest, config.block_size), task.order_seed),
        task.start,
        task.stop,
        task.steps,
        task.batch_size,
    )
    windows = Windows(data, config.block_size, config.vocab_size, rows)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True)
    began = time.perf_counter()
    for step in range(task.steps):
        rows_of_step = torch.from_numpy(windows.read(step * BATCH, (step + 1) * BATCH))
        x, y = rows_of_step[:, :-1], rows_of_step[:, 1:]  # (B, T)
        loss = model(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 10 == 9:
            loss.item()
    return task.steps * BATCH * config.block_size / (time.perf_counter() - began)


async def ours(
    trainer: Trainer, task: Job, data: Folder, weights: dict[str, torch.Tensor]
) -> float:
    """Tokens a second of the volunteer's loop, events and heartbeats on."""
    loop = asyncio.get_running_loop()
    lines: list[str] = []
    spent: list[float] = []

    def tell(report: TrainingReport) -> None:
        event = training(report)
        lines.append(f"{words(event)} {len(msgspec.json.encode(event))}")

    def pass_on(report: TrainingReport) -> None:
        loop.call_soon_threadsafe(tell, report)

    async def beat() -> None:
        while True:
            said = HeartbeatRequest(tasks=(TaskBeat(task=1, attempt=1),))
            lines.append(msgspec.json.encode(said).decode())
            await asyncio.sleep(0.25)

    beating = asyncio.create_task(beat())
    handle = trainer.submit(
        TrainingJob(
            device="cpu",
            begin=lambda: WORKLOAD.begin(task, weights, data, "cpu"),
            finish=lambda work, took: spent.append(took.train_s),
            samples=task.stop - task.start,
            report=pass_on,
            halved=lambda micro: None,
        )
    )
    await asyncio.wrap_future(handle.future)
    beating.cancel()
    return task.steps * BATCH * MODEL["block_size"] / spent[0]


async def measure(pairs: int, steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        data = sums(Path(directory), documents=120)
        model = WORKLOAD.config(MODEL, data.manifest)
        total = sum(WORKLOAD.samples(model, data.manifest))
        steps = min(steps, total // BATCH)
        task = job(model, steps, BATCH, start=0, stop=steps * BATCH, train=TrainSettings(lr=1e-3))
        weights = WORKLOAD.init(model, 0)
        trainer = Trainer("cpu", threads=1)
        trainer.start()
        ratios, rates = [], []
        for turn in range(pairs + 1):
            plain = rate = 0.0
            for side in ("bare", "ours") if turn % 2 else ("ours", "bare"):
                if side == "bare":
                    alone = trainer.call(lambda: bare(task, data, weights))
                    plain = await asyncio.wrap_future(alone)
                else:
                    rate = await ours(trainer, task, data, weights)
            if turn:  # the first pair warms up
                ratios.append(rate / plain)
                rates.append((rate, plain))
        trainer.close()
    ratio = statistics.median(ratios)
    return {
        "parameters": sum(spec.count for spec in WORKLOAD.schema(model)),
        "pairs": pairs,
        "steps": steps,
        "ours_tokens_per_s": round(statistics.median(rate for rate, _ in rates)),
        "bare_tokens_per_s": round(statistics.median(plain for _, plain in rates)),
        "ratio": round(ratio, 3),
        "ratio_min": round(min(ratios), 3),
        "ratio_max": round(max(ratios), 3),
        "goal": GOAL,
        "reached": ratio >= GOAL,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    row = asyncio.run(measure(options.pairs, options.steps))
    print("\n".join(f"{name:18} {value}" for name, value in row.items()))
    if options.json:
        options.json.write_text(json.dumps({"rows": [row]}, indent=1))


if __name__ == "__main__":
    main()
