"""A DCGAN work unit beside a bare loop of the same steps: same networks, images and noise, on the
same thread, taking turns.

    python -m tests.benchmarks.bench_dcgan --json dcgan.json
    python -m tests.benchmarks.bench_dcgan --pairs 4 --size 64 --width 64

"ours" is the task as the volunteer's training thread drives it, one micro-batch after the other.
"bare" is the loop of the paper: discriminator on real images and fakes, generator on the same
fakes, two fused Adam optimisers, the images in memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from shared.workloads.base import Job
from shared.workloads.dcgan.config import DcganConfig
from shared.workloads.dcgan.model import build
from shared.workloads.training.seeded_random import normal
from tests.support.workloads.tiny_dcgan import WORKLOAD, config, digits, job, real_images
from tests.support.workloads.tiny_gpt import Folder, Weights

GOAL = 0.95


def bare(task: Job, images: torch.Tensor, weights: Weights) -> float:
    """Images a second of a plain loop."""
    model = build(DcganConfig.from_dict(task.config), weights, "cpu").train()
    adams = [
        torch.optim.Adam(network.parameters(), 2e-4, (0.5, 0.999), fused=True)
        for network in (model.discriminator, model.generator)
    ]
    latent, batch = int(task.config["latent"]), task.batch_size
    one, zero = torch.ones(batch), torch.zeros(batch)
    began = time.perf_counter()
    for step in range(task.steps):
        real = images[step * batch : (step + 1) * batch]
        noise = torch.from_numpy(normal(f"noise/{step}", task.seed, (batch, latent)))
        fakes = model.draw(noise)
        loss_d = F.binary_cross_entropy_with_logits(model.judge(real), one)
        loss_d = loss_d + F.binary_cross_entropy_with_logits(model.judge(fakes.detach()), zero)
        torch.autograd.backward(loss_d)
        if task.update == "delta":
            adams[0].step()
            adams[0].zero_grad(set_to_none=True)
        model.discriminator.requires_grad_(False)
        loss_g = F.binary_cross_entropy_with_logits(model.judge(fakes), one)
        torch.autograd.backward(loss_g)
        model.discriminator.requires_grad_(True)
        if task.update == "delta":
            adams[1].step()
            adams[1].zero_grad(set_to_none=True)
        float(loss_d.detach() + loss_g.detach())
    return task.steps * batch / (time.perf_counter() - began)


def ours(task: Job, data: Folder, weights: Weights) -> tuple[float, float]:
    """Images a second of a task, and the longest micro-batch in seconds."""
    work = WORKLOAD.begin(task, weights, data, "cpu")
    longest = 0.0
    began = last = time.perf_counter()
    while not work.done:
        work.advance()
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    return task.steps * task.batch_size / (last - began), longest


def measure(options: argparse.Namespace, update: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        data = digits(Path(directory), options.size)
        widths = {"generator_width": options.width, "discriminator_width": options.width}
        model = config(data, latent=100, **widths)
        task = job(model, options.steps, options.batch, update=update)
        images = real_images(data, model, 0, task.stop)
        weights = WORKLOAD.init(model, 0)
        pairs, longest = [], 0.0
        for turn in range(options.pairs + 1):
            plain = bare(task, images, weights)
            rate, slow = ours(task, data, weights)
            if turn:  # the first pair warms up
                pairs.append((rate, plain))
                longest = max(longest, slow)
    ratios = [rate / plain for rate, plain in pairs]
    return {
        "update": update,
        "size": options.size,
        "parameters": sum(s.count for s in WORKLOAD.schema(model) if s.role == "parameter"),
        "pairs": options.pairs,
        "ours_images_per_s": round(statistics.median(rate for rate, _ in pairs), 1),
        "bare_images_per_s": round(statistics.median(plain for _, plain in pairs), 1),
        "longest_s": round(longest, 3),
        "ratio": round(statistics.median(ratios), 3),
        "goal": GOAL,
        "reached": statistics.median(ratios) >= GOAL,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(options, update) for update in ("delta", "gradient")]
    for row in rows:
        print("\n".join(f"{name:18} {value}" for name, value in row.items()), end="\n\n")
    if options.json:
        options.json.write_text(json.dumps({"rows": rows}, indent=1))


if __name__ == "__main__":
    main()
