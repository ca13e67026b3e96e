"""AdamW or Muon as the inner optimiser, at equal device time.

    make experiments EXPERIMENT=speed                             half an hour; a rerun goes on

One worker without a coordinator, the built-in GPT in both shapes, the standard library's source as
bytes, warm-up over a tenth of the steps, then a cosine. AdamW makes its steps; Muon makes as many
as fit into the same processor time, by steps of both that take turns before each cell. Each has the
best of three learning rates by held-out texts, and is reported on other texts that no choice has
seen; the means of both are held against the number of steps that AdamW needs as well.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor

from shared.workloads.base import TrainSettings, load
from shared.workloads.data.local_data import LocalData
from shared.workloads.data.pass_order import PassOrder
from shared.workloads.data.windows import Windows, windows_of
from shared.workloads.gpt.config import GptConfig
from shared.workloads.gpt.model import build
from shared.workloads.training.lr_schedule import learning_rate
from shared.workloads.training.optimizer import InnerOptimizer
from tests.experiments.cells import Row, arguments, read, results, work_off
from tests.experiments.learning import corpus, unseen_chunks

BATCH, BLOCK = 16, 128
TRIALS = 6  # steps of each that are timed before a cell
SIZES: Mapping[str, tuple[int, int, int]] = {"0.1 M": (64, 2, 600), "0.4 M": (96, 4, 300)}
Inner = Literal["adamw", "muon"]
RATES: Mapping[Inner, tuple[float, ...]] = {
    "adamw": (4e-3, 8e-3, 16e-3),
    "muon": (8e-3, 16e-3, 32e-3),
}


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    size: str
    architecture: str
    optimizer: Inner
    rate: float
    seed: int

    @property
    def settings(self) -> TrainSettings:
        return TrainSettings(optimizer=self.optimizer, lr=self.rate)

    @property
    def model(self) -> dict[str, Any]:
        width, layers, _ = SIZES[self.size]
        return {
            "vocab_size": 257,
            "block_size": BLOCK,
            "n_layer": layers,
            "n_head": width // 32,
            "n_embd": width,
            "dropout": 0.0,
            "architecture": self.architecture,
        }


class Learner:
    """A model with its optimiser."""

    def __init__(self, cell: Cell, optimizer: str) -> None:
        config = GptConfig.from_dict(cell.model)
        self.model = build(config, load("gpt").init(cell.model, cell.seed), "cpu").train()
        self.train = msgspec.structs.replace(cell.settings, optimizer=optimizer)
        self.inner = InnerOptimizer(dict(self.model.named_parameters()), self.train)

    def step(self, tokens: Tensor, rate: float) -> None:
        torch.autograd.backward(self.model(tokens[:, :-1], tokens[:, 1:]))
        self.inner.step(rate)


def batches(data: LocalData, seed: int) -> Iterator[Tensor]:
    """(B, T + 1) tokens each, the same for the same seed."""
    order = PassOrder(windows_of(data.manifest, BLOCK), seed)
    for start in range(0, order.total - BATCH, BATCH):
        yield torch.from_numpy(
            Windows(data, BLOCK, 257, order.at(start, start + BATCH)).read(0, BATCH)
        )


def cost(cell: Cell, data: LocalData) -> float:
    """Return how much longer a step of the cell's optimiser takes than one of AdamW, by processor
    time, at best of some that take turns.
    """
    learners = {name: Learner(cell, name) for name in {"adamw", cell.optimizer}}
    best = dict.fromkeys(learners, float("inf"))
    feed = batches(data, cell.seed)
    for _ in range(TRIALS):
        tokens = next(feed)
        for name, learner in learners.items():
            began = time.process_time()
            learner.step(tokens, 1e-4)
            best[name] = min(best[name], time.process_time() - began)
    return best[cell.optimizer] / best["adamw"]


def trained(cell: Cell, texts: tuple[LocalData, LocalData, LocalData]) -> Row:
    data, heldout, test = texts
    ratio = cost(cell, data)
    whole = SIZES[cell.size][2]
    steps = round(whole / ratio)
    learner = Learner(cell, cell.optimizer)
    for step, tokens in zip(range(steps), batches(data, 100 + cell.seed), strict=False):
        learner.step(tokens, learning_rate(learner.train, step, steps))
    weights = {name: value.detach() for name, value in learner.model.named_parameters()}

    def loss(part: LocalData) -> float:
        return load("gpt").evaluate(cell.model, weights, part, 600.0, lambda: False)["loss"]

    told = msgspec.structs.asdict(cell)
    return {**told, "ratio": ratio, "steps": steps, "loss": loss(heldout), "test": loss(test)}


def table(rows: Mapping[str, Row]) -> str:
    """A line a model and optimiser: of each seed the rate that held-out texts chose."""
    chosen: dict[tuple[str, str, str, int], Row] = {}
    for row in sorted(rows.values(), key=lambda row: -row["loss"]):
        chosen[row["size"], row["architecture"], row["optimizer"], row["seed"]] = row
    lines = [
        "| model | optimiser | a step costs | steps | rate | loss on unseen texts |",
        "|---|---|---|---|---|---|",
    ]
    for size, architecture, optimizer in dict.fromkeys(sorted(key[:3] for key in chosen)):
        found = sorted(key for key in chosen if key[:3] == (size, architecture, optimizer))
        own = [chosen[key] for key in found]
        cells = (
            f"{architecture}, {size}",
            optimizer,
            ", ".join(f"{row['ratio']:.2f}" for row in own),
            ", ".join(f"{row['steps']:,}" for row in own),
            ", ".join(f"{row['rate']:g}" for row in own),
            ", ".join(f"{row['test']:.3f}" for row in own),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    options = arguments("AdamW or Muon as the inner optimiser, at equal device time.")
    manifest, blobs = corpus(options.out.parent, 0)
    folder = Path(options.out) / "blobs"
    folder.mkdir(exist_ok=True)
    for name, data in blobs.items():
        if not (folder / name).exists():
            (folder / name).write_bytes(data)
    unseen = unseen_chunks(options.out.parent, "code")
    for chunk in unseen:
        assert (options.out.parent / "pieces-0" / chunk.sha256).exists()
    files = {name: folder / name for name in blobs}

    def part(**changes: Any) -> LocalData:
        return LocalData(msgspec.structs.replace(manifest, **changes), files)

    texts = (
        part(),
        part(chunks=manifest.heldout, heldout=()),
        part(chunks=unseen, heldout=()),
    )
    cells = {
        f"{size} {architecture} {optimizer} {rate:g} s{seed}": Cell(
            size=size, architecture=architecture, optimizer=optimizer, rate=rate, seed=seed
        )
        for size in (("0.1 M",) if options.quick else SIZES)
        for seed in ((0,) if options.quick else (0, 1))
        for architecture in ("gpt2", "llama")
        for optimizer, rates in RATES.items()
        for rate in (rates[1:2] if options.quick else rates)
    }
    work_off(options, cells, lambda cell: trained(cell, texts))
    said = table(read(results(options)))
    (options.out / "table.md").write_text(said + "\n")
    print(said)


if __name__ == "__main__":
    main()
