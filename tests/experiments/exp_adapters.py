"""The cost of averaging adapters: the mean of A and the mean of B are not the mean of the products.

    make experiments EXPERIMENT=adapters                          twenty minutes; a rerun goes on

Plain loops without a coordinator: a Llama of 0.25 M parameters learns the standard library's source
as bytes, then adapters of rank 8 beside all its matrices learn the descriptions of the installed
packages, in English. Four workers, ten rounds of 30 steps with a batch of four, inner state kept,
each rule at three learning rates. Controls: one worker alone, and one with the batch of all four.
"""

from __future__ import annotations

import hashlib
import itertools
import tempfile
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from shared.local_data import LocalData
from shared.workloads.base import TrainSettings
from shared.workloads.causal_lm.config import CausalConfig, Lora
from shared.workloads.causal_lm.init import from_nothing, initial
from shared.workloads.causal_lm.model import build
from shared.workloads.data.documents import Document, standard_library_documents
from shared.workloads.data.pass_order import PassOrder
from shared.workloads.data.text_dataset import build_text
from shared.workloads.data.token_loss import Reading, heldout_loss
from shared.workloads.data.windows import Windows, windows_of
from shared.workloads.training.lr_schedule import learning_rate
from shared.workloads.training.optimizer import InnerOptimizer
from tests.experiments.cells import Row, arguments, read, results, work_off

WORKERS, BATCH, STEPS, LOCAL_STEPS, BASE_STEPS = 4, 4, 300, 30, 1500
RATES = (2e-3, 4e-3, 8e-3)
RULES = (
    "alone",
    "data-parallel",
    "both",
    "B only",
    "B only, rank 16",
    "product",
    "product, turned",
)
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
    """A corpus as bytes, in chunks."""

    def __init__(self, folder: Path, documents: Iterator[Document]) -> None:
        files: dict[str, Path] = {}

        def put(data: bytes) -> str:
            name = hashlib.sha256(data).hexdigest()
            files[name] = folder / name
            files[name].write_bytes(data)
            return name

        self.manifest = build_text("text", documents, put, vocab_size=257)
        apart = msgspec.structs.replace(self.manifest, chunks=self.manifest.heldout, heldout=())
        self.data, self.heldout = LocalData(self.manifest, files), LocalData(apart, files)

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


def config(rank: int) -> CausalConfig:
    lora = {"rank": rank, "alpha": 16.0, "targets": list(MATRICES)}
    return CausalConfig.from_dict(MODEL | {"train": "lora", "lora": lora} if rank else MODEL)


class Worker:
    """A model that keeps the state of its optimiser from round to round."""

    def __init__(self, shape: CausalConfig, start: Weights, frozen: Weights | None) -> None:
        self.model = build(shape, start, frozen, "cpu")
        self.shape = shape
        every = self.model.module.named_parameters()
        self.parameters = {name: each for name, each in every if each.requires_grad}
        self.inner: dict[str, Tensor] | None = None

    def freeze(self, part: str) -> None:
        kept = {name: each for name, each in self.parameters.items() if part not in name}
        for name in self.parameters.keys() - kept.keys():
            self.parameters[name].requires_grad_(False)
        self.parameters = kept

    def train(self, batches: Iterator[Tensor], rate: float, first: int, count: int) -> Weights:
        steps = STEPS if self.shape.lora else BASE_STEPS
        settings = TrainSettings(lr=rate, warmup_steps=20, decay_steps=steps, weight_decay=0.0)
        optimizer = InnerOptimizer(self.parameters, settings)
        if self.inner is not None:
            optimizer.load(self.inner)
        self.model.module.train()
        for step in range(first, first + count):
            tokens = next(batches)
            torch.autograd.backward(self.model.loss(tokens))
            optimizer.step(learning_rate(settings, step, steps))
        self.inner = optimizer.state()
        return {name: value.detach().clone() for name, value in self.parameters.items()}

    @torch.no_grad()
    def take(self, weights: Weights) -> None:
        for name, value in self.parameters.items():
            value.copy_(weights[name])

    def loss(self, text: Text) -> float:
        reading = Reading(context=64, vocab_size=257, forward_flops=1e6)

        @torch.inference_mode()
        def one(rows: object) -> float:
            tokens = torch.as_tensor(rows)
            return float(self.model.loss(tokens))

        return heldout_loss(one, reading, text.heldout, 600.0, lambda: False)["loss"]


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
    rule, rate, seed = cell
    shape = config(16 if "16" in rule else 8)
    assert shape.lora is not None
    start = initial(shape, seed)
    if rule in ("alone", "data-parallel"):
        size = BATCH * (WORKERS if rule == "data-parallel" else 1)
        one = Worker(shape, start, frozen)
        one.train(text.batches(seed, size, STEPS), rate, 0, STEPS)
        return {"rule": rule, "rate": rate, "loss": one.loss(text)}
    workers = [Worker(shape, start, frozen) for _ in range(WORKERS)]
    batches = [text.batches(seed + 1 + each, BATCH, STEPS) for each in range(WORKERS)]
    for worker in workers:
        if rule.startswith("B only"):
            worker.freeze("lora_A")
    for first in range(0, STEPS, LOCAL_STEPS):
        ends = [
            worker.train(own, rate, first, LOCAL_STEPS)
            for worker, own in zip(workers, batches, strict=True)
        ]
        merged = mean(ends)
        if rule.startswith("product"):
            merged = product(ends, shape.lora, turned="turned" in rule)
        for worker in workers:
            worker.take(merged)
    return {"rule": rule, "rate": rate, "loss": workers[0].loss(text)}


def table(rows: dict[str, Row]) -> str:
    best: dict[str, list[float]] = {}
    for rule in RULES:
        seeds = {name.rpartition(" ")[2] for name in rows}
        of_rule = [row for row in rows.values() if row["rule"] == rule]
        if not of_rule:
            continue
        best[rule] = [
            min(row["loss"] for row in of_rule if row["cell"].endswith(seed))
            for seed in sorted(seeds)
        ]
    lines = ["| rule | loss | share of data-parallel's gain |", "|---|---|---|"]
    for rule, losses in best.items():
        shares = [
            (alone - loss) / (alone - parallel)
            for loss, alone, parallel in zip(
                losses, best["alone"], best["data-parallel"], strict=False
            )
        ]
        said = ", ".join(f"{loss:.4f}" for loss in losses)
        lines.append(f"| {rule} | {said} | {', '.join(f'{share:.0%}' for share in shares)} |")
    return "\n".join(lines)


def main() -> None:
    options = arguments("The cost of averaging adapters.")
    seeds = (0,) if options.quick else (0, 1)
    rates = RATES[1:2] if options.quick else RATES
    with tempfile.TemporaryDirectory() as folder:
        text = Text(Path(folder), descriptions())
        kept = options.out / "base.safetensors"
        frozen = base(Path(folder), kept)
        print("before", Worker(config(0), frozen, None).loss(text))
        cells = {
            f"{rule} {rate} {seed}": (rule, rate, seed)
            for seed in seeds
            for rule in RULES
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
