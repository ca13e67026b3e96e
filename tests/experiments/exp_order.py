"""What the order of a pass costs in learning: how many chunks of text are shuffled together before
workers read them.

    make experiments EXPERIMENT=order                            about a quarter of an hour; a rerun goes on

Plain loops without a coordinator, so that nothing but the order differs: a GPT of 0.83 M parameters
on the standard library's source as bytes, 300 steps of one worker with the batch of four as the
warm start (over all chunks), then 300 more the same way, or 30 rounds of four workers with ten
steps each and an outer Nesterov step of 0.7 and momentum 0.9.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shared.workloads.base import DatasetManifest, TrainSettings
from shared.workloads.data.documents import standard_library_documents
from shared.workloads.data.local_data import LocalData
from shared.workloads.data.pass_order import PassOrder
from shared.workloads.data.text_dataset import build_text
from shared.workloads.data.windows import Windows, windows_of
from shared.workloads.gpt.config import GptConfig
from shared.workloads.gpt.model import build
from shared.workloads.gpt.workload import GptWorkload
from shared.workloads.training.lr_schedule import learning_rate
from shared.workloads.training.optimizer import InnerOptimizer
from tests.experiments.cells import Row, arguments, read, results, work_off
from tests.experiments.learning import BYTES, PROBE

WORKERS, BATCH, STEPS, WARM = 4, 4, 600, 300
LOCAL_STEPS, LR, MOMENTUM = 10, 0.7, 0.9
TRAIN = TrainSettings(lr=1e-3, warmup_steps=40, decay_steps=STEPS)
EVERYWHERE = 10**6  # chunks
WORKLOAD = GptWorkload()
Weights = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Text:
    """The corpus in chunks of the usual size, whole documents one after the other."""

    manifest: DatasetManifest
    data: LocalData
    heldout: LocalData

    @property
    def config(self) -> GptConfig:
        return GptConfig.from_dict(WORKLOAD.config(PROBE, self.manifest))

    def loss(self, weights: Weights) -> float:
        model = WORKLOAD.config(PROBE, self.manifest)
        return WORKLOAD.evaluate(model, weights, self.heldout, 600.0, lambda: False)["loss"]

    def batches(self, mix: int, seed: int, size: int, first: int) -> Iterator[Tensor]:
        """(size, T + 1) tokens each, from sample `first` of the pass on."""
        config = self.config
        order = PassOrder(windows_of(self.manifest, config.block_size), seed, mix)
        stop = first + STEPS * WORKERS * BATCH
        rows = order.at(first, stop)
        windows = Windows(self.data, config.block_size, config.vocab_size, rows)
        for start in range(0, len(rows), size):
            yield torch.from_numpy(windows.read(start, start + size))


def text(folder: Path) -> Text:
    """The standard library's source, built into `folder`."""
    files: dict[str, Path] = {}

    def put(data: bytes) -> str:
        name = hashlib.sha256(data).hexdigest()
        files[name] = folder / name
        files[name].write_bytes(data)
        return name

    manifest = build_text("stdlib", standard_library_documents(), put, vocab_size=BYTES)
    apart = msgspec.structs.replace(manifest, chunks=manifest.heldout, heldout=())
    return Text(manifest=manifest, data=LocalData(manifest, files), heldout=LocalData(apart, files))


def steps(
    weights: Weights, inner: Weights | None, batches: Iterator[Tensor], first: int, count: int
) -> tuple[Weights, Weights]:
    """Weights and inner state after so many steps from global step `first` on."""
    model = build(GptConfig.from_dict(PROBE | {"vocab_size": BYTES}), weights, "cpu").train()
    parameters = dict(model.named_parameters())
    optimizer = InnerOptimizer(parameters, TRAIN)
    if inner is not None:
        optimizer.load(inner)
    for step in range(first, first + count):
        tokens = next(batches)
        loss: Tensor = model(tokens[:, :-1], tokens[:, 1:])
        torch.autograd.backward(loss)
        optimizer.step(learning_rate(TRAIN, step, STEPS))
    return {name: value.detach() for name, value in parameters.items()}, optimizer.state()


def data_parallel(corpus: Text, start: Weights, mix: int) -> float:
    size, first = WORKERS * BATCH, WARM * WORKERS * BATCH
    ended, _ = steps(start, None, corpus.batches(mix, 1, size, first), WARM, STEPS - WARM)
    return corpus.loss(ended)


def diloco(corpus: Text, start: Weights, mix: int) -> float:
    """Liu et al. 2023: local AdamW, the mean of the differences through an outer Nesterov step."""
    master = {name: value.clone() for name, value in start.items()}
    momentum = {name: torch.zeros_like(value) for name, value in start.items()}
    inner: list[Weights | None] = [None] * WORKERS
    batches = corpus.batches(mix, 1, BATCH, WARM * WORKERS * BATCH)
    for first in range(WARM, STEPS, LOCAL_STEPS):
        mean = {name: torch.zeros_like(value) for name, value in master.items()}
        for worker in range(WORKERS):
            local, inner[worker] = steps(master, inner[worker], batches, first, LOCAL_STEPS)
            for name, value in local.items():
                mean[name] += (master[name] - value) / WORKERS
        for name, update in mean.items():
            momentum[name].mul_(MOMENTUM).add_(update)
            master[name] -= LR * (update + MOMENTUM * momentum[name])
    return corpus.loss(master)


def warm_start(corpus: Text, path: Path) -> Weights:
    """300 steps over text from everywhere, kept for the other cells."""
    if not path.exists():
        size = WORKERS * BATCH
        fresh = WORKLOAD.init(WORKLOAD.config(PROBE, corpus.manifest), 0)
        found, _ = steps(fresh, None, corpus.batches(EVERYWHERE, 0, size, 0), 0, WARM)
        save_file(found, path)
    return load_file(path)


def main() -> None:
    options = arguments(__doc__ or "")
    with tempfile.TemporaryDirectory() as folder:
        corpus = text(Path(folder))
        start = warm_start(corpus, options.out / "warm.safetensors")

        def work(mix: int) -> Row:
            parallel, outer = data_parallel(corpus, start, mix), diloco(corpus, start, mix)
            return {"data_parallel": round(parallel, 4), "diloco": round(outer, 4)}

        cells = {"4 chunks": 4, "16 chunks": 16, "64 chunks": 64, "all": EVERYWHERE}
        work_off(options, cells, work)
    print("| shuffled together | data-parallel | diloco H 10, K 4 |\n|---|---|---|")
    for name, row in read(results(options)).items():
        print(f"| {name} | {row['data_parallel']:.4f} | {row['diloco']:.4f} |")


if __name__ == "__main__":
    main()
