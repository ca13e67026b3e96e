"""The cost of averaging adapters: the mean of A and the mean of B are not the mean of the products.

    make experiments EXPERIMENT=adapters                          twenty minutes; a rerun goes on

Plain loops without a coordinator: a Llama of 0.25 M parameters learns the standard library's source
as bytes, then adapters of rank 8 beside all its matrices learn the descriptions of the installed
packages, in English. Four workers, 600 steps each in rounds of 30 with a batch of four, inner state
kept. Controls: one worker alone, and one with the batch of all four. Every rule, the controls
among them, has the best of three learning rates by held-out texts, and is reported on other texts
that no choice has seen.
"""

from __future__ import annotations

import hashlib
import itertools
import tempfile
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.workloads.base import TrainSettings
from shared.workloads.causal_lm.base_model import from_nothing, initial
from shared.workloads.causal_lm.config import CausalConfig, Lora
from shared.workloads.causal_lm.model import build
from shared.workloads.data.documents import Document, standard_library_documents
from shared.workloads.data.local_data import LocalData
from shared.workloads.data.pass_order import PassOrder
from shared.workloads.data.text_dataset import build_text
from shared.workloads.data.token_loss import Reading, heldout_loss
from shared.workloads.data.windows import Windows, windows_of
from shared.workloads.training.lr_schedule import learning_rate
from shared.workloads.training.optimizer import InnerOptimizer
from tests.experiments.cells import Row, arguments, read, results, work_off

WORKERS, BATCH, STEPS, LOCAL_STEPS, BASE_STEPS = 4, 4, 600, 30, 1500
RATES = (4e-3, 8e-3, 16e-3)
RANK = 8


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """One way to train adapters; without `workers` one batch of four times the size."""

    workers: int = WORKERS
    batch: int = BATCH
    rank: int = RANK
    alpha: float = 16.0
    trains: Literal["both", "B", "in turns"] = "both"
    merge: Literal["mean", "product", "product, turned"] = "mean"
    warm_steps: int = 0  # of each worker, in rounds of `warm_local`, averaged plainly
    warm_local: int = 10
    outer_rate: float = 1.0  # Nesterov on the mean, after those
    momentum: float = 0.0
    inner: Literal["keep", "mean", "reset"] = "keep"  # state of Adam at the beginning of a round

    def local_at(self, done: int) -> int:
        """Return how many local steps the round has that begins after so many."""
        return self.warm_local if done < self.warm_steps else min(LOCAL_STEPS, STEPS - done)


RULES: dict[str, Rule] = {
    "alone": Rule(workers=1),
    "data-parallel": Rule(workers=1, batch=WORKERS * BATCH),
    "both": Rule(),
    "both, in rounds of 10": Rule(warm_steps=STEPS),
    "10 x 10 first": Rule(warm_steps=100),
    "10 x 10 first, momentum 0.5": Rule(warm_steps=100, momentum=0.5),
    "10 x 10 first, diloco": Rule(warm_steps=100, outer_rate=0.7, momentum=0.9),
    "10 x 10 first, momentum 0.8": Rule(warm_steps=100, outer_rate=0.7, momentum=0.8),
    "momentum 0.5": Rule(momentum=0.5),
    "momentum 0.7": Rule(momentum=0.7),
    "diloco, rate 0.7, momentum 0.8": Rule(outer_rate=0.7, momentum=0.8),
    "alpha 64": Rule(alpha=64.0),
    "alpha 64, alone": Rule(alpha=64.0, workers=1),
    "alpha 64, data-parallel": Rule(alpha=64.0, workers=1, batch=WORKERS * BATCH),
    "rank 16": Rule(rank=16),
    "inner states averaged": Rule(inner="mean"),
    "inner states reset": Rule(inner="reset"),
    "A and B in turns": Rule(trains="in turns"),
    "B only": Rule(trains="B"),
    "B only, rank 16": Rule(trains="B", rank=16),
    "product": Rule(merge="product"),
    "product, turned": Rule(merge="product, turned"),
}
MODEL = {
    "config": {
        "model_type": "llama",
        "vocab_size": 257,
        "hidden_size": 96,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
    "context": 64,
}
MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
Weights = dict[str, Tensor]


class Text:
    """A corpus as bytes, in chunks; every sixteenth document is kept for the report."""

    def __init__(self, folder: Path, documents: Iterator[Document]) -> None:
        files: dict[str, Path] = {}

        def put(data: bytes) -> str:
            name = hashlib.sha256(data).hexdigest()
            files[name] = folder / name
            files[name].write_bytes(data)
            return name

        learnt, unseen = list[Document](), list[Document]()
        for each in documents:
            mark = hashlib.sha256(each.name.encode()).digest()[0] % 16
            (learnt if mark else unseen).append(each)
        self.manifest = build_text("text", learnt, put, vocab_size=257)
        apart = msgspec.structs.replace(self.manifest, chunks=self.manifest.heldout, heldout=())
        last = build_text("test", unseen, put, vocab_size=257, heldout_share=0.001)
        self.data, self.heldout = LocalData(self.manifest, files), LocalData(apart, files)
        self.test = LocalData(last, files)

    def batches(self, seed: int, size: int, count: int) -> Iterator[Tensor]:
        """(size, T + 1) tokens each, the same for the same seed; a short text begins anew."""
        counts = windows_of(self.manifest, 64)
        made = 0
        for turn in itertools.count():
            order = PassOrder(counts, seed + 1000 * turn)
            rows = order.at(0, min(order.total, (count - made) * size) // size * size)
            windows = Windows(self.data, 64, 257, rows)
            for start in range(0, len(rows), size):
                yield torch.from_numpy(windows.read(start, start + size))
                made += 1
            if made >= count:
                return


def descriptions() -> Iterator[Document]:
    """Yield the descriptions of the installed packages."""
    for found in sorted(distributions(), key=lambda each: each.name):
        yield Document(found.name, str(found.metadata.json.get("description", "")))


def config(rank: int, alpha: float = 16.0) -> CausalConfig:
    lora = {"rank": rank, "alpha": alpha, "targets": list(MATRICES)}
    return CausalConfig.from_dict(MODEL | {"train": "lora", "lora": lora} if rank else MODEL)


class Worker:
    """A model that keeps the state of its optimiser from round to round."""

    def __init__(self, shape: CausalConfig, start: Weights, frozen: Weights | None) -> None:
        self.model = build(shape, start, frozen, "cpu")
        self.shape = shape
        every = self.model.module.named_parameters()
        self.parameters = {name: each for name, each in every if each.requires_grad}
        self.inner: dict[str, Tensor] | None = None

    def learn(self, *parts: str) -> None:
        """Train these parts of the adapters from now on; the others stay as they are."""
        for name, value in self.parameters.items():
            value.requires_grad_(any(part in name for part in parts))

    def train(self, batches: Iterator[Tensor], rate: float, first: int, count: int) -> Weights:
        steps = STEPS if self.shape.lora else BASE_STEPS
        settings = TrainSettings(lr=rate, warmup_steps=20, decay_steps=steps, weight_decay=0.0)
        learnt = {name: each for name, each in self.parameters.items() if each.requires_grad}
        optimizer = InnerOptimizer(learnt, settings)
        if self.inner is not None:
            optimizer.load(self.inner)
        self.model.module.train()
        for step in range(first, first + count):
            tokens = next(batches)
            torch.autograd.backward(self.model.loss(tokens).loss)
            optimizer.step(learning_rate(settings, step, steps))
        self.inner = {**(self.inner or {}), **optimizer.state()}
        return {name: value.detach().clone() for name, value in self.parameters.items()}

    @torch.no_grad()
    def take(self, weights: Weights) -> None:
        for name, value in self.parameters.items():
            value.copy_(weights[name])

    def loss(self, data: LocalData) -> float:
        reading = Reading(context=64, vocab_size=257, forward_flops=1e6)

        @torch.inference_mode()
        def losses(rows: NDArray[np.int64]) -> NDArray[np.float32]:
            return self.model.losses(torch.as_tensor(rows), marked=False).numpy()

        return heldout_loss(losses, reading, data, 600.0, lambda: False)["loss"]


def mean(every: list[Weights]) -> Weights:
    return {name: torch.stack([each[name] for each in every]).mean(0) for name in every[0]}


def product(every: list[Weights], lora: Lora, *, turned: bool) -> Weights:
    """The best factors of the mean product; `turned` as near to the mean factors as they can be
    without changing it, so that the state of the optimiser still fits.
    """
    plain, found = mean(every), dict[str, Tensor]()
    for name in plain:
        if not name.endswith("lora_A.weight"):
            continue
        other = name.replace("lora_A", "lora_B")
        whole = torch.stack([each[other] @ each[name] for each in every]).mean(0)
        u, s, v = torch.linalg.svd(whole, full_matrices=False)
        root = s[: lora.rank].sqrt()
        b, a = u[:, : lora.rank] * root, root[:, None] * v[: lora.rank]
        if turned:  # the nearest rotation (Schoenemann 1966)
            left, _, right = torch.linalg.svd(plain[name] @ a.T + plain[other].T @ b)
            turn = left @ right
            b, a = b @ turn.T, turn @ a
        found[name], found[other] = a, b
    return {name: found[name] for name in plain}


def rounds(cell: tuple[str, float, int], text: Text, frozen: Weights) -> Row:
    named, rate, seed = cell
    rule = RULES[named]
    shape = config(rule.rank, rule.alpha)
    assert shape.lora is not None
    start = initial(shape, seed)
    workers = [Worker(shape, start, frozen) for _ in range(rule.workers)]
    first_seed = seed + (rule.workers > 1)
    batches = [text.batches(first_seed + n, rule.batch, STEPS) for n in range(rule.workers)]
    current, outer = start, Outer(rule)
    done = turn = 0
    while done < STEPS:
        count = STEPS if rule.workers == 1 else rule.local_at(done)
        for worker in workers:
            begin(worker, rule, turn)
        ends = [
            worker.train(own, rate, done, count)
            for worker, own in zip(workers, batches, strict=True)
        ]
        merged = mean(ends)
        if rule.merge != "mean":
            merged = product(ends, shape.lora, turned="turned" in rule.merge)
        current = outer.step(current, merged, warm=done < rule.warm_steps)
        if rule.inner == "mean":
            steps = workers[0].inner or {}
            states = [worker.inner or {} for worker in workers]
            shared = mean([{n: v for n, v in each.items() if n != "steps"} for each in states])
            for worker in workers:
                worker.inner = {**shared, "steps": steps["steps"]}
        for worker in workers:
            worker.take(current)
        done, turn = done + count, turn + 1
    one = workers[0]
    return {
        "rule": named,
        "rate": rate,
        "seed": seed,
        "loss": one.loss(text.heldout),
        "test": one.loss(text.test),
    }


def begin(worker: Worker, rule: Rule, turn: int) -> None:
    """Prepare a worker for a round."""
    if rule.trains == "B" or (rule.trains == "in turns" and turn % 2):
        worker.learn("lora_B")
    elif rule.trains == "in turns":
        worker.learn("lora_A" if turn else "lora_B")
    if rule.inner == "reset":
        worker.inner = None


class Outer:
    """The server's optimiser: SGD with Nesterov momentum on the mean of a round."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._held: Weights = {}

    def step(self, base: Weights, mean_end: Weights, *, warm: bool) -> Weights:
        if warm or (self._rule.momentum == 0.0 and self._rule.outer_rate == 1.0):
            return mean_end
        m, found = self._rule.momentum, dict[str, Tensor]()
        for name, value in base.items():
            gradient = value - mean_end[name]
            held = m * self._held.get(name, torch.zeros_like(value)) + gradient
            self._held[name] = held
            found[name] = value - self._rule.outer_rate * (gradient + m * held)
        return found


def table(rows: dict[str, Row]) -> str:
    """A line a rule: of each seed the rate that held-out texts chose, reported on the others."""
    lines = [
        "| rule | rate chosen | loss on unseen texts | share of data-parallel's gain | mean |",
        "|---|---|---|---|---|",
    ]
    chosen: dict[tuple[str, int], Row] = {}
    for row in sorted(rows.values(), key=lambda row: -row["loss"]):
        chosen[row["rule"], row["seed"]] = row
    for rule in RULES:
        seeds = sorted(seed for name, seed in chosen if name == rule)
        own = [chosen[rule, seed] for seed in seeds]
        shares = [
            (alone["test"] - row["test"]) / (alone["test"] - parallel["test"])
            for row in own
            if (alone := chosen.get(("alone", row["seed"])))
            and (parallel := chosen.get(("data-parallel", row["seed"])))
        ]
        if not own:
            continue
        cells = (
            rule,
            ", ".join(f"{row['rate']:g}" for row in own),
            ", ".join(f"{row['test']:.4f}" for row in own),
            ", ".join(f"{share:.0%}" for share in shares),
            f"{sum(shares) / len(shares):.0%}" if shares else "-",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    options = arguments("The cost of averaging adapters.")
    seeds = (0,) if options.quick else (0, 1, 2)
    rates = RATES[1:2] if options.quick else RATES
    with tempfile.TemporaryDirectory() as folder:
        text = Text(Path(folder), descriptions())
        kept = options.out / "base.safetensors"
        frozen = base(Path(folder), kept)
        print("before", Worker(config(0), frozen, None).loss(text.heldout))
        cells = {
            f"{rule} {rate} {seed}": (rule, rate, seed)
            for rule in RULES
            for seed in seeds
            for rate in rates
        }
        work_off(options, cells, lambda cell: rounds(cell, text, frozen))
    said = table(read(results(options)))
    (options.out / "table.md").write_text(said + "\n")
    print(said)


def base(folder: Path, kept: Path) -> Weights:
    """The model that adapters go with, trained once."""
    from safetensors.torch import load_file, save_file

    if kept.exists():
        return load_file(kept)
    source = Text(folder, standard_library_documents())
    one = Worker(config(0), from_nothing(config(0).shape, 0), None)
    found = one.train(source.batches(9, 8, BASE_STEPS), 2e-3, 0, BASE_STEPS)
    save_file(found, kept)
    return found


if __name__ == "__main__":
    main()
